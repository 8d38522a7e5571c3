"""Read and write a checkpoint's files: regular files only, and on the disk when writing returns."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_zpp import files
from megatron_zpp.errors import attempt
from megatron_zpp.publish.files import safetensors_header


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or of another model. The message is one line that says what to do."""


open_regular = partial(files.open_regular, refusal=CheckpointError)


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def parse_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and bring it to the disk; what could not be written whole is removed. Raises OSError."""
    with attempt("write", path), open_regular(path, "wb") as file:
        try:
            file.write(content)
            sync_file(file, path)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def sync_file(file: BinaryIO, path: Path) -> None:
    if not files.is_bucket(path):  # an object is durable when it is there
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put renames and new names in ``folder`` on the disk."""
    if files.is_bucket(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and put their names on the disk."""
    if not files.is_bucket(folder) and not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file that is on the disk."""

    places: dict[str, _StorageInfo]  # by tensor name
    entry: dict[str, Any]  # for meta.json
    nonfinite: list[str]  # tensors that hold NaN or Inf


def write_safetensors(
    path: Path,
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> TensorFile:
    """Write tensors one by one, which ``read`` returns by name. tensors: name, dtype and shape of each.

    offsets: of each shard in its tensor, for DCP's HuggingFaceStorageReader; our reader uses the index.
    """
    planned = {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}
    metadata = None
    if offsets is not None:
        sharding = {name: {"saved_offsets": list(begin)} for name, begin in offsets.items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":"))}
    prefix, spans = safetensors_header([(name, *kind) for name, kind in planned.items()], metadata)
    sha256, nonfinite = hashlib.sha256(prefix), []
    with attempt("write", path), open_regular(path, "wb") as file:
        file.write(prefix)
        for name in spans:
            (dtype, shape), tensor = planned[name], read(name).detach().cpu().contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                raise ValueError(f"{name} was planned as {dtype} {shape}, but is {tensor.dtype} {tuple(tensor.shape)}")
            if not _is_finite(tensor):
                nonfinite.append(name)
            content: Any = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else b""
            sha256.update(content)
            file.write(content)
        sync_file(file, path)
    places = {name: _StorageInfo(path.name, len(prefix) + begin, end - begin) for name, (begin, end) in spans.items()}
    nbytes = len(prefix) + max((end for _, end in spans.values()), default=0)
    return TensorFile(places, {"bytes": nbytes, "sha256": sha256.hexdigest()}, nonfinite)


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # One pass without a copy; NaN comes through. Few operators support 8-bit floats.
    low, high = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax()
    return math.isfinite(low) and math.isfinite(high)
