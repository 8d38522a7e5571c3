"""Find and open a checkpoint of Megatron-LM or DeepSpeed, and read our parameters and Adam's moments from it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.folder import kind_of
from megatron_zpp.models.decoder import DecoderConfig

from .config import Saved, counters_of
from .shards import open_deepspeed, open_torch, open_universal
from .torch_dist import open_torch_dist
from .weights import VOCABULARY, Weight, weights

_OPEN = {
    "torch_dist": open_torch_dist,
    "torch": open_torch,
    "universal": open_universal,
    "deepspeed": open_deepspeed,
}
# Files that name the latest checkpoint, in the order in which they are asked.
_TRACKERS = ("latest_universal", "latest_checkpointed_iteration.txt", "latest")


def open_checkpoint(folder: Path, iteration: int | None = None) -> Saved:
    """Open a checkpoint, or from a folder of them the latest or that of ``iteration``. Raises CheckpointError."""
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


def parameter_reader(
    saved: Saved, config: DecoderConfig, shapes: Mapping[str, torch.Size]
) -> Callable[[str, str], Tensor]:
    """Return a function that reads a parameter of our model ("") in fp32, or one of its moments or its "step".

    shapes: of our parameters. Raises CheckpointError unless the checkpoint has all tensors of the model and no others.
    """
    table = list(weights(config))
    _check_names(saved, {weight.theirs for weight in table})
    weight_of = {name: (weight, part) for weight in table for part, name in enumerate(weight.ours)}

    @functools.lru_cache(maxsize=1)  # what one of theirs is split into is asked for in a row
    def split(weight: Weight, moment: str) -> tuple[Tensor, ...]:
        theirs = saved.read(weight.theirs, moment)
        empty = [torch.empty(shapes[name], device="meta") for name in weight.ours]
        expected = weight.join(*empty).shape
        rows = expected[0] if weight.theirs in VOCABULARY and theirs.dim() else None
        if theirs.shape[1:] != expected[1:] or (rows is None and theirs.shape != expected):
            raise CheckpointError(
                f"{saved.path}: {weight.theirs} is {list(theirs.shape)}, where its flags make it {list(expected)}"
            )
        # Rows beyond the tokenizer's ids, which pad the vocabulary, are cut, or added.
        theirs = theirs if rows is None else F.pad(theirs[:rows], (0, 0, 0, max(0, rows - theirs.shape[0])))
        if not theirs.isfinite().all():
            raise CheckpointError(f"{saved.path}: {weight.theirs} has NaN or Inf")
        return weight.split(theirs.float())

    def read(name: str, moment: str) -> Tensor:
        weight, part = weight_of[name]
        if moment == "step":
            steps = saved.steps(weight.theirs)
            return torch.tensor(float(counters_of(saved).iteration if steps is None else steps))
        return split(weight, moment)[part]

    return read


def _check_names(saved: Saved, expected: set[str]) -> None:
    missing, unknown = sorted(expected - saved.names), sorted(saved.names - expected)
    if missing or unknown:
        wrong = [f"it lacks {_some(missing)}"] if missing else []
        wrong += [f"it has {_some(unknown)}, for which our model has no place"] if unknown else []
        raise CheckpointError(f"{saved.path} is not the model of its flags: {'; '.join(wrong)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
