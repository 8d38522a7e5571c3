"""Checkpoints on torch.distributed.checkpoint.

    SAVE/latest_checkpointed_iteration.txt   the iteration, as in Megatron
    SAVE/iter_0000100/meta.json              readable: settings, counters, versions; written last
    SAVE/iter_0000100/*.distcp, .metadata    tensors: parameters, optimizer, and per rank RNG and ZeRO++ state

A checkpoint is written beside, as ``iter_0000100.incomplete``, and renamed when it is complete; only then does the
text file name it. The folder must be on storage that all nodes share.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_zpp.zeropp import ZeroPP

LATEST = "latest_checkpointed_iteration.txt"
_META_KEYS = {
    *("iteration", "world_size", "has_optimizer", "has_rng", "zeropp"),  # of save_checkpoint
    *("settings", "model_config", "counters", "schedule", "loss_scaler"),  # of the run
}


class CheckpointError(ValueError):
    """A checkpoint that is not one, is damaged, or belongs to another model. One line that says what to do."""


def find_checkpoint(folder: str, iteration: int | None = None) -> Path | None:
    """The folder of one checkpoint under ``folder``: the latest, or that of ``iteration``; None if there is none yet.

    Raises CheckpointError when ``folder`` holds something else, or the checkpoint it names is not there.
    """
    root = Path(folder)
    if not root.exists():
        return None
    if not root.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder of checkpoints: give --load what was given to --save")
    tracker = root / LATEST
    if not tracker.exists():
        # Folders of TensorBoard and wandb may be there before the first checkpoint is.
        if any(path.is_file() or path.name.startswith("iter_") for path in root.iterdir() if not _is_incomplete(path)):
            raise CheckpointError(
                f"{folder} holds no checkpoint (it has files, but no {LATEST}): give --load what was given to --save"
            )
        return None
    if iteration is None:
        text = tracker.read_text().strip()
        if not text.isdecimal():
            raise CheckpointError(
                f"{tracker} should hold an iteration, not {text[:40]!r}: write the number of one there"
            )
        iteration = int(text)
    checkpoint = root / f"iter_{iteration:07d}"
    if not (checkpoint / "meta.json").exists():
        there = sorted(path.parent.name for path in root.glob("iter_*/meta.json"))
        raise CheckpointError(
            f"{checkpoint} is not a complete checkpoint; complete ones in {folder}: {', '.join(there) or 'none'}"
        )
    return checkpoint


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """The readable part of a checkpoint."""
    path, remedy = checkpoint / "meta.json", "load another checkpoint with --ckpt-step"
    try:
        meta = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {remedy}") from error
    missing = _META_KEYS - meta.keys() if isinstance(meta, dict) else _META_KEYS
    if missing:
        raise CheckpointError(f"{path} is damaged (it lacks {', '.join(sorted(missing))}): {remedy}")
    return meta


def save_checkpoint(
    folder: str,
    iteration: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    zeropp: ZeroPP | None,
    meta: dict[str, Any],
    save_rng: bool = True,
) -> Path:
    """Save one checkpoint and name it the latest; collective over all ranks. Returns its folder."""
    root = Path(folder)
    final = root / f"iter_{iteration:07d}"
    incomplete = final.with_name(final.name + ".incomplete")
    rank = dist.get_rank()
    if rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(incomplete, ignore_errors=True)
    dist.barrier()
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    if save_rng:
        state["rng"] = {str(rank): _rng_state()}
    if zeropp is not None:
        state["zeropp"] = {str(rank): zeropp.state_dict()}
    try:
        dcp.save(state, checkpoint_id=incomplete)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{incomplete} cannot be written: {_root_cause(error)}") from error
    if rank == 0:
        meta = meta | {
            "iteration": iteration,
            "world_size": dist.get_world_size(),
            "torch": torch.__version__,
            "has_optimizer": optimizer is not None,
            "has_rng": save_rng,
            "zeropp": _zeropp_layout(zeropp),
        }
        (incomplete / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        incomplete.rename(final)
        partial = root / (LATEST + ".incomplete")
        partial.write_text(f"{iteration}\n")
        os.replace(partial, root / LATEST)
    dist.barrier()
    return final


def load_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    zeropp: ZeroPP | None,
    load_rng: bool = True,
) -> list[str]:
    """Load tensors in place; collective. Returns notes about what was not taken over and why.

    optimizer None: the parameters alone. The number of ranks may differ from the one that saved; random states and
    LoCo's errors belong to a layout and start anew on another.
    """
    meta, notes, rank = read_meta(checkpoint), [], dist.get_rank()
    same_ranks = meta["world_size"] == dist.get_world_size()
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        if not meta["has_optimizer"]:
            raise CheckpointError(f"{checkpoint} was saved without its optimizer: load it with --no-load-optim")
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    load_rng = load_rng and meta["has_rng"]
    if load_rng and not same_ranks:
        notes.append(f"random states start anew: {meta['world_size']} ranks saved, {dist.get_world_size()} load")
        load_rng = False
    if load_rng:
        state["rng"] = {str(rank): _rng_state()}
    load_zeropp = zeropp is not None and optimizer is not None and bool(zeropp.state_dict())
    if load_zeropp and meta["zeropp"] != json.loads(json.dumps(_zeropp_layout(zeropp))):
        notes.append("LoCo's errors and weight copies start anew: saved with other ranks, nodes or ZeRO++ settings")
        load_zeropp = False
    try:
        saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        if load_zeropp:
            state["zeropp"] = {str(rank): _tensors_to_fill(saved, f"zeropp.{rank}.")}
        dcp.load(state, checkpoint_id=checkpoint)
    except (dcp.api.CheckpointException, Exception) as error:  # damaged files fail in many ways
        raise CheckpointError(
            f"{checkpoint} cannot be loaded ({_root_cause(error)}): load another checkpoint with --ckpt-step"
        ) from error
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if load_rng:
        _set_rng_state(state["rng"][str(rank)])
    if zeropp is not None:
        zeropp.invalidate()
        if load_zeropp:
            tensors = state["zeropp"][str(rank)]
            zeropp.load_state_dict({name: tensor.to(zeropp.device) for name, tensor in tensors.items()})
    return notes


def _is_incomplete(path: Path) -> bool:
    return path.name.endswith(".incomplete")


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _zeropp_layout(zeropp: ZeroPP | None) -> dict[str, Any] | None:
    """What must be the same for ZeRO++ state to be taken over, rank by rank."""
    if zeropp is None:
        return None
    topology = [zeropp.topology.num_nodes, zeropp.topology.ranks_per_node]
    return {"topology": topology, "config": dataclasses.asdict(zeropp.config)}


def _tensors_to_fill(saved: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Empty tensors for DCP, of the shapes in which those whose names begin with ``prefix`` were saved."""
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(prefix)
    }


def _root_cause(error: BaseException) -> str:
    """The error itself: DCP wraps the ranks' errors, with their tracebacks, in one that all ranks raise."""
    if isinstance(error, dcp.api.CheckpointException):
        error, _ = error.failures[min(error.failures)]
    return f"{type(error).__name__}: {error}"
