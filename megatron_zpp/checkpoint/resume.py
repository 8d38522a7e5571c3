"""Choose the checkpoint that ``--load`` resumes from, and check that the data's order is still the same."""

import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zpp.data.build import Datasets
from megatron_zpp.data.order import check_order
from megatron_zpp.metrics.progress import progress
from megatron_zpp.parallel.distributed import errors_on_all_ranks, print_once
from megatron_zpp.settings.groups import CheckpointSettings, Settings
from megatron_zpp.zeropp.fsdp.topology import gather_if_any
from megatron_zpp.zeropp.recipes import RECIPES

from .files import CheckpointError
from .folder import candidates, complete_checkpoints, find_checkpoint, refuse_foreign
from .meta import REMEDY, nonfinite, read_meta
from .verify import problems


def check_not_overwritten(settings: CheckpointSettings) -> None:
    """Raise CheckpointError if this run cannot save, or would save over the checkpoints of another one."""
    if (save := settings.save) is None:
        return
    nearest = next(path for path in (Path(save), *Path(save).absolute().parents) if os.path.lexists(path))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise CheckpointError(f"--save {save} cannot be written: {nearest} is no folder that this user may change")
    if settings.overwrite_save or goes_on_in(settings):
        return
    if there := complete_checkpoints(save):
        other = f"{save} holds checkpoints of another run, up to {there[-1].name}"
        raise CheckpointError(f"{other}: go on from there with --load {save}, give another --save, or --overwrite-save")


def goes_on_in(settings: CheckpointSettings) -> bool:
    """Return whether the run loads from the folder that it saves in, and so goes on after a restart."""
    save, load = settings.save, settings.load
    return bool(save and load) and os.path.realpath(str(load)) == os.path.realpath(str(save))


def checkpoint_to_load(settings: CheckpointSettings) -> Path | None:
    """Find and verify the checkpoint to load, the same on every rank; None to start from scratch. Collective.

    Only the folder that the run also saves in may be empty: elsewhere a mistyped name would train from scratch.
    """
    if settings.load is None:
        return None
    if settings.load_latest_good:
        with progress("verifying checkpoints"):
            checkpoint, passed_over = _latest_good(settings.load, settings.verify_checkpoint)
        for problem in passed_over:
            print_once(f"note: passed over: {problem}")
        with errors_on_all_ranks():
            if checkpoint is None and passed_over:
                refuse_foreign(Path(settings.load))
                raise CheckpointError(f"{settings.load} holds no good checkpoint: {'; '.join(passed_over)}")
            if checkpoint is None and dist.get_rank() == 0:
                find_checkpoint(settings.load)  # raises if this is no place for checkpoints
    else:
        found: list[Path | None] = [None]
        with errors_on_all_ranks():
            if dist.get_rank() == 0:  # alone, as in _latest_good
                found = [find_checkpoint(settings.load, settings.ckpt_step)]
        dist.broadcast_object_list(found)
        checkpoint = found[0]
        if checkpoint is not None:
            with progress("verifying the checkpoint"):
                wrong = _problems_on_all_ranks(checkpoint, settings.verify_checkpoint)
            with errors_on_all_ranks():
                if wrong:  # each names its file
                    damage = "; ".join(wrong)
                    raise CheckpointError(damage if REMEDY in damage else f"{damage}: {REMEDY}")
                text = nonfinite(checkpoint, read_meta(checkpoint))
            if text is not None:
                print_once(f"note: {text}; --load-latest-good takes the newest checkpoint that is finite")
    with errors_on_all_ranks():
        if checkpoint is None and (settings.finetune or not goes_on_in(settings)):
            scratch = "to start from scratch leave it out, or make it the folder of --save"
            raise CheckpointError(f"--load {settings.load} holds no checkpoint: correct the path; {scratch}")
    return checkpoint


def recipe_to_keep(settings: CheckpointSettings) -> str | None:
    """Return the ``--zeropp`` of the run that ``--load`` goes on with; None if it had none. Collective."""
    found: list[Any] = [None]
    with errors_on_all_ranks():
        if dist.get_rank() == 0 and settings.load is not None and not settings.finetune:
            folder, latest_good = settings.load, settings.load_latest_good and Path(settings.load).is_dir()
            checkpoint = (
                next(iter(candidates(folder)), None) if latest_good else find_checkpoint(folder, settings.ckpt_step)
            )
            found = [read_meta(checkpoint)["settings"].get("zeropp") if checkpoint is not None else None]
    dist.broadcast_object_list(found)
    return found[0] if found[0] in RECIPES else None


def _problems_on_all_ranks(checkpoint: Path, digests: str, finite: bool = False) -> list[str]:
    """Run ``problems`` with the files shared among all ranks. Every rank returns the same. Collective."""
    mine = problems(checkpoint, digests, dist.get_rank(), dist.get_world_size(), finite)
    return list(dict.fromkeys(chain.from_iterable(filter(None, gather_if_any(mine or None)))))


def _latest_good(folder: str, digests: str) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint without damage, NaN or Inf, and list the problems of newer ones. Collective."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:  # alone: ranks that look at different moments may see different folders
        try:
            found = [candidates(folder) if Path(folder).is_dir() else []]
        except OSError as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], OSError):
        raise CheckpointError(f"{folder} cannot be read ({found[0]})")
    passed_over: list[str] = []
    for checkpoint in found[0]:
        wrong = _problems_on_all_ranks(checkpoint, digests, finite=True)
        if not wrong:
            return checkpoint, passed_over
        passed_over += wrong
    return None, passed_over


def check_same_data(settings: Settings, meta: Mapping[str, Any], datasets: Datasets) -> list[str]:
    """Raise ValueError if the data or their order are not the checkpoint's; with --override-data return a note."""
    saved, overrides = meta.get("data_order"), settings.checkpoint.override_data
    if datasets.train is None or saved is None:
        return []
    check_order(saved, datasets.train.order, other_data=overrides)
    if not overrides or saved == datasets.train.order:
        return []
    read = meta["counters"]["consumed_train_samples"]
    return [f"--override-data: the run goes on at sample {read:,} of the new order, and reads none before it"]
