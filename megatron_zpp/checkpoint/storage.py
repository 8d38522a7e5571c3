"""Store torch.distributed.checkpoint's tensors as safetensors with a JSON index, without any pickle.

DCP's writers pickle their index, and its safetensors writer holds a rank's shards twice in memory. Its
HuggingFaceStorageReader opens what is written here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .files import CheckpointError, Sums, open_regular, sync_file
from .folder import FolderLock, begin, finish
from .index import DTYPE_NAMES, Place, build_index, read_index
from .meta import open_in
from .tokenizer import copy_tokenizer

MAX_NAMES = 20  # of tensors with NaN or Inf, in meta.json


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file that is on the disk."""

    places: dict[str, Place]  # by tensor name
    entry: dict[str, Any]  # for meta.json
    nonfinite: list[str]  # tensors that hold NaN or Inf


def write_safetensors(
    path: Path,
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> TensorFile:
    """Write tensors one by one.

    tensors: name, dtype and shape of each, in any order. read: returns a tensor by name; called once for each.
    offsets: of each shard in its tensor, for DCP's HuggingFaceStorageReader; our reader uses the index.
    """
    tensors = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)  # aligns all of them
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    more = {}
    if offsets is not None:
        sharding = {name: {"saved_offsets": list(begin)} for name, begin in offsets.items()}
        more["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":"))}
    text = json.dumps(more | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    sums, nonfinite = Sums(), []
    sums.update(prefix)
    with open_regular(path, "wb") as file:
        file.write(prefix)
        for name, dtype, shape in tensors:
            tensor = read(name).detach().cpu().contiguous()
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"{name} was planned as {dtype} {shape}, but is {tensor.dtype} {tuple(tensor.shape)}")
            if not _is_finite(tensor):
                nonfinite.append(name)
            content: Any = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else b""
            sums.update(content)
            file.write(content)
        sync_file(file)
    places = {name: Place(path.name, *(len(prefix) + at for at in header[name]["data_offsets"])) for name in header}
    return TensorFile(places, sums.entry(), nonfinite)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # One pass without a copy; NaN comes through. Few operators support 8-bit floats.
    low, high = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax()
    return math.isfinite(low) and math.isfinite(high)


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
                results.append(WriteResult(items[name].index, place.end - place.begin, written))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places, files, nonfinite = {}, {}, set()
        for result in chain.from_iterable(results):
            place, entry, is_finite = result.storage_data
            places[result.index] = place
            files[place.file] = entry
            if not is_finite:
                nonfinite.add(result.index.fqn)
        self.nonfinite = _nonfinite_names(self.meta, nonfinite)
        files |= copy_tokenizer(self.meta["settings"], self.path)
        index = build_index(metadata.state_dict_metadata, places)
        finish(self.path, index, self.meta | {"nonfinite": self.nonfinite}, files)
        self.after()

    @classmethod
    def validate_checkpoint_id(cls, *args: Any, **kwargs: Any) -> bool:
        return True


def _nonfinite_names(meta: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """List what is not finite for meta.json: what the run named (the loss), and tensors, the first ones by name."""
    names = [*meta.get("nonfinite", []), *sorted(tensors)]
    return names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]


# Reading


def read_shard(file: Any, place: Place, dtype: torch.dtype, sizes: torch.Size) -> Tensor:
    """Read one shard of a tensor from an open file."""
    content = bytearray(place.end - place.begin)
    file.seek(place.begin)
    if file.readinto(content) != len(content):
        raise CheckpointError(f"{place.file} is damaged: it is cut short")
    return torch.frombuffer(content, dtype=dtype).view(sizes) if content else torch.empty(sizes, dtype=dtype)


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint into tensors with any sharding. Overrides all that reads files: nothing is unpickled."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        """metadata: from ``read_index``."""
        super().__init__(checkpoint)
        self.checkpoint, self.metadata = checkpoint, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].file, []).append(item)
        for name, items in by_file.items():
            with open_in(self.checkpoint, name) as file:
                for item in items:
                    tensor = self.metadata.state_dict_metadata[item.storage_index.fqn]
                    assert isinstance(tensor, TensorStorageMetadata)
                    sizes = next(c.sizes for c in tensor.chunks if c.offsets == item.storage_index.offset)
                    shard = read_shard(file, self.storage_data[item.storage_index], tensor.properties.dtype, sizes)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(narrow_tensor_by_index(shard, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def iterate_tensors(checkpoint: Path, meta: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors whose names begin with ``prefix``, without it, ordered by name.

    Needs no process group, and memory for one tensor. Raises CheckpointError.
    """
    metadata = read_index(checkpoint, meta)
    for name in sorted(metadata.state_dict_metadata):
        if name.startswith(prefix):
            yield name.removeprefix(prefix), read_tensor(checkpoint, metadata, name)


def read_tensor(checkpoint: Path, metadata: Metadata, name: str) -> Tensor:
    """Read one whole tensor. metadata: from ``read_index``. Raises CheckpointError or OSError."""
    tensor = metadata.state_dict_metadata[name]
    assert isinstance(tensor, TensorStorageMetadata)
    whole = torch.empty(tensor.size, dtype=tensor.properties.dtype)
    for chunk in tensor.chunks:
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        with open_in(checkpoint, place.file) as file:
            shard = read_shard(file, place, whole.dtype, chunk.sizes)
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

    shapes: by name, "model.NAME" or "optimizer.NAME.KEY". read: returns a tensor by name; called once for each. meta:
    as in ``Run.meta``.
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
