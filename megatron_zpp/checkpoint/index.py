"""Where the shards of each tensor are: index.json and shards.bin. Everything in them is checked before use.

index.json has a line for each tensor. Each of its shards is a row of integers in shards.bin, so that none of 16,384
ranks parses the shards of all: a rank reads rows as arrays.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from megatron_zpp.errors import describe_error
from megatron_zpp.files import RequestError, is_bucket
from megatron_zpp.publish.files import DTYPES, NAMES
from megatron_zpp.zeropp.api import local_part

from .files import CheckpointError, digest, parse_json, read_regular
from .meta import INDEX, REMEDY, is_plain_name, nonfinite, open_in, read_meta

SHARDS = "shards.bin"  # little-endian 64-bit integers
Rows = NDArray[np.int64]  # [shards, 2 * dims + 2]: offsets, sizes, number of the file, first byte
# How the lines of tensors begin that one rank alone needs: "KIND.RANK.", where parameters may have numbers for names.
_OF_RANK = re.compile(rb',"(?!model\.|optimizer\.)\w+\.([0-9]+)\.')


def build_index(files: Iterable[tuple[str, Sequence[WriteItem], Sequence[int]]]) -> dict[str, bytes]:
    """Return the content of the index's files by name. files: name of each, its shards, and their first bytes."""
    names: list[str] = []
    kinds: dict[str, TensorWriteData] = {}
    rows: dict[str, list[list[int]]] = {}
    for number, (file, items, first_bytes) in enumerate(files):
        names.append(file)
        for item, first_byte in zip(items, first_bytes, strict=True):
            shard = item.tensor_data
            assert shard is not None
            row = [*shard.chunk.offsets, *shard.chunk.sizes, number, first_byte]
            kinds[item.index.fqn] = shard
            # Ranks that hold nothing of a tensor write shards without elements.
            rows.setdefault(item.index.fqn, []).extend([row] if math.prod(shard.chunk.sizes) else [])
    lines, values, num_values = list[str](), list[bytes](), 0
    for name in sorted(kinds, key=lambda name: bool(_OF_RANK.match(f",{json.dumps(name)}".encode()))):  # these last
        entry = {"dtype": NAMES[kinds[name].properties.dtype], "shape": [*kinds[name].size]}
        entry["rows"] = [num_values, len(rows[name])]
        lines.append(f"{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}")
        values.append(np.array(rows[name], dtype="<i8").tobytes())
        num_values += len(values[-1]) // 8
    text = f'{{"files":{json.dumps(names)},"tensors":{{\n' + "\n,".join(lines) + "\n}}\n"
    return {INDEX: text.encode(), SHARDS: b"".join(values)}


class Entry(NamedTuple):
    """A tensor in the index."""

    dtype: torch.dtype
    size: torch.Size
    first_value: int  # in shards.bin
    num_shards: int


