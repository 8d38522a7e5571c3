"""How torch.distributed.checkpoint's tensors lie in files: safetensors with a JSON index, no pickle anywhere.

(DCP's own writers pickle their index, and its safetensors writer keeps a rank's whole part twice in memory. Its
HuggingFaceStorageReader opens what is written here.) Files are hashed as they are written. Everything that is read back
is checked before it is used.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from .files import CheckpointError, Sums, digest, open_regular, parse_json, sync_file
from .folder import FolderLock, begin, finish
from .meta import INDEX, REMEDY, is_plain_name, open_in

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMED = 20  # tensors with NaN or Inf, in meta.json
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Place:
    """Where a part of a tensor lies: bytes [begin, end) of a file, counted from its start."""

    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class File:
    """A file of tensors that is on the disk."""

    places: dict[str, Place]  # of each tensor, by name
    entry: dict[str, Any]  # what meta.json says of it
    nonfinite: list[str]  # tensors that hold NaN or Inf


@dataclass(frozen=True)
class _Written:
    """What a rank reports of one part to the rank that writes the index."""

    place: Place
    entry: dict[str, Any]  # of its file: one object, so that it travels once
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
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    more = {}
    if offsets is not None:
        sharding = {name: {"saved_offsets": list(of_tensor)} for name, of_tensor in offsets.items()}
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
        named = [
            SavePlan(plan.items, (str(self.path), f"rank_{rank:05d}.safetensors")) for rank, plan in enumerate(plans)
        ]
        return named

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
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            places[result.index] = written.place
            files[written.place.file] = written.entry
            if not written.is_finite:
                nonfinite.add(result.index.fqn)
        self.nonfinite = _names_of(self.meta, nonfinite)
        finish(self.path, _index(metadata, places), self.meta | {"nonfinite": self.nonfinite}, files)
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


def _index(metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> dict[str, Any]:
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            at = {"offsets": list(chunk.offsets), "shape": list(chunk.sizes)}
            chunks.append(at | {"file": place.file, "bytes": [place.begin, place.end]})
        tensors[name] = {"dtype": _DTYPE_NAMES[tensor.properties.dtype], "shape": list(tensor.size), "chunks": chunks}
    return {"tensors": tensors}


# Reading


def read_index(checkpoint: Path, meta: Mapping[str, Any]) -> tuple[Metadata, dict[MetadataIndex, Place]]:
    """Shapes, dtypes and places of all tensors. ``meta``: of ``read_meta``. Raises CheckpointError."""
    try:
        with open_in(checkpoint, INDEX) as file:
            text = file.read()
        if digest(text) != meta["files"].get(INDEX, {}).get("sha256"):
            raise ValueError("its digest is not the one in meta.json")
        return _parse_index(parse_json(text), meta["files"])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / INDEX} is damaged ({error}): {REMEDY}") from error


def _parse_index(index: Any, files: Mapping[str, Any]) -> tuple[Metadata, dict[MetadataIndex, Place]]:
    """Raise ValueError unless the parts of every tensor make up the whole of it, and no two share bytes of a file."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, entry in _values(_values(index, "the index", "tensors")[0], "tensors").items():
        dtype_name, shape, parts = _values(entry, name, "dtype", "shape", "chunks")
        dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
        if dtype is None:
            raise ValueError(f"{name} is of the dtype {reprlib.repr(dtype_name)}, which is not known")
        if not isinstance(parts, list):
            raise ValueError(f"the chunks of {name} are no list")
        size = _sizes(shape)
        chunks = []
        for part in parts:
            chunk, place = _parse_part(name, part, size, dtype, files)
            # Ranks that hold nothing of a tensor write parts without elements.
            if math.prod(chunk.sizes) or not math.prod(size):
                chunks.append(chunk)
                places[MetadataIndex(name, chunk.offsets)] = place
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size) or not chunks:
            raise ValueError(f"parts of {name} are missing, or there are too many")
        if math.prod(size) and _overlap(chunks):
            raise ValueError(f"parts of {name} overlap")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    _check_bytes(places)
    return Metadata(tensors), places


