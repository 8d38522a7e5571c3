"""Choose the checkpoint that ``--load`` resumes from, and compare its settings and data with the run's."""

import json
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zpp.data.order import check_order
from megatron_zpp.data.source import Datasets
from megatron_zpp.data.text_stream import TextStream
from megatron_zpp.files import as_path, is_url
from megatron_zpp.metrics.progress import progress
from megatron_zpp.parallel.distributed import errors_on_all_ranks, gather_if_any, print_once
from megatron_zpp.settings.flags import setting_of
from megatron_zpp.settings.groups import CheckpointSettings, Settings, all_flags
from megatron_zpp.zeropp.recipes import RECIPES

from .files import CheckpointError
from .folder import candidates, complete_checkpoints, find_checkpoint, refuse_foreign
from .index import problems
from .meta import REMEDY, nonfinite, read_meta
from .tokenizer import check_tokenizer

_REFUSED = {  # the flag that lets them differ, as ``Flag.resume`` names it: what they make up
    "--override-data": "the data are",
    "--override-opt_param-scheduler": "learning rates, batch sizes or the loss scale are",
    "--no-load-optim": "the optimizer is",
}


def check_not_overwritten(settings: CheckpointSettings) -> None:
    """Raise CheckpointError if this run cannot save, or would save over the checkpoints of another one."""
    if (save := settings.save) is None:
        return
    if is_url(save) and set("*?[") & set(save):
        raise CheckpointError(f"--save {save} has *, ? or [, which deleting takes for a pattern: give another name")
    if not is_url(save):  # the job's lock will be written there
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
    checkpoint, passed_over = None, list[str]()
    with progress("verifying the checkpoint"):
        for path in _paths_to_load(settings):
            # Each rank reads a part of the files; all get the same answers.
            with errors_on_all_ranks():
                mine = problems(path, dist.get_rank(), dist.get_world_size(), settings.load_latest_good)
            wrong = dict.fromkeys(chain.from_iterable(filter(None, gather_if_any(mine or None))))
            if not wrong:
                checkpoint = path
                break
            passed_over += wrong
    for problem in passed_over if settings.load_latest_good else ():
        print_once(f"note: passed over: {problem}")
    with errors_on_all_ranks():
        damage = "; ".join(passed_over)
        if checkpoint is None and passed_over and settings.load_latest_good:
            refuse_foreign(as_path(settings.load))
            raise CheckpointError(f"{settings.load} holds no good checkpoint: {damage}")
        if checkpoint is None and passed_over:  # each problem names its file
            raise CheckpointError(damage if REMEDY in damage else f"{damage}: {REMEDY}")
        if checkpoint is None and (settings.finetune or not goes_on_in(settings)):
            scratch = "to start from scratch leave it out, or make it the folder of --save"
            raise CheckpointError(f"--load {settings.load} holds no checkpoint: correct the path; {scratch}")
        text = None if checkpoint is None else nonfinite(checkpoint, read_meta(checkpoint))
    if text is not None:
        print_once(f"note: {text}; --load-latest-good takes the newest checkpoint that is finite")
    return checkpoint


def recipe_to_keep(settings: CheckpointSettings) -> Mapping[str, Any] | None:
    """Return the settings of the run that ``--load`` goes on with; None if it had no recipe. Collective.

    On as many ranks these are all its settings. On others only the recipe stays: a stage or a place may not fit there.
    """
    if settings.load is None or settings.finetune:
        return None
    paths = _paths_to_load(settings)
    with errors_on_all_ranks():
        meta = read_meta(paths[0]) if paths else None
    if meta is None or (recipe := meta["settings"].get("zeropp")) not in RECIPES:
        return None
    return meta["settings"] if meta["world_size"] == dist.get_world_size() else {"zeropp": recipe}


def _paths_to_load(settings: CheckpointSettings) -> list[Path]:
    """List what ``--load`` may go on from, newest first; several with ``--load-latest-good``. Collective."""
    found: list[list[Path]] = [[]]
    with errors_on_all_ranks():
        if dist.get_rank() == 0 and (folder := settings.load) is not None:  # alone: others may see another moment
            found = [candidates(folder) if settings.load_latest_good and as_path(folder).is_dir() else []]
            if not found[0] and (checkpoint := find_checkpoint(folder, settings.ckpt_step)) is not None:
                found = [[checkpoint]]
    dist.broadcast_object_list(found)
    return found[0]


def check_settings(settings: Settings, meta: Mapping[str, Any], finetunes: bool = False) -> list[str]:
    """Compare the run's settings with those saved; return notes on what changed. Older checkpoints may lack some.

    finetunes: the run takes the parameters alone, so that all of these may differ.
    Raises CheckpointError if a setting differs that must be equal, or a file of the tokenizer.
    """
    ours, saved = json.loads(json.dumps(settings.as_flat_dict())), meta["settings"]
    if finetunes:
        changed = _differing({*_REFUSED, "compared", "noted"}, ours, saved)
        return [f"fine-tuning changes the run: {changed}"] if changed else []
    notes = []
    for override, what in _REFUSED.items():
        differing = _differing({override}, ours, saved)
        if differing and not ours[setting_of(override)]:
            raise CheckpointError(f"{what} not the checkpoint's: {differing}. Give the same, or {override}")
        notes += [f"{override} changes the run: {differing}"] if differing else []
    if not ours["override_data"]:
        check_tokenizer(ours, meta.get("files", {}))
    changed = _differing({"noted"}, ours, saved)
    return [*notes, f"changed since the checkpoint was saved: {changed}"] if changed else notes


def _differing(classes: set[str], ours: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """List the settings of these classes whose values differ: "clip_grad 1.0 there, 0.5 here"."""
    differing = []
    for name, flag in all_flags().items():
        here, there = ours[name], saved.get(name, ours[name])
        if flag.resume not in classes:
            continue
        if _comparable(name, here) != _comparable(name, there):
            differing.append(f"{name} {there} there, {here} here")
    return "; ".join(differing)


def _comparable(name: str, value: Any) -> Any:
    """Return the names of files, which may be in another folder, or any other value."""
    if not name.endswith("_path"):
        return value
    paths = value if isinstance(value, list | tuple) else [value] if value else []
    return [Path(path).name if isinstance(path, str) else path for path in paths]


def check_same_data(settings: Settings, meta: Mapping[str, Any], datasets: Datasets) -> list[str]:
    """Raise ValueError if the data or their order are not the checkpoint's; with --override-data return a note."""
    saved, overrides = meta.get("data_order"), settings.checkpoint.override_data
    if datasets.train is None or saved is None:
        return []
    check_order(saved, datasets.train.order, other_data=overrides)
    if overrides and isinstance(datasets.train, TextStream):
        return ["--override-data: the text is read from its start"]
    if not overrides or saved == datasets.train.order:
        return []
    read = meta["counters"]["consumed_train_samples"]
    return [f"--override-data: the run goes on at sample {read:,} of the new order, and reads none before it"]
