"""One checkpoint of Megatron-LM or Megatron-DeepSpeed, whatever its format and the ranks that wrote it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.counters import Counters

from .config import Args

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's


@dataclass(frozen=True)
class Saved:
    """Tensors are what a Megatron on one rank would have, by their names in ``weights``."""

    path: str  # for messages
    kind: str  # likewise
    args: Args
    state: Mapping[str, Any]  # what stands beside the tensors
    names: frozenset[str]  # of the parameters
    # Of a parameter's name and "" or one of MOMENTS. Raises CheckpointError.
    read: Callable[[str, str], Tensor]
    moments: bool  # whether they are there whole
    steps: Callable[[str], int | None] = lambda name: None  # that Adam has made with a parameter, where it is known


def args_in(state: Any, path: str) -> Args:
    """The flags of the run. Raises CheckpointError."""
    args = state.get("args") if isinstance(state, dict) else None
    if not isinstance(args, argparse.Namespace):
        raise CheckpointError(f"{path} does not hold the flags of its run (args): it is none of Megatron's trainer")
    return vars(args)


def counters_of(saved: Saved) -> Counters:
    """How far the run was. Raises CheckpointError for what is no number."""
    args, state = saved.args, saved.state
    scheduler = state.get("opt_param_scheduler") or state.get("lr_scheduler") or {}
    samples = args.get("consumed_train_samples", 0)
    values = {
        "iteration": state.get("iteration", args.get("iteration", 0)),
        "consumed_train_samples": samples,
        "consumed_valid_samples": args.get("consumed_valid_samples", 0),
        "scheduled_samples": scheduler.get("num_steps", samples) if isinstance(scheduler, dict) else samples,
    }
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 2**53:
            raise CheckpointError(f"{saved.path} is damaged: its {name} is {value!r}")
    return Counters(**values)
