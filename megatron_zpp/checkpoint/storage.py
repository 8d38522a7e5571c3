"""Store torch.distributed.checkpoint's tensors as safetensors with a JSON index, without any pickle.

DCP's writers pickle their index, and its safetensors writer holds a rank's shards twice in memory. Its
HuggingFaceStorageReader opens what is written here. index.json locates the shards of each tensor; everything in it is
checked before use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec._internals import validate_non_overlapping_shards_metadata
from torch.distributed.checkpoint import FileSystemReader, StorageWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
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

from .files import DTYPES, CheckpointError, digest, parse_json, write_safetensors
from .folder import FolderLock, begin, finish
from .meta import INDEX, REMEDY, is_plain_name, open_in
from .tokenizer import copy_tokenizer

MAX_NAMES = 20  # of tensors with NaN or Inf, in meta.json


def build_index(tensors: Mapping[str, Any], places: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, Any]:
    """Return the content of index.json. tensors: ``TensorStorageMetadata`` by name."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries = {}
    for name, tensor in tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            at = {"offsets": list(chunk.offsets), "shape": list(chunk.sizes)}
            span = [place.offset, place.offset + place.length]
            chunks.append(at | {"file": place.relative_path, "bytes": span})
        entries[name] = {"dtype": names[tensor.properties.dtype], "shape": list(tensor.size), "chunks": chunks}
    return {"tensors": entries}


def read_index(checkpoint: Path, meta: Mapping[str, Any]) -> Metadata:
    """Return shapes, dtypes and places of all tensors. ``meta``: from ``read_meta``. Raises CheckpointError."""
    try:
        with open_in(checkpoint, INDEX) as file:
            text = file.read()
        if digest(text) != meta["files"].get(INDEX, {}).get("sha256"):
            raise ValueError("its digest is not the one in meta.json")
        return _parse_index(parse_json(text), meta["files"])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / INDEX} is damaged ({error}): {REMEDY}") from error


def _parse_index(index: Any, files: Mapping[str, Any]) -> Metadata:
    """Raise ValueError unless the shards of every tensor cover it exactly, and no two share bytes of a file."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in _values(_values(index, "the index", "tensors")[0], "tensors").items():
        dtype_name, shape, shards = _values(entry, name, "dtype", "shape", "chunks")
        dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
        if dtype is None:
            raise ValueError(f"{name} is of the dtype {short(dtype_name)}, which is not known")
        if not isinstance(shards, list):
            raise ValueError(f"the chunks of {name} are not a list")
        size = _sizes(shape)
        chunks = []
        for shard in shards:
            chunk, place = _parse_shard(name, shard, size, dtype, files)
            # Ranks that hold nothing of a tensor write shards without elements.
            if math.prod(chunk.sizes) or not math.prod(size):
                chunks.append(chunk)
                places[MetadataIndex(name, chunk.offsets)] = place
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size) or not chunks:
            raise ValueError(f"shards of {name} are missing, or there are too many")
        if math.prod(size):
            try:
                validate_non_overlapping_shards_metadata(
                    [ShardMetadata(list(chunk.offsets), list(chunk.sizes)) for chunk in chunks]
                )
            except ValueError:
                raise ValueError(f"shards of {name} overlap") from None
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    _check_bytes(places)
    return Metadata(tensors, storage_data=places)


def _parse_shard(
    name: str, shard: Any, size: torch.Size, dtype: torch.dtype, files: Mapping[str, Any]
) -> tuple[ChunkStorageMetadata, _StorageInfo]:
    *lists, file = _values(shard, f"a shard of {name}", "offsets", "shape", "bytes", "file")
    offsets, sizes = (_sizes(values) for values in lists[:2])
    span = _integers(lists[2])
    is_inside = len(offsets) == len(sizes) == len(size) and all(
        start + length <= total for start, length, total in zip(offsets, sizes, size, strict=True)
    )
    if not is_inside or len(span) != 2 or span[1] - span[0] != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"a shard of {name} is not of its size")
    if not is_plain_name(file) or file not in files or span[1] > files[file]["bytes"]:
        raise ValueError(f"a shard of {name} is not in a file of this checkpoint")
    return ChunkStorageMetadata(offsets, sizes), _StorageInfo(file, span[0], span[1] - span[0])


def _values(entry: Any, name: str, *keys: str) -> Any:
    """Return the values of ``keys``, or the object itself without keys. Raises ValueError if they are missing."""
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is not a JSON object")
    missing = [key for key in keys if key not in entry]
    if missing:
        raise ValueError(f"{name} has no {', '.join(missing)}")
    return [entry[key] for key in keys] if keys else entry


def _sizes(values: Any) -> torch.Size:
    if math.prod(max(1, value) for value in _integers(values)) >= 2**60:  # more than torch can count
        raise ValueError(f"{short(values)} is too large for a shape")
    return torch.Size(values)


def _integers(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < 2**60 for value in values):
        raise ValueError(f"{short(values)} is not a shape")
    return values


def _check_bytes(places: Mapping[MetadataIndex, _StorageInfo]) -> None:
    """Raise ValueError if two shards, of one tensor or of two, share bytes of a file."""
    last_file, last_end, last_name = "", 0, ""
    for index, place in sorted(places.items(), key=lambda item: (item[1].relative_path, item[1].offset)):
        if place.relative_path != last_file:
            last_file, last_end = place.relative_path, 0
        if place.length and place.offset < last_end:
            raise ValueError(f"{last_name} and {index.fqn} share bytes of {last_file}")
        if place.length:
            last_end, last_name = place.offset + place.length, index.fqn


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
        finish(self.path, index, self.meta | {"nonfinite": self.nonfinite}, files)
        self.after()

    @classmethod
    def validate_checkpoint_id(cls, *args: Any, **kwargs: Any) -> bool:
        return True


def _nonfinite_names(meta: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """List what is not finite for meta.json: what the run named (the loss), and tensors, the first ones by name."""
    names = [*meta.get("nonfinite", []), *sorted(tensors)]
    return names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]


def _read_shard(file: Any, place: _StorageInfo, dtype: torch.dtype, sizes: torch.Size) -> Tensor:
    content = bytearray(place.length)
    file.seek(place.offset)
    if file.readinto(content) != len(content):
        raise CheckpointError(f"{place.relative_path} is damaged: it is cut short")
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
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with open_in(self.checkpoint, name) as file:
                for item in items:
                    tensor = self.metadata.state_dict_metadata[item.storage_index.fqn]
                    assert isinstance(tensor, TensorStorageMetadata)
                    sizes = next(c.sizes for c in tensor.chunks if c.offsets == item.storage_index.offset)
                    shard = _read_shard(file, self.storage_data[item.storage_index], tensor.properties.dtype, sizes)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(narrow_tensor_by_index(shard, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def iterate_tensors(checkpoint: Path, meta: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors whose names begin with ``prefix``, without it, one at a time. Raises CheckpointError."""
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
        with open_in(checkpoint, place.relative_path) as file:
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
