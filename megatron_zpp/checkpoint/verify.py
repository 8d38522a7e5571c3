"""Verify that a checkpoint is what was saved: sizes of all files, and digests of all or of a sample."""

import hashlib
import os
import random
import zlib
from pathlib import Path
from typing import Any

from megatron_zpp.errors import describe_error

from .files import CheckpointError
from .index import read_index
from .meta import nonfinite, open_in, read_meta

SAMPLE_RATIO = 8  # --verify-checkpoint sample reads 1/8 of a file's blocks


def problems(
    checkpoint: Path,
    digests: str = "all",
    rank: int = 0,
    world_size: int = 1,
    finite: bool = False,
    draw: random.Random | None = None,
) -> list[str]:
    """List what is wrong with a checkpoint, file by file.

    digests: "all" reads every byte; "sample" an eighth of each file's blocks, at least one, drawn by ``draw`` or
    differently at every call; "none" compares sizes only. Each rank reads its share of files, and rank 0 the index.
    finite: recorded NaN or Inf is a problem too.
    """
    try:
        meta = read_meta(checkpoint)
        if rank == 0:
            read_index(checkpoint, meta)
    except CheckpointError as error:
        return [str(error)]
    draw = draw or random.Random()
    found = [nonfinite(checkpoint, meta) if finite else None]
    found += [
        _problem(checkpoint, name, entry, digests, draw)
        for number, (name, entry) in enumerate(sorted(meta["files"].items()))
        if number % world_size == rank
    ]
    return [problem for problem in found if problem is not None]


def _problem(checkpoint: Path, name: str, entry: dict[str, Any], digests: str, draw: random.Random) -> str | None:
    path = checkpoint / name
    try:
        with open_in(checkpoint, name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                return f"{path} has {size} bytes instead of {entry['bytes']}"
            # Only files of tensors have CRC-32.
            if digests == "all" or (digests == "sample" and "crc32" not in entry):
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"{path} is not what was written: its SHA-256 differs"
            elif digests == "sample":
                size, crc32 = entry["piece_bytes"], bytes.fromhex(entry["crc32"])
                for block in sampled_blocks(len(crc32) // 4, draw):
                    file.seek(begin := block * size)
                    if zlib.crc32(file.read(size)) != int.from_bytes(crc32[4 * block : 4 * block + 4]):
                        where = f"the CRC-32 of the {size} bytes from {begin} on"
                        return f"{path} is not what was written: {where} differs"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, CheckpointError) as error:
        return f"{path} cannot be read ({describe_error(error)})"
    return None


def sampled_blocks(count: int, draw: random.Random) -> list[int]:
    """Draw the numbers of the blocks to read, in order, for a file of ``count`` blocks."""
    return sorted(draw.sample(range(count), -(-count // SAMPLE_RATIO)))
