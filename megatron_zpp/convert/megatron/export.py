"""Write Megatron-LM's `torch_dist` format: weights, flags and counters, one layer in memory.

Shards have one layer each, so that Megatron's ranks read what they need. The index is a pickle of torch's classes.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable
from pathlib import Path
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

from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.models.decoder import DecoderConfig

from .torch_dist import COMMON, FORMAT, METADATA
from .weights import layer_of, weights

_FILE = "__0_0.distcp"
# Megatron-LM stores these norms under the names of Transformer Engine's fused layers.
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# Linear layers look for state of Transformer Engine; without it, it is None.
_WITH_EXTRA_STATE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def write_torch_dist(
    folder: Path, config: DecoderConfig, args: argparse.Namespace, counters: Counters, read: Callable[[str], Tensor]
) -> None:
    """Fill a folder as Megatron's ``--save`` does. read: returns our parameter by name, in the dtype to write."""
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{counters.iteration}\n")
    checkpoint = folder / f"iter_{counters.iteration:07d}"
    checkpoint.mkdir()
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with open(checkpoint / _FILE, "wb") as file:

        def write(index: MetadataIndex, value: Any) -> None:
            begin = file.tell()
            torch.save(value, file)
            places[index] = _StorageInfo(_FILE, begin, file.tell() - begin)

        for weight in weights(config):
            tensor = weight.join(*map(read, weight.ours)).contiguous()
            name, layer = weight.theirs, layer_of(weight.theirs)
            size, offset = tensor.shape, torch.Size([0] * tensor.dim())
            if layer is not None:  # all layers are one tensor
                name = name.replace(f".{layer}.", ".", 1)
                for local, fused in _FUSED.items():
                    name = name.replace(local, fused)
                tensor, size = tensor.unsqueeze(0), torch.Size([config.num_layers, *tensor.shape])
                offset = torch.Size([layer, *offset])
            properties = TensorProperties(dtype=tensor.dtype)
            entry = entries.setdefault(name, TensorStorageMetadata(properties, size, []))
            entry.chunks.append(ChunkStorageMetadata(offset, tensor.shape))
            write(MetadataIndex(name, offset, len(entry.chunks) - 1), tensor)
        for layer in range(config.num_layers):
            for module in _WITH_EXTRA_STATE:
                name = f"decoder.layers.{module}._extra_state/shard_{layer}_{config.num_layers}"
                entries[name] = BytesStorageMetadata()
                write(MetadataIndex(name), [None])
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
    torch.save(common, checkpoint / COMMON)
    versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (checkpoint / FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist"} | versions))
