"""What islands send each other about their steps: nothing, until they meet. Without islands a step is known at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_zpp.parallel.distributed import print_once
from megatron_zpp.training.loss import mean_loss
from megatron_zpp.training.nonfinite import NonfiniteSteps
from megatron_zpp.training.run import IslandStep, Run, what_is_due
from megatron_zpp.zeropp.fsdp.collectives import all_gather


@dataclass(frozen=True)
class StepInfo:
    """Where the run was after a step."""

    iteration: int
    consumed_samples: int
    num_samples: int  # of the step
    learning_rate: float
    loss_scale: float  # of the last island, whose last rank writes the log


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, over all islands; the same on every rank.

    Losses and norms are of the islands that took the step; of all, where none did.
    """

    at: StepInfo
    loss: float  # mean over the tokens of the global batch
    grad_norm: float  # before clipping; of islands the mean
    num_zeros: int | None
    auxiliary: dict[str, float]  # auxiliary losses and what else a model shows: means over micro-batches and ranks
    has_moved: bool  # the parameters of some island
    skipped: bool  # some island skipped the step, for NaN or Inf, or
    spiked: bool  # because its loss was far above that of the steps before
    nan: bool  # some island's loss had NaN or Inf
    stop: bool  # some rank wants to save and exit
    too_many: bool  # some island had NaN or Inf in too many steps in a row: the run ends

    def losses(self, name: str) -> dict[str, float]:
        """All losses under the names of the log, the one that is trained on under ``name``."""
        return {name: self.loss, **self.auxiliary}


class DeferredStats:
    """Keeps what the islands of this process did, and exchanges it where all islands come by anyway.

    What they exchange is some dozens of bytes for each step since the last meeting, in one collective.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._nonfinite = [NonfiniteSteps(run, state) for state in run.states]
        self._kept: list[tuple[StepInfo, list[list[float]]]] = []  # with a row of each island of this process

    def are_due(self, iteration: int) -> bool:
        """Whether islands meet behind this step: where it is logged, or the run evaluates, saves or ends.

        One that is a job of its own meets none here.
        """
        run = self._run
        return run.mesh.num_islands == 1 or what_is_due(run.settings, iteration, run.train_iters).anything

    def step(self, steps: Sequence[IslandStep], num_samples: int) -> list[StepResult]:
        """Keep a step of this process's islands; where the next meeting is due, all steps since the last. Collective.

        Call it when the run's counters have moved; those of skipped steps move here.
        """
        run, counters = self._run, self._run.counters
        too_many = [of_island.step(step) for of_island, step in zip(self._nonfinite, steps, strict=True)]
        assert run.schedule is not None
        lr = run.schedule.lr(run.scheduled_samples())
        scale = run.states[-1].scaler.scale
        at = StepInfo(counters.iteration, counters.consumed_train_samples, num_samples, lr, scale)
        self._kept.append((at, [_as_row(step, over) for step, over in zip(steps, too_many, strict=True)]))
        if not self.are_due(at.iteration):
            return []
        names, has_zeros = list(steps[0].auxiliary), steps[0].num_zeros is not None
        of_all_islands = self._exchange([rows for _, rows in self._kept])
        results = [
            _result(moment, rows, names, has_zeros)
            for (moment, _), rows in zip(self._kept, of_all_islands, strict=True)
        ]
        self._kept = []
        for result in results:
            counters.skipped_iterations += result.skipped
            counters.nan_iterations += result.nan
            run.last_loss = result.loss
            if result.spiked:
                print_once(f"note: the loss at iteration {result.at.iteration} spiked to {result.loss:g}: step skipped")
        return results

    def why_too_many(self) -> str | None:
        """What the first island with too many steps of NaN or Inf says; collective."""
        return self._first([of_island.too_many for of_island in self._nonfinite])

    def why_nothing(self) -> str | None:
        """Why the run came to nothing, as far as an island's did; None if it did not. Collective."""
        return self._first([of_island.at_end() for of_island in self._nonfinite])

    def _first(self, per_state: list[str | None]) -> str | None:
        return next((problem for problem in self._run.of_all_islands(per_state) if problem is not None), None)

    def _exchange(self, rows: list[list[list[float]]]) -> list[list[list[float]]]:
        """[steps, islands, values] of this process's islands, of all of them in order."""
        island = self._run.mesh.island
        if island.size() == 1:
            return rows
        own = torch.tensor(rows, dtype=torch.float64, device=self._run.device).transpose(0, 1).contiguous()
        of_all = own.new_empty(island.size(), *own.shape[1:])
        all_gather(of_all.view(-1), own.view(-1), group=island.get_group())
        return of_all.transpose(0, 1).tolist()


def _as_row(step: IslandStep, too_many: bool) -> list[float]:
    zeros = float(step.num_zeros or 0)
    flags = [float(flag) for flag in (step.nonfinite, step.spiked, step.stop, too_many)]
    return [step.loss_sum, step.num_tokens, step.grad_norm, zeros, *flags, *step.auxiliary.values()]


def _result(at: StepInfo, rows: list[list[float]], names: list[str], has_zeros: bool) -> StepResult:
    """rows: of each island, by ``_as_row``."""
    losses, _, _, _, nonfinite, spiked, stop, too_many, *_ = zip(*rows, strict=True)
    taken = [row for row, *flags in zip(rows, nonfinite, spiked, strict=True) if not any(flags)]
    of_taken = [sum(column) for column in zip(*(taken or rows), strict=True)]
    loss_sum, num_tokens, grad_norms, num_zeros, *_ = of_taken
    count = len(taken or rows)
    auxiliary = of_taken[len(of_taken) - len(names) :]
    return StepResult(
        at,
        loss=mean_loss(loss_sum, num_tokens),
        grad_norm=grad_norms / count,
        num_zeros=round(num_zeros) if has_zeros else None,
        auxiliary={name: value / count for name, value in zip(names, auxiliary, strict=True)},
        has_moved=bool(taken),
        skipped=len(taken) < len(rows),
        spiked=any(spiked),
        nan=not all(map(math.isfinite, losses)),
        stop=any(stop),
        too_many=any(too_many),
    )
