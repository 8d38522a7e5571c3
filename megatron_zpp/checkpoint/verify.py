"""Verify that a checkpoint is what was saved: the sizes of all files, and digests of all or of some."""

from __future__ import annotations

import hashlib
import os
import random
import zlib
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zpp.zeropp.fsdp.topology import gather_objects

from .files import CheckpointError
from .folder import candidates
from .index import read_index
from .meta import nonfinite, open_in, read_meta

SAMPLED = 8  # --verify-checkpoint sample reads every 8th piece of a file


def problems(
    checkpoint: Path,
    digests: str = "all",
    rank: int = 0,
    world_size: int = 1,
    finite: bool = False,
    draw: random.Random | None = None,
) -> list[str]:
    """List what is wrong with a checkpoint, file by file; [] if nothing is.

    digests: "all": every byte is read. "sample": of every file an eighth of its pieces, at least one, drawn by
    ``draw``, or else differently at every call. "none": sizes alone. With several ranks each reads its share of files.
    finite: NaN or Inf is a problem too, where the checkpoint says that it holds some.
    """
    try:
        meta = read_meta(checkpoint)
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
            # index.json, and files that an earlier version wrote, have no sums of pieces: they are read whole.
            if digests == "all" or (digests == "sample" and "crc32" not in entry):
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"{path} is not what was written: its SHA-256 differs"
            elif digests == "sample":
                return _problem_of_sample(file, path, entry, draw)
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, CheckpointError) as error:
        return f"{path} cannot be read ({error})"
    return None


def _problem_of_sample(file: BufferedReader, path: Path, entry: dict[str, Any], draw: random.Random) -> str | None:
    piece, crc32 = entry["piece_bytes"], bytes.fromhex(entry["crc32"])
    for number in sampled_pieces(len(crc32) // 4, draw):
        file.seek(number * piece)
        if zlib.crc32(file.read(piece)) != int.from_bytes(crc32[4 * number : 4 * number + 4]):
            return f"{path} is not what was written: the CRC-32 of the {piece} bytes from {number * piece} on differs"
    return None


def sampled_pieces(count: int, draw: random.Random) -> list[int]:
    """Draw the pieces to read of a file that has ``count``; their numbers, in order."""
    return sorted(draw.sample(range(count), -(-count // SAMPLED)))


def problems_on_all_ranks(checkpoint: Path, digests: str, finite: bool = False) -> list[str]:
    """Run ``problems`` with its files shared among all ranks. Every rank returns the same. Collective."""
    mine = problems(checkpoint, digests, dist.get_rank(), dist.get_world_size(), finite)
    return list(dict.fromkeys(chain.from_iterable(gather_objects(mine))))


def latest_good(folder: str, digests: str) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint without damage, NaN or Inf, and list the problems of newer ones. Collective.

    What rank 0 sees in the folder counts.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [candidates(folder) if Path(folder).is_dir() else []]
        except OSError as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], OSError):
        raise CheckpointError(f"{folder} cannot be read ({found[0]})")
    passed_over: list[str] = []
    for checkpoint in found[0]:
        wrong = problems_on_all_ranks(checkpoint, digests, finite=True)
        if not wrong:
            return checkpoint, passed_over
        passed_over += wrong
    return None, passed_over
