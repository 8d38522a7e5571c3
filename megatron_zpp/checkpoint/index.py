"""Where the shards of each tensor are: index.json and shards.bin. Everything in them is checked before use.

index.json has a line for each tensor. One in several shards has a row of integers for each in shards.bin, so that none
of 16,384 ranks parses the shards of all: a rank reads rows as arrays, and makes objects only of shards that it loads.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec._internals import validate_non_overlapping_shards_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from megatron_zpp.errors import describe_error
from megatron_zpp.files import RequestError, is_bucket
from megatron_zpp.publish.files import DTYPES, NAMES

from .files import CheckpointError, digest, parse_json, read_regular
from .meta import INDEX, REMEDY, is_plain_name, open_in

SHARDS = "shards.bin"  # little-endian 64-bit integers
Rows = NDArray[np.int64]  # [shards, 2 * dims + 2]: offsets, sizes, number of the file, first byte
# How the lines of tensors begin that one rank alone needs: "KIND.RANK.", where parameters may have numbers for names.
_OF_RANK = re.compile(rb',"(?!model\.|optimizer\.)\w+\.([0-9]+)\.')


def build_index(tensors: Mapping[str, Any], places: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, bytes]:
    """Return the content of the index's files by name. tensors: ``TensorStorageMetadata`` by name."""
    files = sorted({place.relative_path for place in places.values()})
    number_of = {file: number for number, file in enumerate(files)}
    shared, of_ranks, parts, num_values = list[str](), list[str](), list[Rows](), 0
    for name, tensor in tensors.items():
        entry = {"dtype": NAMES[tensor.properties.dtype], "shape": list(tensor.size)}
        # Ranks that hold nothing of a tensor write shards without elements.
        chunks = [chunk for chunk in tensor.chunks if math.prod(chunk.sizes)] or tensor.chunks[:1]
        at = [places[MetadataIndex(name, chunk.offsets)] for chunk in chunks]
        if len(chunks) == 1:
            (chunk,), (place,) = chunks, at
            shard = {"offsets": list(chunk.offsets), "shape": list(chunk.sizes), "file": place.relative_path}
            entry["chunks"] = [shard | {"bytes": [place.offset, place.offset + place.length]}]
        else:
            rows = [
                [*c.offsets, *c.sizes, number_of[p.relative_path], p.offset] for c, p in zip(chunks, at, strict=True)
            ]
            entry["rows"] = [num_values, len(rows)]
            parts.append(np.array(rows, dtype="<i8"))
            num_values += parts[-1].size
        line = f"{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}"
        (of_ranks if _OF_RANK.match(b"," + line.encode()) else shared).append(line)
    text = f'{{"files":{json.dumps(files)},"tensors":{{\n' + "\n,".join(shared + of_ranks) + "\n}}\n"
    return {INDEX: text.encode()} | ({SHARDS: b"".join(part.tobytes() for part in parts)} if parts else {})


@dataclass(frozen=True)
class Entry:
    """A tensor in the index: ``rows``, or where to read them."""

    dtype: torch.dtype
    size: torch.Size
    rows: Rows | None
    first: int = 0  # value in shards.bin
    count: int = 0  # its shards there