def _parse_part(
    name: str, part: Any, size: torch.Size, dtype: torch.dtype, files: Mapping[str, Any]
) -> tuple[ChunkStorageMetadata, Place]:
    *lists, file = _values(part, f"a part of {name}", "offsets", "shape", "bytes", "file")
    offsets, sizes, span = (_sizes(values) for values in lists)
    inside = len(offsets) == len(sizes) == len(size) and all(
        start + length <= total for start, length, total in zip(offsets, sizes, size, strict=True)
    )
    if not inside or len(span) != 2 or span[1] - span[0] != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"a part of {name} is not of its size")
    if not is_plain_name(file) or file not in files or span[1] > files[file]["bytes"]:
        raise ValueError(f"a part of {name} is not in a file of this checkpoint")
    return ChunkStorageMetadata(offsets, sizes), Place(file, *span)


def _values(entry: Any, name: str, *keys: str) -> Any:
    """The values of ``keys``; without keys the object itself. Raises ValueError where they are not there."""
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is no JSON object")
    missing = [key for key in keys if key not in entry]
    if missing:
        raise ValueError(f"{name} has no {', '.join(missing)}")
    return [entry[key] for key in keys] if keys else entry


def _sizes(values: Any) -> torch.Size:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{reprlib.repr(values)} is no shape")
    if math.prod(max(1, value) for value in values) >= 2**60:  # more than torch can count
        raise ValueError(f"{reprlib.repr(values)} is no shape: it is too large")
    return torch.Size(values)


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two parts of a tensor, none of them empty, share an element."""
    dims = range(len(chunks[0].offsets))
    if not dims:
        return len(chunks) > 1
    # A sweep along the dimension that is cut most: a part is compared only with those that reach beyond its begin.
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    reaching: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        begin = chunk.offsets[along]
        reaching = [other for other in reaching if other.offsets[along] + other.sizes[along] > begin]
        for other in reaching:
            if all(
                chunk.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                and other.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                for dim in dims
            ):
                return True
        reaching.append(chunk)
    return False


def _check_bytes(places: Mapping[MetadataIndex, Place]) -> None:
    """Raise ValueError where two parts, of one tensor or of two, share bytes of a file."""
    last, last_name = Place("", 0, 0), ""
    for index, place in sorted(places.items(), key=lambda item: (item[1].file, item[1].begin, item[1].end)):
        if place.file == last.file and place.begin < last.end and place.begin < place.end:
            raise ValueError(f"{last_name} and {index.fqn} share bytes of {place.file}")
        if place.file != last.file or place.end > last.end:
            last, last_name = place, index.fqn


def read_part(file: Any, place: Place, dtype: torch.dtype, sizes: torch.Size) -> Tensor:
    """One part of a tensor from an open file."""
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
    """Name and whole tensor, in order of names, of all whose names begin with ``prefix``, which is taken off.

    Needs no process group, and never more memory than one tensor takes. Raises CheckpointError.
    """
    metadata, places = read_index(checkpoint, meta)
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        if not name.startswith(prefix):
            continue
        assert isinstance(tensor, TensorStorageMetadata)
        whole = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            with open_in(checkpoint, place.file) as file:
                part = read_part(file, place, whole.dtype, chunk.sizes)
            narrow_tensor_by_index(whole, chunk.offsets, chunk.sizes).copy_(part)
        yield name.removeprefix(prefix), whole


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
    index = {}
    for key, shape in shapes.items():
        place = file.places[key]
        chunk = {"offsets": [0] * len(shape), "shape": list(shape), "file": name, "bytes": [place.begin, place.end]}
        index[key] = {"dtype": "F32", "shape": list(shape), "chunks": [chunk]}
    meta = meta | {"iteration": iteration, "world_size": 1, "has_rng": False, "zeropp": None}
    meta |= {"has_optimizer": adam_of is not None}
    return finish(path, {"tensors": index}, meta | {"nonfinite": _names_of(meta, file.nonfinite)}, {name: file.entry})
