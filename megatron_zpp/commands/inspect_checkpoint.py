"""List, verify and compare checkpoints. Reads one tensor at a time, and needs no GPU.

Exits with status 1 if ``verify`` finds damage, NaN or Inf, or ``diff`` a difference, and with 2 after a mistake.
"""

import argparse
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
    problems,
    read_meta,
    require_checkpoint,
)
from megatron_zpp.checkpoint.index import read_index
from megatron_zpp.checkpoint.storage import read_tensor
from megatron_zpp.errors import reports_errors
from megatron_zpp.files import as_path
from megatron_zpp.settings.flags import number, path_or_url

MAX_SHOWN = 20  # differing tensors
GIVE = "give what --save was, or one of its iter_* folders"


def list_checkpoints(folder: str) -> int:
    """Print one line for each checkpoint, newest first."""
    root = as_path(folder)
    if not root.is_dir():
        raise CheckpointError(f"{folder} is not a folder: {GIVE}")
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
    if meta["nonfinite"]:
        parts.append(f"NaN or Inf in {', '.join(meta['nonfinite'])}")
    left_out = [
        name for name, key in {"optimizer": "has_optimizer", "random states": "has_rng"}.items() if not meta[key]
    ]
    return "; ".join(parts + ([f"without {' and '.join(left_out)}"] if left_out else []))


def verify(folder: str, iteration: int | None) -> int:
    """Check sizes and digests of every file, and for NaN or Inf, in one checkpoint or in all."""
    if (as_path(folder) / "meta.json").exists() or iteration is not None:
        paths = [_checkpoint(folder, iteration)]
    else:
        paths = candidates(folder)
    if not paths:
        raise CheckpointError(f"{folder} holds no checkpoint: {GIVE}")
    status = 0
    for path in paths:
        found = problems(path, finite=True)
        status = 1 if found else status
        print(f"{path}: {'not good' if found else 'good'}", *(f"\n  {problem}" for problem in found), sep="")
    return status


def diff(first: str, second: str) -> int:
    """Print settings, counters and tensors that differ. Holds one tensor of each checkpoint in memory."""
    paths = _checkpoint(first), _checkpoint(second)
    metas = [read_meta(path) for path in paths]
    lines: list[str] = []
    for group in ("settings", "model_config", "counters", "schedule", "loss_scaler", "zeropp"):
        lines += _differing_values(group, metas[0][group], metas[1][group])
    for line in lines:
        print(line)
    indices = [read_index(path, meta) for path, meta in zip(paths, metas, strict=True)]
    num_tensors = 0
    for name in sorted(indices[0].tensors.keys() | indices[1].tensors.keys()):
        tensors = [read_tensor(index, name) if name in index.tensors else None for index in indices]
        if (difference := _difference(*tensors)) is not None:
            num_tensors += 1
            if num_tensors <= MAX_SHOWN:
                print(f"{name}: {difference}")
    if num_tensors > MAX_SHOWN:
        print(f"and {num_tensors - MAX_SHOWN} more tensors")
    is_same = not lines and not num_tensors
    print("the same" if is_same else f"{len(lines)} values and {num_tensors} tensors differ")
    return 0 if is_same else 1


def _checkpoint(folder: str, iteration: int | None = None) -> Path:
    """Find a checkpoint: the folder itself, or the latest in it."""
    return as_path(folder) if is_complete(as_path(folder)) else require_checkpoint(folder, iteration)


def _differing_values(group: str, ours: Any, theirs: Any) -> Iterator[str]:
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        if ours != theirs:
            yield f"{group}: {ours} | {theirs}"
        return
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            yield f"{group}.{key}: {ours.get(key)} | {theirs.get(key)}"


def _difference(ours: Tensor | None, theirs: Tensor | None) -> str | None:
    if ours is None or theirs is None:
        return f"only in the {'second' if ours is None else 'first'}"
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype} {list(ours.shape)} | {theirs.dtype} {list(theirs.shape)}"
    if torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
        return None
    distance = (ours.double() - theirs.double()).abs()
    return f"{int((distance > 0).sum()):,} of {ours.numel():,} elements differ, by up to {distance.max().item():g}"


@reports_errors
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="List, verify and compare checkpoints.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the checkpoints of a folder")
    listing.add_argument("folder", type=path_or_url, help="what was given to --save")
    verifying = commands.add_parser("verify", help="sizes and digests of all files, and whether NaN or Inf was saved")
    verifying.add_argument("folder", type=path_or_url, help="what was given to --save, or one checkpoint's folder")
    iteration = number(int, at_least=0)
    verifying.add_argument("--ckpt-step", type=iteration, metavar="N", help="verify one iteration; default all")
    comparing = commands.add_parser("diff", help="what differs between two checkpoints")
    comparing.add_argument(
        "first", type=path_or_url, help="a checkpoint's folder, or what was given to --save for the latest one"
    )
    comparing.add_argument("second", type=path_or_url, help="another one")
    args = parser.parse_args(argv)
    return {
        "list": lambda: list_checkpoints(args.folder),
        "verify": lambda: verify(args.folder, args.ckpt_step),
        "diff": lambda: diff(args.first, args.second),
    }[args.command]()
