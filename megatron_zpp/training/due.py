"""What is to be done behind an iteration, by the intervals that the user chose."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_zpp.settings.resolved import ResolvedSettings


@dataclass(frozen=True)
class Due:
    """Each is known before the run begins, and so to all ranks alike."""

    log: bool
    evaluate: bool  # amid training; the last iteration has an evaluation of its own behind it
    save: bool
    exit: bool
    end: bool  # it is the last iteration

    @property
    def anything(self) -> bool:
        return any(dataclasses.astuple(self))


def what_is_due(settings: ResolvedSettings, iteration: int, train_iters: int) -> Due:
    """Behind ``iteration``, counted from 1."""
    training, checkpoint = settings.training, settings.checkpoint

    def divides(interval: int | None) -> bool:
        return bool(interval) and iteration % (interval or 1) == 0

    return Due(
        log=divides(settings.logging.log_interval) or iteration == 1,
        evaluate=divides(training.eval_interval) and iteration < train_iters,
        save=checkpoint.save is not None and divides(checkpoint.save_interval),
        exit=divides(training.exit_interval),
        end=iteration == train_iters,
    )
