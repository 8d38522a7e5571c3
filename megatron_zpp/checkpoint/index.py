"""Write and read index.json, which locates the shards of each tensor. Checks everything that it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec._internals import validate_non_overlapping_shards_metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .files import CheckpointError, digest, parse_json
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
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Place:
    """Bytes [begin, end) of a file, where one shard is stored."""

    file: str
    begin: int
    end: int


def build_index(tensors: Mapping[str, Any], places: Mapping[MetadataIndex, Place]) -> dict[str, Any]:
    """Return the content of index.json. tensors: ``TensorStorageMetadata`` by name."""
    entries = {}
    for name, tensor in tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            at = {"offsets": list(chunk.offsets), "shape": list(chunk.sizes)}
            chunks.append(at | {"file": place.file, "bytes": [place.begin, place.end]})
        entries[name] = {"dtype": DTYPE_NAMES[tensor.properties.dtype], "shape": list(tensor.size), "chunks": chunks}
    return {"tensors": entries}


def read_index(checkpoint: Path, meta: Mapping[str, Any]) -> Metadata:
    """Return shapes, dtypes and ``Place``s of all tensors. ``meta``: from ``read_meta``. Raises CheckpointError."""
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
    places: dict[MetadataIndex, Place] = {}
    for name, entry in _values(_values(index, "the index", "tensors")[0], "tensors").items():
        dtype_name, shape, shards = _values(entry, name, "dtype", "shape", "chunks")
        dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
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
) -> tuple[ChunkStorageMetadata, Place]:
    *lists, file = _values(shard, f"a shard of {name}", "offsets", "shape", "bytes", "file")
    offsets, sizes, span = (_sizes(values) for values in lists)
    is_inside = len(offsets) == len(sizes) == len(size) and all(
        start + length <= total for start, length, total in zip(offsets, sizes, size, strict=True)
    )
    if not is_inside or len(span) != 2 or span[1] - span[0] != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"a shard of {name} is not of its size")
    if not is_plain_name(file) or file not in files or span[1] > files[file]["bytes"]:
        raise ValueError(f"a shard of {name} is not in a file of this checkpoint")
    return ChunkStorageMetadata(offsets, sizes), Place(file, *span)


def _values(entry: Any, name: str, *keys: str) -> Any:
    """Return the values of ``keys``, or the object itself without keys. Raises ValueError if they are missing."""
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is not a JSON object")
    missing = [key for key in keys if key not in entry]
    if missing:
        raise ValueError(f"{name} has no {', '.join(missing)}")
    return [entry[key] for key in keys] if keys else entry


def _sizes(values: Any) -> torch.Size:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{short(values)} is not a shape")
    if math.prod(max(1, value) for value in values) >= 2**60:  # more than torch can count
        raise ValueError(f"{short(values)} is too large for a shape")
    return torch.Size(values)


def _check_bytes(places: Mapping[MetadataIndex, Place]) -> None:
    """Raise ValueError if two shards, of one tensor or of two, share bytes of a file."""
    last, last_name = Place("", 0, 0), ""
    for index, place in sorted(places.items(), key=lambda item: (item[1].file, item[1].begin, item[1].end)):
        if place.file == last.file and place.begin < last.end and place.begin < place.end:
            raise ValueError(f"{last_name} and {index.fqn} share bytes of {place.file}")
        if place.file != last.file or place.end > last.end:
            last, last_name = place, index.fqn
