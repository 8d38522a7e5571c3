"""Read and write Megatron-LM's `torch_dist` format: tensors by torch.distributed.checkpoint, whole on any ranks.

    iter_0000100/metadata.json           names the format
    iter_0000100/common.pt               flags, counters, and all else that is no tensor
    iter_0000100/.metadata               a pickle that locates each shard of each tensor
    iter_0000100/__RANK_NUMBER.distcp    shards, as torch.save writes each

Layers of one shape are stacked as a tensor [layers, …], under a name without layer number. The optimizer's state of a
tensor has its name behind a prefix, if it is stored whole: with --dist-ckpt-optim-fully-reshardable, or without a
distributed optimizer. Where some layers alone have experts, each layer's tensors are its own, with its number. What is
written has shards of one layer, so that Megatron's ranks read what they need.
"""

import argparse
import io
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.folder import KINDS
from megatron_zpp.checkpoint.meta import Counters, is_plain_name
from megatron_zpp.models.decoder import DecoderConfig

from .config import MOMENTS, Saved, args_in
from .pickles import load, load_file, load_metadata
from .weights import EXPERT_BIAS, canonical, layer_of, rename_layer, weights

COMMON, METADATA, FORMAT = "common.pt", ".metadata", "metadata.json"
_OPTIMIZER = re.compile(r"^(?:chained_[0-9]+\.)?optimizer\.(?:[\w.]*\.)?state\.(exp_avg_sq|exp_avg|fp32_param|param)\.")
_OTHER = re.compile(r"^(?:chained_[0-9]+\.)?(optimizer|rng_state|rerun_state_machine)(\.|/|$)")


_Place = tuple[str, int | None]  # a stored tensor, or a layer of it


def open_torch_dist(folder: Path) -> Saved:
    """Open a checkpoint of the format torch_dist. Raises CheckpointError."""
    common = load_file(folder / COMMON)
    args = args_in(common, str(folder / COMMON))
    index = _read_index(folder / METADATA)
    stored: dict[str, Any] = index.state_dict_metadata
    states: dict[str, dict[str, _Place]] = {kind: {} for kind in ("", *MOMENTS, "fp32_param", "param")}
    for name, tensor in stored.items():
        found = _OPTIMIZER.match(name)
        if found or not _OTHER.match(name):
            key, kind = (name[found.end() :], found[1]) if found else (name, "")
            states[kind] |= _places(name, key, tensor.size, args.get("num_layers"))
    names = frozenset(states[""])
    masters = states["fp32_param"] or states["param"]  # fp32 copies of 16-bit weights

    def shape(place: _Place) -> torch.Size:
        name, layer = place
        return stored[name].size if layer is None else stored[name].size[1:]

    trained = {name: place for name, place in states[""].items() if not name.endswith(EXPERT_BIAS)}
    has_moments = all(
        name in states[moment] and shape(states[moment][name]) == shape(place)
        for name, place in trained.items()
        for moment in MOMENTS
    )
    if has_moments and masters.keys() >= trained.keys():
        states[""] |= masters

    def read(name: str, moment: str) -> Tensor:
        return _read(folder, index, *states[moment][name])

    step = _find_step(common.get("optimizer"))
    kind = KINDS["torch_dist"][0]
    return Saved(str(folder), kind, args, common, names, read, has_moments, steps=lambda name: step)


def _read_index(path: Path) -> Metadata:
    """Raise CheckpointError unless every tensor has a shape, a dtype, and shards with a place in a file."""
    metadata = load_metadata(path)
    tensors: dict[str, Any] = {}
    places = {}
    try:
        where = {
            (index.fqn, tuple(index.offset)): info
            for index, info in metadata.storage_data.items()
            if getattr(index, "offset", None) is not None
        }
        for name, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                continue  # an object, such as random states
            dtype, shape = entry.properties.args[0], _sizes(entry.size)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has no dtype")
            chunks = []
            for chunk in entry.chunks:
                offsets, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
                info = where[name, offsets]
                if not is_plain_name(info.relative_path):
                    raise ValueError(f"{short(info.relative_path)} is not a file of the checkpoint")
                if getattr(info, "transform_descriptors", None):
                    raise ValueError(f"{name} is compressed ({info.transform_descriptors})")
                if len(offsets) != len(shape) or any(o + s > t for o, s, t in zip(offsets, sizes, shape, strict=True)):
                    raise ValueError(f"a shard of {name} lies outside of it")
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                info = _StorageInfo(info.relative_path, *_sizes((info.offset, info.length)))
                places[MetadataIndex(str(name), offsets)] = info
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
                raise ValueError(f"shards of {name} are missing, or there are too many")
            tensors[str(name)] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    return Metadata(tensors, storage_data=places)


def _sizes(values: Any) -> torch.Size:
    if not isinstance(values, tuple | list) or any(type(n) is not int or not 0 <= n < 2**60 for n in values):
        raise ValueError(f"{short(values)} is not a shape")
    return torch.Size(values)


def _places(name: str, key: str, shape: torch.Size, layers: Any) -> dict[str, _Place]:
    """Return places by canonical name: of a stored tensor, or of its layers. key: name without optimizer's prefix."""
    new = canonical(key)
    if new is None:
        return {}
    if not re.match(r"decoder\.layers\.(?![0-9]+\.)", new):
        return {new: (name, None)}
    if not shape or shape[0] != layers:
        raise CheckpointError(f"{name} is {list(shape)}: it should have num_layers = {layers} layers")
    numbered = new.replace("decoder.layers.", "decoder.layers.0.", 1)
    return {rename_layer(numbered, layer): (name, layer) for layer in range(shape[0])}


