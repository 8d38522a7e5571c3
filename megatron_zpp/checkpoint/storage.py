"""How torch.distributed.checkpoint's tensors lie in files: safetensors with a JSON index, no pickle anywhere.

(DCP's own writers pickle their index, and its safetensors writer keeps a rank's whole part twice in memory.) Files are
hashed as they are written. Everything that is read back is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from .folder import INDEX, CheckpointError, begin, digest, finish, is_plain_name, open_in

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
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Place:
    """Where a part of a tensor lies: bytes [begin, end) of a file, counted from its start."""

    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class _Written:
    """What a rank reports of one part to the rank that writes the index."""

    place: Place
    file_bytes: int
    file_sha256: str


def write_safetensors(
    path: Path, parts: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], tensor_of: Callable[[str], Tensor]
) -> tuple[dict[str, Place], int, str]:
    """Write tensors one by one; each part's place by name, and the file's size and SHA-256, once it is on the disk.

    parts: name, dtype and shape of every tensor, in any order. tensor_of: called once for each, when its turn comes.
    """
    parts = sorted(parts, key=lambda part: -part[1].itemsize)  # so that all are aligned
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in parts:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    sha = hashlib.sha256(prefix)
    with path.open("wb") as file:
        file.write(prefix)
        for name, dtype, shape in parts:
            tensor = tensor_of(name).detach().cpu().contiguous()
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"{name} was planned as {dtype} {shape}, but is {tensor.dtype} {tuple(tensor.shape)}")
            content: Any = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else b""
            sha.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    places = {name: Place(path.name, *(len(prefix) + at for at in header[name]["data_offsets"])) for name in header}
    return places, len(prefix) + end, sha.hexdigest()


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint: every rank its own file, rank 0 index, meta.json, marker, and the name.

    meta: what meta.json holds beside the files' digests; used on rank 0. after: called on rank 0 when it is complete.
    """

    def __init__(
        self, folder: str, iteration: int, meta: dict[str, Any], after: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self.iteration, self.meta, self.after = folder, iteration, meta, after
        self.path: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.path = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.is_coordinator:
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
        parts = []
        for key, item in items.items():
            assert item.tensor_data is not None, f"{key} is not a tensor"
            parts.append((key, item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)))
        places, size, sha = write_safetensors(
            Path(folder) / name,
            parts,
            lambda key: planner.resolve_data(items[key]),  # type: ignore[arg-type,return-value]
        )
        done.set_result(
            [
                WriteResult(items[key].index, place.end - place.begin, _Written(place, size, sha))
                for key, place in places.items()
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.path is not None
        places, files = {}, {}
        for result in (result for of_rank in results for result in of_rank):
            written: _Written = result.storage_data
            places[result.index] = written.place
            files[written.place.file] = {"bytes": written.file_bytes, "sha256": written.file_sha256}
        finish(self.path, _index(metadata, places), self.meta, files)
        self.after()

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


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
        return _parse_index(json.loads(text), meta["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{checkpoint / INDEX} is damaged ({error}): load another checkpoint with --ckpt-step, or the newest good "
            "one with --load-latest-good"
        ) from error


def _parse_index(index: Any, files: Mapping[str, Any]) -> tuple[Metadata, dict[MetadataIndex, Place]]:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, entry in index["tensors"].items():
        dtype, size = _DTYPES[entry["dtype"]], _sizes(entry["shape"])
        chunks = []
        for part in entry["chunks"]:
            offsets, sizes = _sizes(part["offsets"]), _sizes(part["shape"])
            begin, end = _sizes(part["bytes"])
            file = part["file"]
            inside = len(offsets) == len(sizes) == len(size) and all(
                start + length <= total for start, length, total in zip(offsets, sizes, size, strict=True)
            )
            if not inside or end - begin != math.prod(sizes) * dtype.itemsize:
                raise ValueError(f"a part of {name} is not of its size")
            if not is_plain_name(file) or file not in files or end > files[file]["bytes"]:
                raise ValueError(f"a part of {name} is not in a file of this checkpoint")
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            places[MetadataIndex(name, offsets)] = Place(file, begin, end)
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            raise ValueError(f"parts of {name} are missing")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    return Metadata(tensors), places


def _sizes(values: Any) -> torch.Size:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} is no shape"[:100])
    return torch.Size(values)


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
) -> Path:
    """Save a checkpoint of parameters that come from elsewhere, one in memory at a time; no process group is needed.

    parts: the model's parameter names and shapes. tensor_of: each one's fp32 values, called once. meta: settings and
    model_config as a run's ``Run.meta`` has them. Load it with --finetune.
    """
    shapes = {f"model.{name}": tuple(shape) for name, shape in parts}
    path = begin(folder, iteration)
    named = [(name, torch.float32, shape) for name, shape in shapes.items()]
    name = "rank_00000.safetensors"
    places, size, sha = write_safetensors(path / name, named, lambda key: tensor_of(key.removeprefix("model.")))
    index = {}
    for key, shape in shapes.items():
        place = places[key]
        chunk = {"offsets": [0] * len(shape), "shape": list(shape), "file": name, "bytes": [place.begin, place.end]}
        index[key] = {"dtype": "F32", "shape": list(shape), "chunks": [chunk]}
    meta = meta | {"iteration": iteration, "world_size": 1, "has_optimizer": False, "has_rng": False, "zeropp": None}
    return finish(path, {"tensors": index}, meta, {name: {"bytes": size, "sha256": sha}})
