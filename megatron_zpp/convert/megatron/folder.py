"""Finds a checkpoint in what Megatron's ``--save`` or DeepSpeed was given, and opens it, whichever format it has."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.foreign import kind_of

from .saved import Saved
from .shards import open_deepspeed, open_torch
from .torch_dist import open_torch_dist
from .universal import open_universal

_OPEN = {
    "torch_dist": open_torch_dist,
    "torch": open_torch,
    "universal": open_universal,
    "deepspeed": open_deepspeed,
}
# Files that name the latest checkpoint, in the order in which they are asked.
_TRACKERS = ("latest_universal", "latest_checkpointed_iteration.txt", "latest")


def open_checkpoint(folder: Path, iteration: int | None = None) -> Saved:
    """One checkpoint, or of a folder of them the latest or that of ``iteration``. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if kind_of(folder) is not None:
        if iteration is not None:
            raise CheckpointError(f"{folder} is one checkpoint: its iteration cannot be chosen")
        checkpoint = folder
    else:
        names = _latest(folder) if iteration is None else _names(str(iteration))
        found = [folder / name for name in names if kind_of(folder / name) is not None]
        if not found:
            which = "" if iteration is None else f" of iteration {iteration}"
            missing = f"{', '.join(names)} would be" if names else f"it has none of {', '.join(_TRACKERS)}"
            raise CheckpointError(f"{folder} holds no checkpoint of Megatron-LM or DeepSpeed{which}: {missing}")
        checkpoint = found[0]
    kind = kind_of(checkpoint)
    assert kind is not None
    return _OPEN[kind](checkpoint)


def _latest(folder: Path) -> list[str]:
    """Names of folders that the files which name the latest one mean."""
    texts = [(folder / name).read_text(errors="replace").strip() for name in _TRACKERS if (folder / name).is_file()]
    return [name for text in texts for name in _names(text)]


def _names(text: str) -> list[str]:
    """Folders that a tracker's word may mean: an iteration, "release", or a name of DeepSpeed's."""
    if re.fullmatch("[0-9]{1,12}", text):
        return [f"iter_{int(text):07d}", f"global_step{int(text)}_universal", f"global_step{int(text)}"]
    return [text] if re.fullmatch(r"[\w.-]+", text) and not text.startswith(".") else []