@dataclass(frozen=True)
class Index:
    """The tensors of a checkpoint by name."""

    checkpoint: Path
    tensors: dict[str, Entry]
    files: list[str]
    file_bytes: Rows  # [files]
    shards: bytes | None  # all of shards.bin; None: rows are read when they are needed

    def rows(self, name: str) -> Rows:
        """Return a tensor's shards, each within the tensor and within its file. Raises OSError, ValueError."""
        entry, dims = self.tensors[name], len(self.tensors[name].size)
        with open_in(self.checkpoint, SHARDS) if self.shards is None else BytesIO(self.shards) as file:
            file.seek(8 * entry.first_value)
            data = file.read(8 * entry.num_shards * (2 * dims + 2))
        if len(data) < 8 * entry.num_shards * (2 * dims + 2):
            raise ValueError(f"{SHARDS} is cut short")
        rows = np.frombuffer(data, dtype="<i8").reshape(entry.num_shards, 2 * dims + 2)
        offsets, sizes, limit = rows[:, :dims], rows[:, dims : 2 * dims], np.array(entry.size, dtype=np.int64)
        if not ((offsets >= 0) & (offsets <= limit) & (sizes > 0) & (sizes <= limit - offsets)).all():
            raise ValueError(f"a shard of {name} is not of its size")
        number, first_byte, nbytes = rows[:, -2], rows[:, -1], sizes.prod(axis=1) * entry.dtype.itemsize
        is_file = (number >= 0) & (number < len(self.files)) & (first_byte >= 0)
        if not is_file.all() or (first_byte > self.file_bytes[number] - nbytes).any():
            raise ValueError(f"a shard of {name} is not in a file of this checkpoint")
        return rows

    def parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, list[int], tuple[slice, ...], Tensor]]:
        """Yield what this rank's part of ``tensor`` is read from: only rows of shards that it needs.

        These lie side by side from a first byte of a file on, and have a shape; slices of them go to a part of
        ``tensor``. Raises OSError, ValueError.
        """
        (chunk,), rows, dims = _create_chunk_list(tensor), self.rows(name), tensor.ndim
        begins, sizes = rows[:, :dims], rows[:, dims : 2 * dims]
        begin, size = (np.array(values, dtype=np.int64) for values in (chunk.offsets, chunk.sizes))
        lows, highs = np.maximum(begins, begin), np.minimum(begins + sizes, begin + size)
        elements = (highs - lows).clip(0).prod(axis=1)
        if elements.sum() != size.prod():
            raise ValueError(f"shards of {name} are missing, or there are too many")
        for at in np.flatnonzero(elements):
            origin, low, high, shape = (values[at].tolist() for values in (begins, lows, highs, sizes))
            source, target = (
                [slice(first - zero, end - zero) for first, end, zero in zip(low, high, zeros, strict=True)]
                for zeros in (origin, chunk.offsets)
            )
            file, first_byte = rows[at, -2:].tolist()
            if dims:
                first_byte += source[0].start * math.prod(shape[1:]) * tensor.itemsize
                shape[0] = high[0] - low[0]
                source[0] = slice(None)
            yield self.files[file], first_byte, shape, tuple(source), local_part(tensor).detach()[tuple(target)]

    def check(self) -> None:
        """Raise ValueError unless the shards of every tensor cover it exactly, and no two share rows or bytes."""
        spans, names, num_values = [np.zeros((0, 4), dtype=np.int64)], list(self.tensors), 0
        for number, (name, entry) in enumerate(self.tensors.items()):
            rows, dims = self.rows(name), len(entry.size)
            if entry.first_value != num_values:
                raise ValueError(f"the rows of {name} do not follow those before")
            num_values += rows.size
            if not _cover(rows[:, : 2 * dims], entry.size):
                raise ValueError(f"the shards of {name} do not cover it exactly")
            length = rows[:, dims : 2 * dims].prod(axis=1) * entry.dtype.itemsize
            spans.append(np.column_stack([rows[:, -2:], rows[:, -1] + length, np.full_like(length, number)]))
        span = np.concatenate(spans)
        span = span[np.lexsort((span[:, 1], span[:, 0]))]
        is_shared = (span[1:, 0] == span[:-1, 0]) & (span[1:, 1] < span[:-1, 2])
        for at in np.flatnonzero(is_shared)[:1]:
            file = self.files[span[at, 0]]
            raise ValueError(f"{names[span[at, 3]]} and {names[span[at + 1, 3]]} share bytes of {file}")


def _cover(boxes: Rows, size: torch.Size) -> bool:
    """Return whether boxes [boxes, 2 * dims] cover a tensor of ``size`` without gap or overlap.

    Add up the boxes' corners with alternating signs: they do if what does not cancel is the tensor's own corners.
    """
    if not math.prod(size):
        return not len(boxes)
    whole = np.array([[0] * len(size) + [*size]], dtype=np.int64)
    if len(boxes) == 1:
        return bool((boxes == whole).all())
    begins, sizes = np.split(np.concatenate([boxes, whole]), 2, axis=1)
    ends = np.stack([begins, begins + sizes])  # [2, boxes, dims]
    divided = np.flatnonzero((ends != ends[:, -1:]).any(axis=(0, 1)))
    if not 0 < len(divided) <= 3:  # no run divides more
        return False
    sides = [*product((0, 1), repeat=len(divided))]
    corners = np.concatenate([ends[list(side), :, divided].T for side in sides])  # [corners, divided]
    signs = np.concatenate([np.append(np.ones(len(boxes)), -1) * (-1) ** sum(side) for side in sides])
    order = np.lexsort(corners.T)
    corners = corners[order]
    is_new = (corners[1:] != corners[:-1]).any(axis=1)
    return not np.add.reduceat(signs[order], [0, *np.flatnonzero(is_new) + 1]).any()