def _read(folder: Path, index: Metadata, name: str, layer: int | None) -> Tensor:
    """Read a whole tensor, or one layer of it. Raises CheckpointError."""
    tensor = index.state_dict_metadata[name]
    assert isinstance(tensor, TensorStorageMetadata)
    dtype = tensor.properties.dtype
    chunks = [c for c in tensor.chunks if layer is None or 0 <= layer - c.offsets[0] < c.sizes[0]]
    shards = [(chunk, index.storage_data[MetadataIndex(name, chunk.offsets)]) for chunk in chunks]
    for chunk, info in shards:  # before allocating memory
        path = folder / info.relative_path
        if not path.is_file():
            raise CheckpointError(f"{folder} is not complete: {path.name} is missing, with shards of {name}")
        num_bytes = math.prod(chunk.sizes) * dtype.itemsize
        if info.length < num_bytes or path.stat().st_size < info.offset + info.length:
            raise CheckpointError(f"{path} is damaged: it is cut short")
    whole = torch.empty(tensor.size if layer is None else (1, *tensor.size[1:]), dtype=dtype)
    for chunk, info in shards:
        path = folder / info.relative_path
        with open(path, "rb") as file:
            file.seek(info.offset)
            content = file.read(info.length)
        values = load(io.BytesIO(content), path)
        if not isinstance(values, Tensor) or values.dtype != dtype or values.numel() != math.prod(chunk.sizes):
            raise CheckpointError(f"{path} is damaged: a shard of {name} is not what {METADATA} says")
        offsets, values = tuple(chunk.offsets), values.view(chunk.sizes)
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


# Writing

_FILE = "__0_0.distcp"
# Transformer Engine's fused layers have norms under other names. Which of the two a layer has depends on its kind and
# on --transformer-impl, so each norm is written once, and found under both.
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_FUSED_IN_LATENT_ATTENTION = {
    "q_layernorm.": "linear_q_up_proj.layer_norm_",
    "kv_layernorm.": "linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def write_torch_dist(
    folder: Path, config: DecoderConfig, args: argparse.Namespace, counters: Counters, read: Callable[[str], Tensor]
) -> None:
    """Fill a folder as Megatron's ``--save`` does. read: returns our parameter by name, in the dtype to write."""
    # Megatron takes no iteration 0, as of a model that was imported, but a release.
    name, number = (f"iter_{counters.iteration:07d}", counters.iteration) if counters.iteration else ("release",) * 2
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{number}\n")
    checkpoint = folder / name
    checkpoint.mkdir()
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    fused = _FUSED_IN_LATENT_ATTENTION if config.multi_latent_attention else _FUSED
    is_stacked = args.moe_layer_freq == 1
    with open(checkpoint / _FILE, "wb") as file:

        def write(value: Any) -> _StorageInfo:
            begin = file.tell()
            torch.save(value, file)
            return _StorageInfo(_FILE, begin, file.tell() - begin)

        nothing = write([None])
        for weight in weights(config):
            tensor = weight.join(*map(read, weight.ours)).contiguous()
            name, layer = weight.theirs.replace(".mlp.experts.", ".mlp.experts.experts."), layer_of(weight.theirs)
            size, offset = tensor.shape, torch.Size([0] * tensor.dim())
            shards: list[tuple[int, int]] = []  # number and count: of layers, and of experts
            if layer is not None and is_stacked:  # all layers are one tensor
                name = name.replace(f".{layer}.", ".", 1)
                shards, tensor = [(layer, config.num_layers)], tensor.unsqueeze(0)
                size, offset = torch.Size([config.num_layers, *size]), torch.Size([layer, *offset])
            place = write(tensor)
            for alias in {name, *(name.replace(old, new) for old, new in fused.items())}:
                entry = entries.setdefault(alias, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, []))
                entry.chunks.append(ChunkStorageMetadata(offset, tensor.shape))
                places[MetadataIndex(alias, offset, len(entry.chunks) - 1)] = place
            if ".linear_" in name and name.endswith(".weight"):
                # Linear layers look for state of Transformer Engine; without it, it is None.
                experts = config.moe.num_experts if config.moe is not None and ".experts." in name else 0
                for of_expert in [[(i, experts)] for i in range(experts)] or [[]]:
                    numbers, counts = zip(*(shards + of_expert or [(0, 1)]), strict=True)
                    shard = f"{'.'.join(map(str, numbers))}_{'.'.join(map(str, counts))}"
                    entries[key := f"{name[: -len('weight')]}_extra_state/shard_{shard}"] = BytesStorageMetadata()
                    places[MetadataIndex(key)] = nothing
    (checkpoint / METADATA).write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    progress = {
        "iteration": counters.iteration,
        "consumed_train_samples": counters.consumed_train_samples,
        "consumed_valid_samples": counters.consumed_valid_samples,
    }
    common = {
        "args": argparse.Namespace(**vars(args), **progress),
        "checkpoint_version": 3.0,
        "iteration": counters.iteration,
        "num_floating_point_operations_so_far": 0.0,
    }
    with open(checkpoint / COMMON, "wb") as file:  # whose errors say more than torch's
        torch.save(common, file)
    versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (checkpoint / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist"} | versions))
