"""Verify that a checkpoint is what was saved: sizes and digests of all files."""

import hashlib
import os
from pathlib import Path
from typing import Any

from megatron_zpp.errors import describe_error
from megatron_zpp.files import RequestError

from .files import CheckpointError
from .index import read_index
from .meta import nonfinite, open_in, read_meta


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