def read_index(checkpoint: Path, meta: Mapping[str, Any], ranks: Collection[str] | None = None) -> Index:
    """Read and check the index. ``meta``: from ``read_meta``. Raises CheckpointError, RequestError.

    ranks: a rank that loads names those whose own tensors it needs. It skips the lines of others, and checks only what
    it reads later; rank 0 has checked the whole, in ``problems``. None: the whole.
    """
    try:
        text = read_regular(checkpoint / INDEX)
        if digest(text) != meta["files"].get(INDEX, {}).get("sha256"):
            raise ValueError("its digest is not the one in meta.json")
        if ranks is not None:
            wanted = {rank.encode() for rank in ranks}
            matches = ((_OF_RANK.match(line), line) for line in text.splitlines(keepends=True))
            text = b"".join(line for match, line in matches if match is None or match[1] in wanted)
        # A check needs all rows. In a bucket each read is a request.
        shards = read_regular(checkpoint / SHARDS) if ranks is None or is_bucket(checkpoint) else None
        index = _parse_index(checkpoint, parse_json(text), meta["files"], shards)
        if ranks is None:
            index.check()
        return index
    except RequestError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / INDEX} is damaged ({describe_error(error)}): {REMEDY}") from error


def _parse_index(checkpoint: Path, index: Any, files: Mapping[str, Any], shards: bytes | None) -> Index:
    try:
        names, entries = index["files"], index["tensors"]
        kinds = {name: (entry["dtype"], entry["shape"], entry["rows"]) for name, entry in entries.items()}
    except (AttributeError, KeyError, TypeError):
        raise ValueError("it does not say of what dtype and shape tensors are, and where") from None
    if not isinstance(names, list) or any(not is_plain_name(name) or name not in files for name in names):
        raise ValueError("it names files that are not in this checkpoint")
    if len({*names}) < len(names):
        raise ValueError("it names a file twice")
    tensors, nbytes = {}, files.get(SHARDS, {}).get("bytes", 0)
    for name, (dtype, shape, rows) in kinds.items():
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{name} is of the dtype {short(dtype)}, which is not known")
        size = _size(shape)
        if len(_integers(rows)) != 2 or 8 * (rows[0] + rows[1] * (2 * len(size) + 2)) > nbytes:
            raise ValueError(f"the rows of {name} are not in {SHARDS}")
        tensors[name] = Entry(DTYPES[dtype], size, *rows)
    return Index(checkpoint, tensors, names, np.array([files[name]["bytes"] for name in names], np.int64), shards)


def _size(values: Any) -> torch.Size:
    if math.prod(max(1, value) for value in _integers(values)) >= 2**60:  # more than torch can count
        raise ValueError(f"{short(values)} is too large for a shape")
    return torch.Size(values)


def _integers(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < 2**60 for value in values):
        raise ValueError(f"{short(values)} is not a shape")
    return values


def problems(checkpoint: Path, rank: int = 0, world_size: int = 1, finite: bool = False) -> list[str]:
    """List what is wrong with a checkpoint, file by file. Each rank reads its share of files, and rank 0 the index.

    finite: recorded NaN or Inf is a problem too. Raises RequestError where a bucket does not answer.
    """
    try:
        meta = read_meta(checkpoint)
        if rank == 0:
            read_index(checkpoint, meta)
    except CheckpointError as error:
        return [str(error)]
    found = [nonfinite(checkpoint, meta) if finite else None]
    found += [
        _problem(checkpoint, name, entry)
        for number, (name, entry) in enumerate(sorted(meta["files"].items()))
        if number % world_size == rank
    ]
    return [problem for problem in found if problem is not None]


def _problem(checkpoint: Path, name: str, entry: dict[str, Any]) -> str | None:
    path = checkpoint / name
    try:
        with open_in(checkpoint, name) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size != entry["bytes"]:
                return f"{path} has {size} bytes instead of {entry['bytes']}"
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                return f"{path} is not what was written: its SHA-256 differs"
    except FileNotFoundError:
        return f"{path} is missing"
    except RequestError:
        raise
    except (OSError, CheckpointError) as error:
        return f"{path} cannot be read ({describe_error(error)})"
    return None
