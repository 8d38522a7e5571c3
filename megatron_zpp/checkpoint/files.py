"""Read and write a checkpoint's files: regular files only, and on the disk when writing returns."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from megatron_zpp import files
from megatron_zpp.errors import attempt
from megatron_zpp.publish.files import write_safetensors


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


def write_shards(
    path: Path, items: Sequence[WriteItem], read: Callable[[WriteItem], Any]
) -> tuple[dict[str, Any], list[str], list[int]]:
    """Write the shards that DCP planned, which ``read`` returns, one by one. A rank has one shard of each tensor.

    Returns the file's entry in meta.json, names of tensors that hold NaN or Inf, and the first byte of each shard.
    """
    named = {item.index.fqn: item for item in items}
    planned = {name: item.tensor_data for name, item in named.items() if item.tensor_data is not None}
    assert len(planned) == len(items), "each item is a tensor, and a rank has one shard of each"
    nonfinite: list[str] = []

    def read_and_check(name: str) -> Tensor:
        tensor: Tensor = read(named[name]).detach().cpu()
        if not _is_finite(tensor):
            nonfinite.append(name)
        return tensor

    # For DCP's HuggingFaceStorageReader; our reader uses the index.
    sharding = {name: {"saved_offsets": [*shard.chunk.offsets]} for name, shard in planned.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":"))}
    kinds = [(name, shard.properties.dtype, shard.chunk.sizes) for name, shard in planned.items()]
    with attempt("write", path), open_regular(path, "wb") as file:
        entry, first_bytes = write_safetensors(file, kinds, read_and_check, metadata)
        sync_file(file, path)
    return entry, nonfinite, [first_bytes[item.index.fqn] for item in items]


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # One pass without a copy; NaN comes through. Few operators support 8-bit floats.
    low, high = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax()
    return math.isfinite(low) and math.isfinite(high)
