"""Is a checkpoint what was saved? Sizes of all files, and digests of all or of some."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .folder import CheckpointError, candidates, open_in, read_meta
from .storage import read_index

SAMPLED = 8  # one file in so many, with --verify-checkpoint sample


def problems(checkpoint: Path, digests: str = "all", rank: int = 0, world_size: int = 1) -> list[str]:
    """What is wrong with a checkpoint, file by file; [] if nothing is.

    digests: "all", "sample" or "none". With several ranks each one reads its share of the files.
    """
    try:
        meta = read_meta(checkpoint)
        read_index(checkpoint, meta)
    except CheckpointError as error:
        return [str(error)]
    found = []
    for number, (name, entry) in enumerate(sorted(meta["files"].items())):
        if number % world_size != rank:
            continue
        # Which files are sampled changes from checkpoint to checkpoint, so that all are read in the long run.
        is_read = digests == "all" or (
            digests == "sample" and (number // world_size + meta["iteration"]) % SAMPLED == 0
        )
        problem = _problem(checkpoint, name, entry, is_read)
        if problem is not None:
            found.append(problem)
    return found


def _problem(checkpoint: Path, name: str, entry: dict[str, Any], is_read: bool) -> str | None:
    path = checkpoint / name
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path} has {size} bytes instead of {entry['bytes']}"
        if is_read:
            with open_in(checkpoint, name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"{path} is not what was written: its SHA-256 differs"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, CheckpointError) as error:
        return f"{path} cannot be read ({error})"
    return None


def problems_on_all_ranks(checkpoint: Path, digests: str) -> list[str]:
    """``problems``, its work shared by all ranks; the same answer on each. Collective."""
    mine = problems(checkpoint, digests, dist.get_rank(), dist.get_world_size())
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, mine)
    return list(dict.fromkeys(problem for of_rank in found for problem in of_rank))


def latest_good(folder: str, digests: str) -> tuple[Path | None, list[str]]:
    """The newest checkpoint without a problem, and the problems of those that are newer. Collective.

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
        wrong = problems_on_all_ranks(checkpoint, digests)
        if not wrong:
            return checkpoint, passed_over
        passed_over += wrong
    return None, passed_over
