"""List, verify and compare checkpoints. Reads one tensor at a time, and needs no GPU.

    python tools/inspect_checkpoint.py list runs/resumed
    python tools/inspect_checkpoint.py verify runs/resumed
    python tools/inspect_checkpoint.py diff runs/resumed/iter_0000050 runs/resumed/iter_0000100

Ends with status 1 where ``verify`` finds damage, NaN or Inf, or ``diff`` a difference, and with 2 after a mistake.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint import (
    CheckpointError,
    candidates,
    find_checkpoint,
    is_complete,
    iterate_tensors,
    problems,
    read_meta,
)
from megatron_zpp.commands.common import report_errors
from megatron_zpp.settings.flags import number

SHOWN = 20  # differing tensors
GIVE = "give what --save was, or one of its iter_* folders"


def list_checkpoints(folder: str) -> int:
    """Print one line for each checkpoint, newest first."""
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"{folder} is no folder: {GIVE}")
    latest = None
    try:
        latest = find_checkpoint(folder)
    except CheckpointError as error:
        print(f"note: {error}")
    paths = sorted(root.glob("iter_*"), reverse=True)
    if not paths:
        print(f"{folder} holds no checkpoint: {GIVE}")
    for path in paths:
        is_latest = latest is not None and path.name == latest.name
        print(f"{path.name}{' (latest)' if is_latest else ''}: {_summary(path)}")
    return 0


def _summary(path: Path) -> str:
    if not is_complete(path):
        return "incomplete"
    try:
        meta = read_meta(path)
    except CheckpointError as error:
        return str(error)
    size = sum(entry["bytes"] for entry in meta["files"].values())
    loss = meta.get("loss")
    parts = [
        f"{meta['settings'].get('architecture')}, {meta['world_size']} ranks, {size / 1e6:,.1f} MB",
        f"{meta.get('tokens', 0):,} tokens" + ("" if loss is None else f", loss {loss:.4f}"),
        f"saved {meta.get('saved_at', 'at an unknown time')} by torch {meta.get('torch', '?')}",
    ]
    if "nonfinite" not in meta:
        parts.append("not recorded whether finite")
    elif meta["nonfinite"]:
        parts.append(f"NaN or Inf in {', '.join(meta['nonfinite'])}")
    left_out = [
        what for what, has in (("optimizer", meta["has_optimizer"]), ("random states", meta["has_rng"])) if not has
    ]
    return "; ".join(parts + ([f"without {' and '.join(left_out)}"] if left_out else []))


def verify(folder: str, iteration: int | None) -> int:
    """Check sizes and digests of every file, and whether it is finite, in one checkpoint or in all."""
    if (Path(folder) / "meta.json").exists() or iteration is not None:
        paths = [_checkpoint(folder, iteration)]
    else:
        paths = candidates(folder)
    if not paths:
        raise CheckpointError(f"{folder} holds no checkpoint: {GIVE}")
    bad = 0
    for path in paths:
        found = problems(path, finite=True)
        bad += bool(found)
        print(f"{path}: {'not good' if found else 'good'}")
        for problem in found:
            print(f"  {problem}")
    return 1 if bad else 0


def diff(first: str, second: str) -> int:
    """Print settings, counters and tensors that differ."""
    paths = _checkpoint(first), _checkpoint(second)
    metas = [read_meta(path) for path in paths]
    differences = 0
    for group in ("settings", "model_config", "counters", "schedule", "loss_scaler", "zeropp"):
        for line in _differing_values(group, metas[0][group], metas[1][group]):
            print(line)
            differences += 1
    tensors = 0
    for name, ours, theirs in _pairs(*(iterate_tensors(path, meta) for path, meta in zip(paths, metas, strict=True))):
        difference = _difference(ours, theirs)
        if difference is not None:
            tensors += 1
            if tensors <= SHOWN:
                print(f"{name}: {difference}")
    if tensors > SHOWN:
        print(f"and {tensors - SHOWN} more tensors")
    print("the same" if differences + tensors == 0 else f"{differences} values and {tensors} tensors differ")
    return 1 if differences + tensors else 0


def _checkpoint(folder: str, iteration: int | None = None) -> Path:
    """Find a checkpoint: the folder itself, or the latest in it."""
    if is_complete(Path(folder)):
        return Path(folder)
    path = find_checkpoint(folder, iteration)
    if path is None:
        raise CheckpointError(f"{folder} holds no checkpoint: {GIVE}")
    return path


def _differing_values(group: str, ours: Any, theirs: Any) -> Iterator[str]:
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        if ours != theirs:
            yield f"{group}: {ours} | {theirs}"
        return
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            yield f"{group}.{key}: {ours.get(key)} | {theirs.get(key)}"


def _pairs(
    first: Iterator[tuple[str, Tensor]], second: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Pair both checkpoints' tensors. Both are ordered by name, so that one tensor of each is in memory at a time."""
    ours, theirs = next(first, None), next(second, None)
    while ours is not None or theirs is not None:
        if theirs is None or (ours is not None and ours[0] < theirs[0]):
            assert ours is not None
            yield ours[0], ours[1], None
            ours = next(first, None)
        elif ours is None or theirs[0] < ours[0]:
            yield theirs[0], None, theirs[1]
            theirs = next(second, None)
        else:
            yield ours[0], ours[1], theirs[1]
            ours, theirs = next(first, None), next(second, None)


def _difference(ours: Tensor | None, theirs: Tensor | None) -> str | None:
    if ours is None or theirs is None:
        return f"only in the {'second' if ours is None else 'first'}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype} {list(ours.shape)} | {theirs.dtype} {list(theirs.shape)}"
    if torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
        return None
    distance = (ours.double() - theirs.double()).abs()
    return f"{int((distance > 0).sum()):,} of {ours.numel():,} elements differ, by up to {distance.max().item():g}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="List, verify and compare checkpoints.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the checkpoints of a folder")
    listing.add_argument("folder", help="what was given to --save")
    verifying = commands.add_parser("verify", help="sizes and digests of all files, and whether NaN or Inf was saved")
    verifying.add_argument("folder", help="what was given to --save, or one checkpoint's folder")
    iteration = number(int, at_least=0)
    verifying.add_argument("--ckpt-step", type=iteration, metavar="N", help="verify one iteration; default all")
    comparing = commands.add_parser("diff", help="what differs between two checkpoints")
    comparing.add_argument("first", help="a checkpoint's folder, or what was given to --save for the latest one")
    comparing.add_argument("second", help="another one")
    args = parser.parse_args(argv)

    def run() -> int:
        if args.command == "list":
            return list_checkpoints(args.folder)
        return verify(args.folder, args.ckpt_step) if args.command == "verify" else diff(args.first, args.second)

    return report_errors(run, (ValueError, OSError), status=2)


if __name__ == "__main__":
    sys.exit(main())
