"""Combine the statistics of islands' steps when the islands exchange them; without islands, after each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_zpp.parallel.distributed import print_once
from megatron_zpp.training.loss import mean_loss, no_loss
from megatron_zpp.training.nonfinite import NonfiniteSteps
from megatron_zpp.training.run import IslandStep, Run, what_is_due
from megatron_zpp.zeropp.fsdp.collectives import all_gather


@dataclass(frozen=True)
class StepInfo:
    """The state of the run after a step."""

    iteration: int
    consumed_samples: int
    num_samples: int  # of the step
    learning_rate: float
    loss_scale: float  # of the last island, whose last rank writes the log


@dataclass(frozen=True)
class StepResult:
    """The statistics of one optimizer step over all islands that took it (or all, if none did); equal on every rank."""

    at: StepInfo
    loss: float  # mean over the tokens of the global batch
    num_tokens: float  # that have a loss
    grad_norm: float  # before clipping; of islands the mean
    num_zeros: int | None
    auxiliary: dict[str, float]  # auxiliary losses and what else a model shows: means over micro-batches and ranks
    has_stepped: bool  # the parameters of some island
    is_skipped: bool  # some island skipped the step, because of NaN, Inf or a loss spike
    has_spiked: bool  # some island skipped it because its loss was far above that of the steps before
    has_nan: bool  # some island's loss had NaN or Inf
    should_stop: bool  # some rank wants to save and exit
    has_too_many_nonfinite: bool  # some island had NaN or Inf in too many steps in a row: the run ends

    def losses(self, name: str) -> dict[str, float]:
        """Return all losses by their names in the log, the one that is trained on under ``name``."""
        return {name: self.loss, **self.auxiliary}


class DeferredStats:
    """Collects each island's step statistics, and exchanges all collected steps in one collective when one is due."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._nonfinite = [NonfiniteSteps(run, state) for state in run.states]
        self._kept: list[tuple[StepInfo, list[list[float]]]] = []  # with a row of each island of this process
        self._noted_no_loss = False

    def step(self, steps: Sequence[IslandStep], num_samples: int) -> list[StepResult]:
        """Keep a step of this process's islands; return all steps since the last exchange if one is due. Collective.

        It is due after steps that are logged, and before the run evaluates, saves or ends; without other islands in
        this job, after each step. Call this when the run's counters have moved; the counts of skipped steps move here.
        """
        run, counters = self._run, self._run.counters
        too_many = [nonfinite.step(step) for nonfinite, step in zip(self._nonfinite, steps, strict=True)]
        assert run.schedule is not None
        lr = run.schedule.lr(run.scheduled_samples())
        scale = run.states[-1].scaler.scale
        at = StepInfo(counters.iteration, counters.consumed_train_samples, num_samples, lr, scale)
        self._kept.append((at, [_as_row(step, over) for step, over in zip(steps, too_many, strict=True)]))
        if run.mesh.num_islands > 1 and not what_is_due(run.settings, at.iteration, run.train_iters).anything:
            return []
        names, has_zeros = list(steps[0].auxiliary), steps[0].num_zeros is not None
        rows_per_step = self._exchange([rows for _, rows in self._kept])
        results = [
            _result(moment, rows, names, has_zeros) for (moment, _), rows in zip(self._kept, rows_per_step, strict=True)
        ]
        self._kept = []
        for result in results:
            counters.skipped_iterations += result.is_skipped
            counters.nan_iterations += result.has_nan
            run.last_loss = result.loss
            if result.num_tokens == 0 and not self._noted_no_loss:
                self._noted_no_loss = True
                print_once(f"WARNING: {no_loss(f'iteration {result.at.iteration}')} (said once)")
            if result.has_spiked:
                print_once(f"note: the loss at iteration {result.at.iteration} spiked to {result.loss:g}: step skipped")
        return results

    def why(self, at_end: bool = False) -> str | None:
        """Return why some island had too many steps of NaN or Inf, or ``at_end`` came to nothing. Collective."""
        per_state = [nonfinite.at_end() if at_end else nonfinite.too_many for nonfinite in self._nonfinite]
        return next((problem for problem in self._run.of_all_islands(per_state) if problem is not None), None)

    def _exchange(self, rows: list[list[list[float]]]) -> list[list[list[float]]]:
        """Gather [steps, islands, values] of this process's islands from all islands, in order."""
        island = self._run.mesh.island
        if island.size() == 1:
            return rows
        local = torch.tensor(rows, dtype=torch.float64, device=self._run.device).transpose(0, 1).contiguous()
        gathered = local.new_empty(island.size(), *local.shape[1:])
        all_gather(gathered.view(-1), local.view(-1), group=island.get_group())
        return gathered.transpose(0, 1).tolist()


def _as_row(step: IslandStep, too_many: bool) -> list[float]:
    zeros = float(step.num_zeros or 0)
    flags = [float(flag) for flag in (step.is_nonfinite, step.has_spiked, step.should_stop, too_many)]
    return [step.loss_sum, step.num_tokens, step.grad_norm, zeros, *flags, *step.auxiliary.values()]


def _result(at: StepInfo, rows: list[list[float]], names: list[str], has_zeros: bool) -> StepResult:
    """Combine the islands' rows of one step, as ``_as_row`` makes them."""
    losses, _, _, _, nonfinite, spiked, stop, too_many, *_ = zip(*rows, strict=True)
    taken = [row for row, *flags in zip(rows, nonfinite, spiked, strict=True) if not any(flags)]
    sums = [sum(column) for column in zip(*(taken or rows), strict=True)]
    loss_sum, num_tokens, grad_norms, num_zeros, *_ = sums
    count = len(taken or rows)
    auxiliary = sums[len(sums) - len(names) :]
    return StepResult(
        at,
        loss=mean_loss(loss_sum, num_tokens),
        num_tokens=num_tokens,
        grad_norm=grad_norms / count,
        num_zeros=round(num_zeros) if has_zeros else None,
        auxiliary={name: value / count for name, value in zip(names, auxiliary, strict=True)},
        has_stepped=bool(taken),
        is_skipped=len(taken) < len(rows),
        has_spiked=any(spiked),
        has_nan=not all(map(math.isfinite, losses)),
        should_stop=any(stop),
        has_too_many_nonfinite=any(too_many),
    )
