"""Store torch.distributed.checkpoint's tensors as safetensors with a JSON index, without any pickle.

(DCP's own writers pickle their index, and its safetensors writer keeps a rank's whole part twice in memory. Its
HuggingFaceStorageReader opens what is written here.) Files are hashed as they are written. Everything that is read back
is checked before it is used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .files import CheckpointError, Sums, open_regular, sync_file
from .folder import FolderLock, begin, finish
from .index import DTYPE_NAMES, Place, build_index, read_index
from .meta import open_in
from .tokenizer import copy_tokenizer

NAMED = 20  # tensors with NaN or Inf, in meta.json


@dataclass(frozen=True)
class File:
    """A file of tensors that is on the disk."""

    places: dict[str, Place]  # of each tensor, by name
    entry: dict[str, Any]  # what meta.json says of it
    nonfinite: list[str]  # tensors that hold NaN or Inf


@dataclass(frozen=True)
class _Written:
    """One part, as its rank reports it to the rank that writes the index."""

    place: Place
    entry: dict[str, Any]  # of its file: one object, so that it is sent once
    is_finite: bool


def write_safetensors(
    path: Path,
    parts: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    tensor_of: Callable[[str], Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> File:
    """Write tensors one by one.

    parts: name, dtype and shape of every tensor, in any order. tensor_of: called once for each, when its turn comes.
    offsets: where each begins in the tensor that it is a part of. DCP's HuggingFaceStorageReader looks for them in the
    header; our own reader goes by the index.
    """
    parts = sorted(parts, key=lambda part: -part[1].itemsize)  # so that all are aligned
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in parts:
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
        for name, dtype, shape in parts:
            tensor = tensor_of(name).detach().cpu().contiguous()
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"{name} was planned as {dtype} {shape}, but is {tensor.dtype} {tuple(tensor.shape)}")
            if not _is_finite(tensor):
                nonfinite.append(name)
            content: Any = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else b""
            sums.update(content)
            file.write(content)
        sync_file(file)
    places = {name: Place(path.name, *(len(prefix) + at for at in header[name]["data_offsets"])) for name in header}
    return File(places, sums.entry(), nonfinite)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # One pass without a copy; NaN comes through. Few operations know 8-bit floats.
    low, high = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax()
    return math.isfinite(low) and math.isfinite(high)


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint: every rank its own file, rank 0 index, meta.json, marker, and the name.

    meta: what meta.json holds beside the files' digests; used on rank 0. lock: of the folder, on rank 0. after: called
    on rank 0 when it is complete.
    """

    def __init__(
        self,
        folder: str,
        iteration: int,
        meta: dict[str, Any],
        lock: FolderLock | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = lock
        self.folder, self.iteration, self.meta, self.after = folder, iteration, meta, after
        self.path: Path | None = None
        self.nonfinite: list[str] = []  # what holds NaN or Inf, once it is complete; on rank 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.path = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.is_coordinator:
            if self.lock is not None:
                self.lock.renew()
            self.path = begin(self.folder, self.iteration)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert self.path is not None
        return [
            SavePlan(plan.items, (str(self.path), f"rank_{rank:05d}.safetensors")) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder, name = plan.storage_data
        items: dict[str, WriteItem] = {}
        for item in plan.items:
            key = item.index.fqn
            assert key not in items, f"{key} has two parts on one rank"
            items[key] = item
        done: Future[list[WriteResult]] = Future()
        if not items:
            done.set_result([])
            return done
        parts, offsets = [], {}
        for key, item in items.items():
            assert item.tensor_data is not None, f"{key} is not a tensor"
            chunk = item.tensor_data.chunk
            parts.append((key, item.tensor_data.properties.dtype, tuple(chunk.sizes)))
            offsets[key] = tuple(chunk.offsets)
        file = write_safetensors(
            Path(folder) / name,
            parts,
            lambda key: planner.resolve_data(items[key]),  # type: ignore[arg-type,return-value]
            offsets,
        )
        done.set_result(
            [
                WriteResult(
                    items[key].index,
                    place.end - place.begin,
                    _Written(place, file.entry, is_finite=key not in file.nonfinite),
                )
                for key, place in file.places.items()
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.path is not None
        places, files, nonfinite = {}, {}, set()
        for result in chain.from_iterable(results):
            written: _Written = result.storage_data
            places[result.index] = written.place
            files[written.place.file] = written.entry
            if not written.is_finite:
                nonfinite.add(result.index.fqn)
        self.nonfinite = _names_of(self.meta, nonfinite)
        files |= copy_tokenizer(self.meta["settings"], self.path)
        finish(
            self.path,
            build_index(metadata.state_dict_metadata, places),
            self.meta | {"nonfinite": self.nonfinite},
            files,
        )
        self.after()

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _names_of(meta: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """What meta.json says is not finite: what the run said (the loss), and tensors, the first ones by name."""
    names = [*meta.get("nonfinite", []), *sorted(tensors)]
    return names if len(names) <= NAMED else [*names[:NAMED], f"{len(names) - NAMED} more"]


# Reading


def read_part(file: Any, place: Place, dtype: torch.dtype, sizes: torch.Size) -> Tensor:
    """Read one part of a tensor from an open file."""
    content = bytearray(place.end - place.begin)
    file.seek(place.begin)
    if file.readinto(content) != len(content):
        raise CheckpointError(f"{place.file} is damaged: it is cut short")
    return torch.frombuffer(content, dtype=dtype).view(sizes) if content else torch.empty(sizes, dtype=dtype)


class CheckpointReader(StorageReader):
    """Reads a checkpoint into tensors that are sharded in any way."""

    def __init__(self, checkpoint: Path, metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> None:
        self.checkpoint, self.metadata, self.places = checkpoint, metadata, places

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.places[item.storage_index].file, []).append(item)
        for name, items in by_file.items():
            with open_in(self.checkpoint, name) as file:
                for item in items:
                    tensor = self.metadata.state_dict_metadata[item.storage_index.fqn]
                    assert isinstance(tensor, TensorStorageMetadata)
                    place = self.places[item.storage_index]
                    sizes = next(c.sizes for c in tensor.chunks if c.offsets == item.storage_index.offset)
                    part = read_part(file, place, tensor.properties.dtype, sizes)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(narrow_tensor_by_index(part, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def iterate_tensors(checkpoint: Path, meta: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors whose names begin with ``prefix``, in order of names, each with its name without it.

    Needs no process group, and never more memory than one tensor takes. Raises CheckpointError.
    """
    metadata, places = read_index(checkpoint, meta)
    for name in sorted(metadata.state_dict_metadata):
        if name.startswith(prefix):
            yield name.removeprefix(prefix), read_tensor(checkpoint, metadata, places, name)


def read_tensor(checkpoint: Path, metadata: Metadata, places: Mapping[MetadataIndex, Place], name: str) -> Tensor:
    """Read one whole tensor. metadata, places: of ``read_index``. Raises CheckpointError or OSError."""
    tensor = metadata.state_dict_metadata[name]
    assert isinstance(tensor, TensorStorageMetadata)
    whole = torch.empty(tensor.size, dtype=tensor.properties.dtype)
    for chunk in tensor.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        with open_in(checkpoint, place.file) as file:
            part = read_part(file, place, whole.dtype, chunk.sizes)
        narrow_tensor_by_index(whole, chunk.offsets, chunk.sizes).copy_(part)
    return whole


def save_parameters(
    folder: str,
    parts: Iterable[tuple[str, tuple[int, ...]]],
    tensor_of: Callable[[str], Tensor],
    meta: dict[str, Any],
    iteration: int = 0,
    adam_of: Callable[[str, str], Tensor] | None = None,
) -> Path:
    """Save a checkpoint of parameters that come from elsewhere, one in memory at a time; no process group is needed.

    parts: the model's parameter names and shapes. tensor_of: each one's fp32 values, called once. adam_of: likewise
    what Adam keeps of it, its "exp_avg", "exp_avg_sq" or "step". meta: settings and model_config as a run's
    ``Run.meta`` has them.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parts:
        shapes[f"model.{name}"] = tuple(shape)
        if adam_of is not None:
            shapes |= {f"optimizer.{name}.{key}": tuple(shape) for key in ("exp_avg", "exp_avg_sq")}
            shapes[f"optimizer.{name}.step"] = ()
    path = begin(folder, iteration)
    named = [(name, torch.float32, shape) for name, shape in shapes.items()]

    def value(key: str) -> Tensor:
        kind, _, name = key.partition(".")
        if kind == "model":
            return tensor_of(name)
        assert adam_of is not None
        parameter, _, state = name.rpartition(".")
        return adam_of(parameter, state)

    name = "rank_00000.safetensors"
    file = write_safetensors(path / name, named, value)
    tensors, places = {}, {}
    for key, shape in shapes.items():
        size, offsets = torch.Size(shape), torch.Size([0] * len(shape))
        tensors[key] = TensorStorageMetadata(
            TensorProperties(torch.float32), size, [ChunkStorageMetadata(offsets, size)]
        )
        places[MetadataIndex(key, offsets)] = file.places[key]
    meta = meta | {"iteration": iteration, "world_size": 1, "has_rng": False, "zeropp": None}
    meta |= {"has_optimizer": adam_of is not None, "nonfinite": _names_of(meta, file.nonfinite)}
    files = {name: file.entry} | copy_tokenizer(meta["settings"], path)
    return finish(path, build_index(tensors, places), meta, files)
