"""Files of published weights, and the values of one rank as one buffer.

    FOLDER/v00000012.json                   manifest of version 12: run, step, base, size and SHA-256 of its files
    FOLDER/v00000012.rank00003.safetensors  what rank 3 wrote of it

An anchor (base null) has the shards of all tensors by name. Other versions say which values moved since their base:
``MOVES`` are the moves of a rank's values of the 16-bit type "dtype", in the order of the anchor, as
``zeropp.wire.moves`` codes them; tensors of other types are there in full. "__metadata__" repeats run, version, base.
The manifest is renamed into its place when all other files are written, so a version is there or not.
"""

import ctypes
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_zpp.zeropp.wire.format import WireFormat, wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard

FORMAT = "megatron_zpp weights 1"
MOVES = ".moves"  # no tensor of a module has this name
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class PublishError(ValueError):
    """Weights cannot be published or read. The message is one line that says what to do."""


def manifest_path(folder: Path, version: int) -> Path:
    return folder / f"v{version:08d}.json"


def shards_name(version: int, rank: int) -> str:
    return f"v{version:08d}.rank{rank:05d}.safetensors"


def versions_in(folder: Path) -> list[int]:
    """List the complete versions in a folder. Raises OSError if it cannot be read."""
    names = os.listdir(folder) if folder.exists() else []  # the run may not have begun
    return [int(name[1:9]) for name in names if re.fullmatch(r"v\d{8}\.json", name, re.ASCII)]


def pack(tensors: Iterable[Tensor], dtype: torch.dtype) -> tuple[WireFormat, Tensor]:
    """Pack the 16-bit tensors, whose moves are coded, into one buffer uint8 [nbytes]; return its format too."""
    parts = [tensor.flatten() for tensor in tensors if tensor.dtype == dtype]
    values = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
    format = wire_format((ParameterShard("shard", len(values), quantizable=False),), None, None, dtype)
    return format, torch.nn.functional.pad(values.view(torch.uint8), (0, format.nbytes - values.nbytes))


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the first bytes of a file, and where each tensor begins and ends after them, in the order of writing."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    spans, end = {}, 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):  # aligns all of them
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": [*shape], "data_offsets": [begin, end]}
        spans[name] = begin, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans


def write_safetensors(
    file: BinaryIO,
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, int]]:
    """Write tensors one by one, which ``read`` returns by name. tensors: name, dtype and shape of each.

    Returns the file's size and SHA-256, for a manifest, and each tensor's first byte.
    """
    planned = {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}
    prefix, spans = safetensors_header([(name, *kind) for name, kind in planned.items()], metadata)
    file.write(prefix)
    sums = hashlib.sha256(prefix)
    for name in spans:
        tensor = read(name).detach().cpu().contiguous()
        if (kind := (tensor.dtype, tuple(tensor.shape))) != planned[name]:
            raise ValueError(f"{name} was planned as {planned[name]}, but is {kind}")
        if tensor.nbytes:  # its memory, without numpy
            view = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            file.write(view)
            sums.update(view)
    nbytes = len(prefix) + max((end for _, end in spans.values()), default=0)
    first_bytes = {name: len(prefix) + begin for name, (begin, _) in spans.items()}
    return {"bytes": nbytes, "sha256": sums.hexdigest()}, first_bytes
