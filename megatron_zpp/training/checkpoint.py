"""Checkpoints on torch.distributed.checkpoint.

    SAVE/latest_checkpointed_iteration.txt   the iteration, as in Megatron
    SAVE/iter_0000100/meta.json              readable: settings, counters, versions; written last
    SAVE/iter_0000100/*.distcp, .metadata    tensors: parameters, optimizer, and per rank RNG and LoCo errors

A checkpoint is written beside, as ``iter_0000100.incomplete``, and renamed when it is complete; only then does the
text file name it. The folder must be on storage that all nodes share.
"""

from __future__ import annotations

import json
import os
import shutil
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
        if any(entry for entry in root.iterdir() if not entry.name.endswith(".incomplete")):
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
    try:
        meta = json.loads((checkpoint / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / 'meta.json'} cannot be read: {error}") from error
    if not isinstance(meta, dict) or "iteration" not in meta or "settings" not in meta:
        raise CheckpointError(f"{checkpoint / 'meta.json'} is not the meta data of a checkpoint")
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
        state["loco"] = {str(rank): _loco_tensors(zeropp)}
    dcp.save(state, checkpoint_id=incomplete)
    if rank == 0:
        meta = meta | {
            "iteration": iteration,
            "world_size": dist.get_world_size(),
            "torch": torch.__version__,
            "has_optimizer": optimizer is not None,
            "has_rng": save_rng,
            "loco": zeropp is not None and bool(zeropp.state_dict()),
            "topology": [zeropp.topology.num_nodes, zeropp.topology.ranks_per_node] if zeropp is not None else None,
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
    has_loco = zeropp is not None and bool(zeropp.state_dict())
    topology = [zeropp.topology.num_nodes, zeropp.topology.ranks_per_node] if zeropp is not None else None
    load_loco = optimizer is not None and has_loco and meta["loco"] and same_ranks and meta["topology"] == topology
    if optimizer is not None and has_loco and not load_loco:
        notes.append("LoCo's errors start from zero: the checkpoint has none for this layout of ranks and nodes")
    saved_loco = _saved_loco(checkpoint, rank) if load_loco else {}
    if saved_loco:
        state["loco"] = {str(rank): saved_loco}
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except (dcp.api.CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{checkpoint} cannot be loaded: {_root_cause(error)}") from error
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if load_rng:
        _set_rng_state(state["rng"][str(rank)])
    if zeropp is not None:
        if load_loco:
            zeropp.load_state_dict(_loco_state(zeropp, state.get("loco", {}).get(str(rank), {})))
        zeropp.invalidate()
    return notes


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _loco_tensors(zeropp: ZeroPP) -> dict[str, torch.Tensor]:
    """LoCo's errors as a flat dict of tensors; a unit whose error is zero has only its step count."""
    tensors = {}
    for unit, state in zeropp.state_dict().items():
        tensors[f"{unit or 'root'}.steps"] = torch.tensor(state["steps"])
        if state["error"] is not None:
            tensors[f"{unit or 'root'}.error"] = state["error"]
    return tensors


def _saved_loco(checkpoint: Path, rank: int) -> dict[str, torch.Tensor]:
    """Empty tensors of the shapes in which this rank's LoCo errors were saved, for DCP to fill."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    prefix = f"loco.{rank}."
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in metadata.items()
        if name.startswith(prefix)
    }


def _loco_state(zeropp: ZeroPP, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = {}
    for unit in zeropp.state_dict():
        error = tensors.get(f"{unit or 'root'}.error")
        state[unit] = {
            "error": None if error is None else error.to(zeropp.device),
            "steps": int(tensors[f"{unit or 'root'}.steps"]),
        }
    return state


def _root_cause(error: BaseException) -> str:
    """The innermost message: DCP wraps the one that matters in a report over all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        _, (cause, _) = next(iter(sorted(failures.items()))) if isinstance(failures, dict) else (0, failures[0])
        return f"{type(cause).__name__}: {cause}"
    return str(error)
