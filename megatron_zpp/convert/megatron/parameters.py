"""Our parameters, and what Adam keeps of them, out of Megatron's tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.models.decoder import DecoderConfig

from .saved import Saved, counters_of
from .weights import VOCABULARY, Weight, weights


def parameter_reader(
    saved: Saved, config: DecoderConfig, shapes: Mapping[str, torch.Size]
) -> Callable[[str, str], Tensor]:
    """A function that reads in fp32, by its name in our model, a parameter ("") or of it a moment or its "step".

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
