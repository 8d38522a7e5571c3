"""Read Megatron-LM's `torch_dist` format: tensors by torch.distributed.checkpoint, whole on any ranks.

    iter_0000100/metadata.json           names the format
    iter_0000100/common.pt               flags, counters, and all else that is no tensor
    iter_0000100/.metadata               a pickle that locates each shard of each tensor
    iter_0000100/__RANK_NUMBER.distcp    shards, as torch.save writes each

Layers of one shape are stacked as a tensor [layers, …], under a name without layer number. The optimizer's state of a
tensor has its name behind a prefix, if it is stored whole: with --dist-ckpt-optim-fully-reshardable, or without a
distributed optimizer.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.folder import KINDS
from megatron_zpp.checkpoint.meta import is_plain_name

from .config import MOMENTS, Saved, args_in
from .pickles import load, load_file, load_metadata
from .weights import canonical, rename_layer

COMMON, METADATA, FORMAT = "common.pt", ".metadata", "metadata.json"
_OPTIMIZER = re.compile(r"^(?:chained_[0-9]+\.)?optimizer\.(?:[\w.]*\.)?state\.(exp_avg_sq|exp_avg|fp32_param|param)\.")
_OTHER = re.compile(r"^(?:chained_[0-9]+\.)?(optimizer|rng_state|rerun_state_machine)(\.|/|$)")


@dataclass(frozen=True)
class _Shard:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class _Stored:
    """A tensor in the files."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: list[_Shard]


_Place = tuple[_Stored, int | None]  # a tensor of the model: a stored one, or a layer of it


def open_torch_dist(folder: Path) -> Saved:
    """Open a checkpoint of the format torch_dist. Raises CheckpointError."""
    common = load_file(folder / COMMON)
    args = args_in(common, str(folder / COMMON))
    weights: dict[str, _Place] = {}
    states: dict[str, dict[str, _Place]] = {kind: {} for kind in (*MOMENTS, "fp32_param", "param")}
    for tensor in _parse(load_metadata(folder / METADATA), folder / METADATA):
        found = _OPTIMIZER.match(tensor.name)
        if found is None and _OTHER.match(tensor.name):
            continue
        target = weights if found is None else states[found[1]]
        target.update(_places(tensor.name[found.end() if found else 0 :], tensor, args.get("num_layers")))
    masters = states["fp32_param"] or states["param"]  # fp32 copies of 16-bit weights
    has_moments = all(
        name in states[moment] and _shape(states[moment][name]) == _shape(place)
        for name, place in weights.items()
        for moment in MOMENTS
    )
    has_masters = has_moments and masters.keys() >= weights.keys()

    def read(name: str, moment: str) -> Tensor:
        places = states[moment] if moment else masters if has_masters else weights
        return _read(folder, *places[name])

    step = _find_step(common.get("optimizer"))
    names, kind = frozenset(weights), KINDS["torch_dist"][0]
    return Saved(str(folder), kind, args, common, names, read, has_moments, steps=lambda name: step)


def _parse(metadata: Any, path: Path) -> list[_Stored]:
    """Raise CheckpointError unless every tensor has a shape, a dtype, and shards with a place in a file."""
    try:
        where = {
            (index.fqn, tuple(index.offset)): info
            for index, info in metadata.storage_data.items()
            if getattr(index, "offset", None) is not None
        }
        tensors = []
        for name, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                continue  # an object, such as random states
            dtype, shape = entry.properties.args[0], _sizes(entry.size)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has no dtype")
            shards = []
            for chunk in entry.chunks:
                offsets, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
                info = where[name, offsets]
                if not is_plain_name(info.relative_path):
                    raise ValueError(f"{short(info.relative_path)} is not a file of the checkpoint")
                if getattr(info, "transform_descriptors", None):
                    raise ValueError(f"{name} is compressed ({info.transform_descriptors})")
                shards.append(_Shard(offsets, sizes, info.relative_path, *_sizes((info.offset, info.length))))
                if len(offsets) != len(shape) or any(o + s > t for o, s, t in zip(offsets, sizes, shape, strict=True)):
                    raise ValueError(f"a shard of {name} lies outside of it")
            if sum(math.prod(shard.shape) for shard in shards) != math.prod(shape):
                raise ValueError(f"shards of {name} are missing, or there are too many")
            tensors.append(_Stored(str(name), dtype, shape, shards))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return tensors


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or any(type(n) is not int or not 0 <= n < 2**60 for n in values):
        raise ValueError(f"{short(values)} is not a shape")
    return tuple(values)


def _places(key: str, tensor: _Stored, layers: Any) -> dict[str, _Place]:
    """Return places by canonical name: of a stored tensor, or of its layers. key: name without optimizer's prefix."""
    new = canonical(key)
    if new is None:
        return {}
    if not re.match(r"decoder\.layers\.(?![0-9]+\.)", new):
        return {new: (tensor, None)}
    if not tensor.shape or tensor.shape[0] != layers:
        shape = list(tensor.shape)
        raise CheckpointError(f"{tensor.name} is {shape}: it should have num_layers = {layers} layers")
    numbered = new.replace("decoder.layers.", "decoder.layers.0.", 1)
    return {rename_layer(numbered, layer): (tensor, layer) for layer in range(tensor.shape[0])}


def _shape(place: _Place) -> tuple[int, ...]:
    tensor, layer = place
    return tensor.shape if layer is None else tensor.shape[1:]


def _read(folder: Path, tensor: _Stored, layer: int | None) -> Tensor:
    """Read a whole tensor, or one layer of it. Raises CheckpointError."""
    shards = [s for s in tensor.shards if layer is None or 0 <= layer - s.offsets[0] < s.shape[0]]
    for shard in shards:  # before allocating memory
        path = folder / shard.file
        if not path.is_file():
            raise CheckpointError(f"{folder} is not complete: {shard.file} is missing, with shards of {tensor.name}")
        num_bytes = math.prod(shard.shape) * tensor.dtype.itemsize
        if shard.length < num_bytes or path.stat().st_size < shard.begin + shard.length:
            raise CheckpointError(f"{path} is damaged: it is cut short")
    whole = torch.empty(tensor.shape if layer is None else (1, *tensor.shape[1:]), dtype=tensor.dtype)
    for shard in shards:
        offsets, path = shard.offsets, folder / shard.file
        with open(path, "rb") as file:
            file.seek(shard.begin)
            content = file.read(shard.length)
        values = load(io.BytesIO(content), path)
        if not isinstance(values, Tensor) or values.dtype != tensor.dtype or values.numel() != math.prod(shard.shape):
            raise CheckpointError(f"{path} is damaged: a shard of {tensor.name} is not what {METADATA} says")
        values = values.view(shard.shape)
        if layer is not None:
            row = layer - offsets[0]
            offsets, values = (0, *offsets[1:]), values[row : row + 1]
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
    return whole if layer is None else whole[0]


def _find_step(optimizer: Any) -> int | None:
    """Return Adam's step, the same for all parameters, from the optimizer's part of common.pt."""
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