@dataclass(frozen=True)
class Index:
    """The tensors of a checkpoint by name."""

    checkpoint: Path
    tensors: dict[str, Entry]
    files: list[str]
    file_bytes: Rows  # [files]

    @cached_property
    def _shards(self) -> bytes:
        """Read all of shards.bin at once from a bucket, where each read is a request."""
        return read_regular(self.checkpoint / SHARDS)

    def rows(self, name: str) -> Rows:
        """Return a tensor's shards, each within the tensor and within its file. Raises OSError, ValueError."""
        entry = self.tensors[name]
        dims, rows = len(entry.size), entry.rows
        if rows is None:
            with BytesIO(self._shards) if is_bucket(self.checkpoint) else open_in(self.checkpoint, SHARDS) as file:
                file.seek(8 * entry.first)
                content = file.read(8 * entry.count * (2 * dims + 2))
            if len(content) != 8 * entry.count * (2 * dims + 2):
                raise ValueError(f"{SHARDS} is cut short")
            rows = np.frombuffer(content, dtype="<i8").reshape(entry.count, 2 * dims + 2)
        offsets, sizes, limit = rows[:, :dims], rows[:, dims : 2 * dims], np.array(entry.size, dtype=np.int64)
        if not ((offsets >= 0) & (offsets <= limit) & (sizes >= 0) & (sizes <= limit - offsets)).all():
            raise ValueError(f"a shard of {name} is not of its size")
        file_number, first_byte = rows[:, -2], rows[:, -1]
        is_file = (file_number >= 0) & (file_number < len(self.files))
        if (
            not is_file.all()
            or not ((first_byte >= 0) & (first_byte <= self.file_bytes[file_number] - _bytes_of(entry, rows))).all()
        ):
            raise ValueError(f"a shard of {name} is not in a file of this checkpoint")
        return rows

    def places(self, name: str, rows: Rows) -> list[tuple[ChunkStorageMetadata, _StorageInfo]]:
        """Return offsets, sizes and places of shards."""
        entry, dims = self.tensors[name], len(self.tensors[name].size)
        return [
            (
                ChunkStorageMetadata(torch.Size(row[:dims]), torch.Size(row[dims : 2 * dims])),
                _StorageInfo(self.files[row[-2]], row[-1], length),
            )
            for row, length in zip(rows.tolist(), _bytes_of(entry, rows).tolist(), strict=True)
        ]

    def metadata_for(self, state: Mapping[str, Tensor]) -> Metadata:
        """Return what DCP needs to load this rank's part of ``state``: no other shards. Raises OSError, ValueError."""
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, tensor in state.items():
            entry, rows, dims = self.tensors[name], self.rows(name), tensor.ndim
            begins, ends = rows[:, :dims], rows[:, :dims] + rows[:, dims : 2 * dims]
            is_needed = np.zeros(len(rows), dtype=bool)
            for part in _create_chunk_list(tensor):
                begin, size = (np.array(values, dtype=np.int64) for values in (part.offsets, part.sizes))
                shared = np.minimum(ends, begin + size) - np.maximum(begins, begin)  # [shards, dims]
                elements = shared.clip(0).prod(axis=1)
                if elements.sum() != math.prod(part.sizes):
                    raise ValueError(f"shards of {name} are missing, or there are too many")
                is_needed |= elements > 0
            shards = self.places(name, rows[is_needed])
            chunks = [chunk for chunk, _ in shards]
            tensors[name] = TensorStorageMetadata(TensorProperties(entry.dtype), entry.size, chunks)
            places |= {MetadataIndex(name, chunk.offsets): place for chunk, place in shards}
        return Metadata(tensors, storage_data=places)

    def check(self) -> None:
        """Raise ValueError unless the shards of every tensor cover it exactly, and no two share bytes of a file."""
        spans, names = [np.zeros((0, 4), dtype=np.int64)], list(self.tensors)
        for number, (name, entry) in enumerate(self.tensors.items()):
            rows, dims = self.rows(name), len(entry.size)
            if not len(rows) or sum(rows[:, dims : 2 * dims].prod(axis=1).tolist()) != math.prod(entry.size):
                raise ValueError(f"shards of {name} are missing, or there are too many")
            if math.prod(entry.size) and _overlap(rows, dims):
                raise ValueError(f"shards of {name} overlap")
            length = _bytes_of(entry, rows)
            span = np.stack([rows[:, -2], rows[:, -1], rows[:, -1] + length, np.full_like(length, number)], axis=1)
            spans.append(span[length > 0])
        span = np.concatenate(spans)
        span = span[np.lexsort((span[:, 1], span[:, 0]))]
        is_shared = (span[1:, 0] == span[:-1, 0]) & (span[1:, 1] < span[:-1, 2])
        for at in np.flatnonzero(is_shared)[:1]:
            file = self.files[span[at, 0]]
            raise ValueError(f"{names[span[at, 3]]} and {names[span[at + 1, 3]]} share bytes of {file}")


def _bytes_of(entry: Entry, rows: Rows) -> Rows:
    dims = len(entry.size)
    return rows[:, dims : 2 * dims].prod(axis=1) * entry.dtype.itemsize


