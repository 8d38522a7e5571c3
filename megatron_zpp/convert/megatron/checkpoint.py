"""Find and open a checkpoint of Megatron-LM or DeepSpeed, and read our parameters and Adam's moments from it."""

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

_OPEN = {"torch_dist": open_torch_dist, "torch": open_torch, "universal": open_universal, "deepspeed": open_deepspeed}
_TRACKERS = ("latest_universal", "latest_checkpointed_iteration.txt", "latest")  # name the latest; first one wins


def open_checkpoint(folder: Path, iteration: int | None = None) -> Saved:
    """Open a checkpoint, or the latest one or ``iteration``'s in a folder of them. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if kind := kind_of(folder):
        if iteration is not None:
            raise CheckpointError(f"{folder} is one checkpoint: its iteration cannot be chosen")
        return _OPEN[kind](folder)
    if iteration is None:
        trackers = [folder / name for name in _TRACKERS if (folder / name).is_file()]
        names = [name for file in trackers for name in _names(file.read_text(errors="replace").strip())]
    else:
        names = _names(str(iteration))
    for name in names:
        if kind := kind_of(folder / name):
            return _OPEN[kind](folder / name)
    which = "" if iteration is None else f" of iteration {iteration}"
    missing = f"{', '.join(names)} would be" if names else f"it has none of {', '.join(_TRACKERS)}"
    raise CheckpointError(f"{folder} holds no checkpoint of Megatron-LM or DeepSpeed{which}: {missing}")


def _names(text: str) -> list[str]:
    """Return the folders that a tracker's text may mean: an iteration, "release", or a name of DeepSpeed's."""
    if re.fullmatch("[0-9]{1,12}", text):
        return [f"iter_{int(text):07d}", f"global_step{int(text)}_universal", f"global_step{int(text)}"]
    return [text] if re.fullmatch(r"[\w.-]+", text) and not text.startswith(".") else []


def parameter_reader(
    saved: Saved, config: DecoderConfig, shapes: Mapping[str, torch.Size], num_ids: int, found_rows: set[int]
) -> Callable[[str, str], Tensor]:
    """Return a function that reads a parameter of ours by name and "" in fp32, or its moment, or its "step".

    shapes: our parameters'. num_ids: the tokenizer's. found_rows: gets the checkpoint's rows of the vocabulary.
    Raises CheckpointError unless the checkpoint has exactly the tensors of the model, and a row for each id.
    """
    table = list(weights(config))
    theirs = {weight.theirs for weight in table}
    wrong = [f"it lacks {_some(missing)}"] if (missing := sorted(theirs - saved.names)) else []
    if unknown := sorted(saved.names - theirs):
        wrong.append(f"it has {_some(unknown)}, which our model does not have")
    if wrong:
        raise CheckpointError(f"{saved.path} is not the model of its flags: {'; '.join(wrong)}")
    weight_of = {name: (weight, part) for weight in table for part, name in enumerate(weight.ours)}

    @functools.lru_cache(maxsize=1)  # ours that are split from one of theirs come in a row
    def split(weight: Weight, moment: str) -> tuple[Tensor, ...]:
        tensor = saved.read(weight.theirs, moment)
        expected = weight.join(*(torch.empty(shapes[name], device="meta") for name in weight.ours)).shape
        rows = expected[0] if weight.theirs in VOCABULARY and tensor.dim() else None
        if tensor.shape[1:] != expected[1:] or (rows is None and tensor.shape != expected):
            there = f"{weight.theirs} is {list(tensor.shape)}, where its flags make it {list(expected)}"
            raise CheckpointError(f"{saved.path}: {there}")
        if rows is not None:
            found_rows.add(tensor.shape[0])
        if rows is not None and tensor.shape[0] < num_ids:
            few = f"{weight.theirs} has {tensor.shape[0]:,} rows, fewer than the tokenizer's {num_ids:,} ids"
            raise CheckpointError(f"{saved.path}: {few}: give the run's own tokenizer")
        if rows is not None:  # rows beyond the tokenizer's ids pad the vocabulary: cut or add them
            tensor = F.pad(tensor[:rows], (0, 0, 0, max(0, rows - tensor.shape[0])))
        if not tensor.isfinite().all():
            raise CheckpointError(f"{saved.path}: {weight.theirs} has NaN or Inf")
        return weight.split(tensor.float())

    def read(name: str, moment: str) -> Tensor:
        weight, part = weight_of[name]
        if moment == "step":
            steps = saved.steps(weight.theirs)
            return torch.tensor(float(counters_of(saved).iteration if steps is None else steps))
        return split(weight, moment)[part]

    return read


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
