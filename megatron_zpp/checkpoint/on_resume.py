"""Compare the settings of a resumed run with the checkpoint's, as ``Flag.resume`` of each says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.settings.flags import setting_of
from megatron_zpp.settings.groups import Settings, all_flags

from .files import CheckpointError
from .tokenizer import check_tokenizer

_REFUSED = {  # the flag that lets them differ, as ``Flag.resume`` names it: what they make up
    "--override-data": "the data are",
    "--override-opt_param-scheduler": "learning rates, batch sizes or the loss scale are",
    "--no-load-optim": "the optimizer is",
}
_GONE: dict[str, tuple[str, Any]] = {  # settings whose flags went: their class, and the value that every run has now
    "curriculum_max_length": ("--override-data", None),
    "curriculum_length_step": ("--override-data", 8),
    "mid_level_dataset_surplus": ("--override-data", 0.005),
    "min_loss_scale": ("--override-opt_param-scheduler", 1),
}


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
    for name, (resume, here) in _GONE.items():
        there = saved.get(name, here)
        grows_fully = name == "curriculum_max_length" and there not in range(ours["seq_length"])  # as all do now
        if resume in classes and there != here and not grows_fully:
            differing.append(f"{name} {there} there, {here} here (its flag went; commit 2ed70aac has it)")
    return "; ".join(differing)


def _comparable(name: str, value: Any) -> Any:
    """Return the names of files, which may be in another folder, or any other value."""
    if not name.endswith("_path"):
        return value
    paths = value if isinstance(value, list | tuple) else [value] if value else []
    return [Path(path).name if isinstance(path, str) else path for path in paths]