def _overlap(rows: Rows, dims: int) -> bool:
    if len(rows) == 1 or dims == 0:  # a scalar has one shard
        return len(rows) > 1
    boxes = rows[:, : 2 * dims].reshape(-1, 2, dims)
    divided = np.flatnonzero((boxes != boxes[0]).any(axis=(0, 1)))
    if len(divided) == 1:
        begins, sizes = boxes[:, 0, divided[0]], boxes[:, 1, divided[0]]
        order = begins.argsort()
        return bool(((begins + sizes)[order][:-1] > begins[order][1:]).any())
    try:
        validate_non_overlapping_shards_metadata([ShardMetadata(begin, sizes) for begin, sizes in boxes.tolist()])
    except ValueError:
        return True
    return False


def read_index(checkpoint: Path, meta: Mapping[str, Any], ranks: Collection[str] | None = None) -> Index:
    """Read and check the index. ``meta``: from ``read_meta``. Raises CheckpointError, RequestError.

    ranks: a rank that loads names those whose own tensors it needs. It skips the lines of others, and checks only what
    it reads later; rank 0 has checked the whole, in ``problems``. None: the whole.
    """
    try:
        with open_in(checkpoint, INDEX) as file:
            lines = file.readlines()
        text = b"".join(lines)
        if digest(text) != meta["files"].get(INDEX, {}).get("sha256"):
            raise ValueError("its digest is not the one in meta.json")
        if ranks is not None:
            wanted = {rank.encode() for rank in ranks}
            text = b"".join(line for line in lines if (match := _OF_RANK.match(line)) is None or match[1] in wanted)
        del lines
        index = _parse_index(checkpoint, parse_json(text), meta["files"])
        if ranks is None:
            index.check()
        return index
    except RequestError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / INDEX} is damaged ({describe_error(error)}): {REMEDY}") from error


def _parse_index(checkpoint: Path, index: Any, files: Mapping[str, Any]) -> Index:
    names = index.get("files", []) if isinstance(index, dict) else []
    if not isinstance(names, list) or any(not is_plain_name(name) or name not in files for name in names):
        raise ValueError("it names files that are not in this checkpoint")
    number_of = {name: number for number, name in enumerate(names)}
    tensors = {}
    for name, entry in _values(_values(index, "the index", "tensors")[0], "tensors").items():
        dtype_name, shape = _values(entry, name, "dtype", "shape")
        dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
        if dtype is None:
            raise ValueError(f"{name} is of the dtype {short(dtype_name)}, which is not known")
        size = _sizes(shape)
        if "rows" in entry:
            where = _integers(entry["rows"]) or [0]
            end = where[0] + where[-1] * (2 * len(size) + 2)
            if len(where) != 2 or 8 * end > files.get(SHARDS, {}).get("bytes", 0):
                raise ValueError(f"the rows of {name} are not in {SHARDS}")
            tensors[name] = Entry(dtype, size, None, *where)
            continue
        (shards,) = _values(entry, name, "chunks")
        if not isinstance(shards, list):
            raise ValueError(f"the chunks of {name} are not a list")
        rows = [_parse_shard(name, shard, size, dtype, files, number_of) for shard in shards]
        if math.prod(size):  # ranks that hold nothing of a tensor wrote shards without elements
            rows = [row for row in rows if 0 not in row[len(size) : -2]]
        tensors[name] = Entry(dtype, size, np.array(rows, dtype=np.int64).reshape(len(rows), 2 * len(size) + 2))
    return Index(checkpoint, tensors, list(number_of), np.array([files[name]["bytes"] for name in number_of], np.int64))


def _parse_shard(
    name: str, shard: Any, size: torch.Size, dtype: torch.dtype, files: Mapping[str, Any], number_of: dict[str, int]
) -> list[int]:
    offsets, sizes, span, file = _values(shard, f"a shard of {name}", "offsets", "shape", "bytes", "file")
    offsets, sizes, span = _sizes(offsets), _sizes(sizes), _integers(span)
    has_dims = len(offsets) == len(sizes) == len(size) and len(span) == 2
    if not has_dims or span[1] - span[0] != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"a shard of {name} is not of its size")
    if not is_plain_name(file) or file not in files:
        raise ValueError(f"a shard of {name} is not in a file of this checkpoint")
    return [*offsets, *sizes, number_of.setdefault(file, len(number_of)), span[0]]


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
