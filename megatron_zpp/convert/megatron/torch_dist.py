"""Megatron-LM's `torch_dist` format: tensors by torch.distributed.checkpoint, whole whatever ranks wrote them.

    iter_0000100/metadata.json       names the format
    iter_0000100/common.pt           flags, counters, and what else is no tensor
    iter_0000100/.metadata           where each part of each tensor lies: a pickle
    iter_0000100/__RANK_NUMBER.distcp    the parts, as torch.save writes each

Layers that are alike are one tensor [layers, …] under a name without their number. The optimizer's state of a tensor
has its name behind a prefix, where it is kept whole: with --dist-ckpt-optim-fully-reshardable, or without a distributed
optimizer.
"""

from __future__ import annotations

import io
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.folder import KINDS
from megatron_zpp.checkpoint.meta import is_plain_name

from .config import MOMENTS, Saved, args_in
from .names import canonical, in_layer
from .pickles import load_file, load_metadata, load_part

COMMON, METADATA, FORMAT = "common.pt", ".metadata", "metadata.json"
_OPTIMIZER = re.compile(r"^(?:chained_[0-9]+\.)?optimizer\.(?:[\w.]*\.)?state\.(exp_avg_sq|exp_avg|fp32_param|param)\.")
_OTHER = re.compile(r"^(?:chained_[0-9]+\.)?(optimizer|rng_state|rerun_state_machine)(\.|/|$)")


@dataclass(frozen=True)
class _Part:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class _Stored:
    """A tensor in the files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[_Part]


@dataclass(frozen=True)
class _Place:
    """A tensor of a model: one of the files', or a layer of it."""

    name: str
    layer: int | None


def open_torch_dist(folder: Path) -> Saved:
    """Open a checkpoint of the format torch_dist. Raises CheckpointError."""
    common = load_file(folder / COMMON)
    args = args_in(common, str(folder / COMMON))
    stored = _parse(load_metadata(folder / METADATA), folder / METADATA)
    layers = args.get("num_layers")
    weights: dict[str, _Place] = {}
    states: dict[str, dict[str, _Place]] = {kind: {} for kind in (*MOMENTS, "fp32_param", "param")}
    for name, tensor in stored.items():
        found = _OPTIMIZER.match(name)
        if found is None and _OTHER.match(name):
            continue
        target = weights if found is None else states[found[1]]
        target.update(_places(name, name[found.end() :] if found else name, tensor, layers))
    # Weights in 16 bit have their fp32 masters in the optimizer's state.
    masters = states["fp32_param"] or states["param"]
    moments = all(
        name in states[moment] and _shape(stored, states[moment][name]) == _shape(stored, place)
        for name, place in weights.items()
        for moment in MOMENTS
    )
    has_masters = moments and masters.keys() >= weights.keys()

    def read(name: str, moment: str) -> Tensor:
        places = states[moment] if moment else masters if has_masters else weights
        place = places[name]
        return _read(folder, place, stored[place.name])

    step = _step(common.get("optimizer"))
    return Saved(
        str(folder),
        KINDS["torch_dist"],
        args,
        common,
        frozenset(weights),
        read,
        moments,
        steps=lambda name: step,
    )


def _parse(metadata: Any, path: Path) -> dict[str, _Stored]:
    """Raise CheckpointError unless every tensor has a shape, a dtype, and parts that lie somewhere."""
    try:
        where = {
            (index.fqn, tuple(index.offset)): info
            for index, info in metadata.storage_data.items()
            if getattr(index, "offset", None) is not None
        }
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                continue  # an object, as random states
            dtype, shape = entry.properties.args[0], _sizes(entry.size)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has no dtype")
            parts = []
            for chunk in entry.chunks:
                offsets, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
                info = where[name, offsets]
                if not is_plain_name(info.relative_path):
                    raise ValueError(f"{reprlib.repr(info.relative_path)} is no file of the checkpoint")
                if getattr(info, "transform_descriptors", None):
                    raise ValueError(f"{name} is compressed ({info.transform_descriptors})")
                begin, length = _sizes((info.offset, info.length))
                parts.append(_Part(offsets, sizes, info.relative_path, begin, length))
                if len(offsets) != len(shape) or any(o + s > t for o, s, t in zip(offsets, sizes, shape, strict=True)):
                    raise ValueError(f"a part of {name} lies outside of it")
            if sum(math.prod(part.shape) for part in parts) != math.prod(shape):
                raise ValueError(f"parts of {name} are missing, or there are too many")
            tensors[str(name)] = _Stored(dtype, shape, parts)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return tensors


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or any(
        type(value) is not int or not 0 <= value < 2**60 for value in values
    ):
        raise ValueError(f"{reprlib.repr(values)} is no shape")
    return tuple(values)


def _places(name: str, key: str, tensor: _Stored, layers: Any) -> dict[str, _Place]:
    """Canonical names of a stored tensor, or of the layers in it. key: its name without an optimizer's prefix."""
    new = canonical(key)
    if new is None:
        return {}
    if not re.match(r"decoder\.layers\.(?![0-9]+\.)", new):
        return {new: _Place(name, None)}
    if not tensor.shape or tensor.shape[0] != layers:
        raise CheckpointError(f"{name} is {list(tensor.shape)}: it should have num_layers = {layers} layers")
    numbered = new.replace("decoder.layers.", "decoder.layers.0.", 1)
    return {in_layer(numbered, layer): _Place(name, layer) for layer in range(tensor.shape[0])}


def _shape(stored: Mapping[str, _Stored], place: _Place) -> tuple[int, ...]:
    shape = stored[place.name].shape
    return shape if place.layer is None else shape[1:]


def _read(folder: Path, place: _Place, tensor: _Stored) -> Tensor:
    """A whole tensor, or one layer of it. Raises CheckpointError."""
    layer = place.layer
    parts = [part for part in tensor.parts if layer is None or 0 <= layer - part.offsets[0] < part.shape[0]]
    for part in parts:  # before memory is asked for
        path = folder / part.file
        if not path.is_file():
            raise CheckpointError(f"{folder} is not complete: {part.file} is missing, with parts of {place.name}")
        nbytes = math.prod(part.shape) * tensor.dtype.itemsize
        if part.length < nbytes or path.stat().st_size < part.begin + part.length:
            raise CheckpointError(f"{path} is damaged: it is cut short")
    whole = torch.empty(tensor.shape if layer is None else (1, *tensor.shape[1:]), dtype=tensor.dtype)
    for part in parts:
        offsets, values = part.offsets, _read_part(folder, place.name, tensor, part)
        if layer is not None:
            row = layer - offsets[0]
            offsets, values = (0, *offsets[1:]), values[row : row + 1]
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
    return whole if layer is None else whole[0]


def _read_part(folder: Path, name: str, tensor: _Stored, part: _Part) -> Tensor:
    path = folder / part.file
    with open(path, "rb") as file:
        file.seek(part.begin)
        content = file.read(part.length)
    values = load_part(io.BytesIO(content), path)
    if not isinstance(values, Tensor) or values.dtype != tensor.dtype or values.numel() != math.prod(part.shape):
        raise CheckpointError(f"{path} is damaged: a part of {name} is not what {METADATA} says")
    return values.view(part.shape)


def _step(optimizer: Any) -> int | None:
    """Adam's, of what common.pt has of the optimizer; it is the same for all parameters."""
    waiting = [optimizer]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for key in ("common_step", "step"):
                if isinstance(step := value.get(key), int | float | Tensor):
                    return int(step)
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return None
