"""Store torch.distributed.checkpoint's tensors as safetensors without any pickle.

DCP's writers pickle their index, and its safetensors writer holds a rank's shards twice in memory. Its
HuggingFaceStorageReader opens what is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .files import CheckpointError, write_safetensors
from .folder import FolderLock, begin, finish
from .index import Index, build_index, read_index
from .meta import open_in
from .tokenizer import copy_tokenizer

MAX_NAMES = 20  # of tensors with NaN or Inf, in meta.json


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint: every rank its own file; rank 0 also index, meta.json, marker, and the name."""

    path: Path

    def __init__(
        self, folder: str, iteration: int, meta: dict[str, Any], lock: FolderLock | None, after: Callable[[], None]
    ) -> None:
        """meta, lock, after: used on rank 0. meta: meta.json without files. after: called on completion."""
        self.lock = lock
        self.folder, self.iteration, self.meta, self.after = folder, iteration, meta, after
        self.nonfinite: list[str] = []  # what holds NaN or Inf; set on completion, on rank 0

    def reset(self, *args: Any, **kwargs: Any) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.is_coordinator:
            if self.lock is not None:
                self.lock.renew()
            self.path = begin(self.folder, self.iteration)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [SavePlan(plan.items, self.path / f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards; each result holds the shard's place, its file's entry, and whether it is finite."""
        items = {item.index.fqn: item for item in plan.items}
        data = {name: item.tensor_data for name, item in items.items() if item.tensor_data is not None}
        assert len(data) == len(plan.items), "each item is a tensor, and a rank has one shard of each"
        results = []
        if items:
            file = write_safetensors(
                plan.storage_data,
                [(name, shard.properties.dtype, tuple(shard.chunk.sizes)) for name, shard in data.items()],
                lambda name: planner.resolve_data(items[name]),  # type: ignore[arg-type,return-value]
                {name: tuple(shard.chunk.offsets) for name, shard in data.items()},
            )
            for name, place in file.places.items():
                written = (place, file.entry, name not in file.nonfinite)  # the entry is one object: pickled once
                results.append(WriteResult(items[name].index, place.length, written))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places, files, nonfinite = {}, {}, set()
        for result in chain.from_iterable(results):
            place, entry, is_finite = result.storage_data
            places[result.index] = place
            files[place.relative_path] = entry
            if not is_finite:
                nonfinite.add(result.index.fqn)
        self.nonfinite = _nonfinite_names(self.meta, nonfinite)
        files |= copy_tokenizer(self.meta["settings"], self.path)
        index = build_index(metadata.state_dict_metadata, places)
        metadata.state_dict_metadata = {}  # DCP sends this to all ranks, who need no shards of all ranks
        finish(self.path, index, self.meta | {"nonfinite": self.nonfinite}, files)
        self.after()

    @classmethod
    def validate_checkpoint_id(cls, *args: Any, **kwargs: Any) -> bool:
        return True


def _nonfinite_names(meta: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """List what is not finite for meta.json: what the run named (the loss), and tensors, the first ones by name."""
    names = [*meta.get("nonfinite", []), *sorted(tensors)]
    return names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]


def _read_shard(file: Any, place: _StorageInfo, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    content = bytearray(place.length)
    file.seek(place.offset)
    if file.readinto(content) != len(content):
        raise CheckpointError(f"{place.relative_path} is damaged: it is cut short")
    return torch.frombuffer(content, dtype=dtype).view(sizes) if content else torch.empty(sizes, dtype=dtype)


def read_state(index: Index, state: dict[str, Any]) -> None:
    """Fill this rank's part of ``state``, with any sharding. Raises CheckpointError, OSError, ValueError.

    DCP plans what to read; not ``dcp.load``, whose rank 0 gathers the plans of all ranks and sends them back.
    """
    metadata = index.metadata_for(state)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(state, metadata)
    by_file: dict[str, list[Any]] = {}
    for item in planner.create_local_plan().items:
        by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    for name, items in by_file.items():
        with open_in(index.checkpoint, name) as file:
            for item in items:
                tensor = metadata.state_dict_metadata[item.storage_index.fqn]
                assert isinstance(tensor, TensorStorageMetadata)
                sizes = next(c.sizes for c in tensor.chunks if c.offsets == item.storage_index.offset)
                place, offsets = metadata.storage_data[item.storage_index], item.storage_offsets
                if sizes:  # only the rows that are needed, which lie side by side
                    row = place.length // sizes[0]
                    place = _StorageInfo(name, place.offset + offsets[0] * row, item.lengths[0] * row)
                    sizes, offsets = torch.Size((item.lengths[0], *sizes[1:])), (0, *offsets[1:])
                shard = _read_shard(file, place, tensor.properties.dtype, sizes)
                target = planner.resolve_tensor(item).detach()
                target.copy_(narrow_tensor_by_index(shard, offsets, item.lengths))


def iterate_tensors(checkpoint: Path, meta: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors whose names begin with ``prefix``, without it, one at a time. Raises CheckpointError."""
    index = read_index(checkpoint, meta)
    for name in sorted(index.tensors):
        if name.startswith(prefix):
            yield name.removeprefix(prefix), read_tensor(index, name)


def read_tensor(index: Index, name: str) -> Tensor:
    """Read one whole tensor. Raises CheckpointError or OSError."""
    whole = torch.empty(index.tensors[name].size, dtype=index.tensors[name].dtype)
    for chunk, place in index.places(name, index.rows(name)):
        with open_in(index.checkpoint, place.relative_path) as file:
            shard = _read_shard(file, place, whole.dtype, chunk.sizes)
        narrow_tensor_by_index(whole, chunk.offsets, chunk.sizes).copy_(shard)
    return whole


def save_tensors(
    folder: str,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    meta: dict[str, Any],
    iteration: int = 0,
) -> Path:
    """Save a checkpoint of whole fp32 tensors, one in memory at a time, without a process group. Returns its folder.

    shapes: by name, "model.NAME" or "optimizer.NAME.KEY". read: returns a tensor by name. meta: as in ``Run.meta``.
    """
    path = begin(folder, iteration)
    name = "rank_00000.safetensors"
    file = write_safetensors(path / name, [(key, torch.float32, shape) for key, shape in shapes.items()], read)
    tensors, places = {}, {}
    for key, shape in shapes.items():
        size, offsets = torch.Size(shape), torch.Size([0] * len(shape))
        chunks = [ChunkStorageMetadata(offsets, size)]
        tensors[key] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
        places[MetadataIndex(key, offsets)] = file.places[key]
    meta = meta | {"iteration": iteration, "world_size": 1, "has_rng": False, "zeropp": None}
    meta["has_optimizer"] = any(key.startswith("optimizer.") for key in shapes)
    meta["nonfinite"] = _nonfinite_names(meta, file.nonfinite)
    return finish(path, build_index(tensors, places), meta, {name: file.entry} | copy_tokenizer(meta["settings"], path))
