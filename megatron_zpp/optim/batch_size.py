"""Batch size by consumed samples, with Megatron's ramp-up; sample length by iteration, as DeepSpeed's curriculum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_zpp.settings.resolved import ResolvedTraining


class BatchSchedule:
    """The number of samples of each optimizer step, a pure function of the consumed samples.

    Without ``rampup`` every step takes ``global_batch_size`` samples. With ``rampup=(start, increment, samples)``
    (Megatron's ``--rampup-batch-size``) the batch grows from ``start`` to ``global_batch_size`` by ``increment``, in
    ``(global_batch_size - start) / increment`` stages of equally many samples.

    Args:
        global_batch_size: samples per optimizer step over all ranks.
        micro_batch_size: samples per rank and forward pass.
        data_parallel_size: number of ranks that see different samples.
        rampup: ``(start size, increment, samples over which to ramp)`` or None.
        decrease_if_needed: round a batch size that no whole number of micro-batches makes up down to one that does.
            The run then trains on the smaller batch.

    Raises:
        ValueError: a batch size of the run is not a multiple of
            ``micro_batch_size * data_parallel_size``, or the ramp does not end at ``global_batch_size``.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        rampup: Sequence[int] | None = None,
        decrease_if_needed: bool = False,
    ) -> None:
        self._final_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._data_parallel_size = data_parallel_size
        self._samples_per_micro_batch = micro_batch_size * data_parallel_size  # over all ranks
        self._decrease_if_needed = decrease_if_needed

        ramp = (global_batch_size, 1, 0) if rampup is None else _checked_ramp(rampup, global_batch_size)
        self._start_size, self._increment, self._ramp_samples = ramp
        self._num_increments = (global_batch_size - self._start_size) // self._increment
        for increments in range(self._num_increments + 1):
            self._check_divisible(self._start_size + increments * self._increment)

    @classmethod
    def from_settings(cls, training: ResolvedTraining, data_parallel_size: int) -> BatchSchedule:
        """Build the schedule of a run. Raises ValueError as the constructor does."""
        return cls(
            training.global_batch_size,
            training.micro_batch_size,
            data_parallel_size,
            training.rampup_batch_size,
            training.decrease_batch_size_if_needed,
        )

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples that the step after ``consumed_samples`` trains on, over all ranks."""
        return self.num_micro_batches(consumed_samples) * self._samples_per_micro_batch

    def num_micro_batches(self, consumed_samples: int) -> int:
        """Forward passes per rank in the step after ``consumed_samples``."""
        requested = self._start_size + self._increments_at(consumed_samples) * self._increment
        return requested // self._samples_per_micro_batch

    def total_iterations(self, train_samples: int, consumed: int = 0) -> int:
        """Count the steps from ``consumed`` samples to ``train_samples``, without a last batch that is not full."""
        iterations = 0
        for size, steps in self._levels(consumed):
            affordable = (train_samples - consumed) // size
            if steps is None or affordable < steps:
                return iterations + max(0, affordable)
            consumed += steps * size
            iterations += steps
        raise AssertionError("unreachable: the last level has no end")

    def iterations_to_reach(self, samples: int, consumed: int = 0) -> int:
        """Count the steps from ``consumed`` samples until ``samples`` are consumed, the last one full."""
        iterations = self.total_iterations(samples, consumed)
        return iterations + (self.samples_after(iterations, consumed) < samples)

    def samples_after(self, iterations: int, consumed: int = 0) -> int:
        """Samples consumed after ``iterations`` optimizer steps that start at ``consumed`` samples."""
        for size, steps in self._levels(consumed):
            if steps is None or iterations < steps:
                return consumed + iterations * size
            consumed += steps * size
            iterations -= steps
        raise AssertionError("unreachable: the last level has no end")

    def micro_batch_counts(self) -> set[int]:
        """Every number of micro-batches that a step of the run may have."""
        return {size // self._samples_per_micro_batch for size, _ in self._levels()}

    def _increments_at(self, consumed_samples: int) -> int:
        if consumed_samples >= self._ramp_samples:
            return self._num_increments
        return consumed_samples * self._num_increments // self._ramp_samples

    def _levels(self, consumed: int = 0) -> Iterator[tuple[int, int | None]]:
        """Yield ``(batch size, steps at it)`` in order; the last has no end, and None steps."""
        while (increments := self._increments_at(consumed)) < self._num_increments:
            size = self.global_batch_size(consumed)
            # The first sample count at which the next increment is due; steps that start before it use this size.
            level_end = -(-(increments + 1) * self._ramp_samples // self._num_increments)
            steps = -(-(level_end - consumed) // size)
            yield size, steps
            consumed += steps * size
        yield self.global_batch_size(consumed), None

    def _check_divisible(self, size: int) -> None:
        unit = self._samples_per_micro_batch
        if size % unit == 0 or (self._decrease_if_needed and size >= unit):
            return
        lower, upper = size // unit * unit, (size // unit + 1) * unit
        suggestion = f"{lower} or {upper}" if lower else str(upper)
        during = "" if size == self._final_size else " during --rampup-batch-size"
        raise ValueError(
            f"global batch size {size}{during} is not divisible by micro-batch size {self._micro_batch_size} * "
            f"data-parallel size {self._data_parallel_size} = {unit}; use {suggestion}"
            + (", or --decrease-batch-size-if-needed" if lower and not self._decrease_if_needed else "")
        )


def _checked_ramp(rampup: Sequence[int], global_batch_size: int) -> tuple[int, int, int]:
    if len(rampup) != 3:
        raise ValueError(f"--rampup-batch-size takes START INCREMENT SAMPLES, not {len(rampup)} values")
    start, increment, samples = rampup
    if min(start, increment, samples) < 1:
        raise ValueError(f"--rampup-batch-size {start} {increment} {samples}: every value must be at least 1")
    if start > global_batch_size:
        raise ValueError(f"--rampup-batch-size starts at {start}, above --global-batch-size {global_batch_size}")
    if (global_batch_size - start) % increment:
        raise ValueError(
            f"--rampup-batch-size: the increment {increment} does not divide --global-batch-size {global_batch_size} "
            f"- start {start} = {global_batch_size - start}, so the ramp would not end at the global batch size"
        )
    return start, increment, samples


@dataclass(frozen=True)
class Curriculum:
    """Sample lengths that grow linearly from ``first`` to ``last`` tokens over ``iters`` optimizer steps."""

    first: int
    last: int
    iters: int
    step: int  # lengths are multiples of this

    @classmethod
    def from_settings(cls, training: ResolvedTraining) -> Curriculum | None:
        """Return None without a curriculum. Raises ValueError for an impossible one."""
        first, last, iters = training.curriculum_min_length, training.curriculum_max_length, training.curriculum_iters
        if first is None:
            return None
        if iters is None:
            raise ValueError("--curriculum-min-length requires --curriculum-iters, the steps over which samples grow")
        last = min(last or training.seq_length, training.seq_length)
        if not training.curriculum_length_step <= first <= last:
            raise ValueError(
                f"samples cannot grow from --curriculum-min-length {first} to --curriculum-max-length {last} tokens by "
                f"steps of --curriculum-length-step {training.curriculum_length_step}"
            )
        return cls(first, last, iters, training.curriculum_length_step)

    def length(self, iteration: int) -> int:
        """Tokens of a sample in the optimizer step that ends at ``iteration``: 1 for the first."""
        grown = math.floor(iteration / self.iters * (self.last - self.first) + self.first)
        return min(grown - grown % self.step, self.last)


def end_after_tokens(training: ResolvedTraining, batches: BatchSchedule) -> ResolvedTraining:
    """End ``training`` with the optimizer step that reaches ``train_tokens``, unless it ends before."""
    tokens, seq_length = training.train_tokens, training.seq_length
    if tokens is None:
        return training
    curriculum = Curriculum.from_settings(training)
    iterations = samples = 0
    while curriculum is not None and iterations < curriculum.iters and tokens > 0:
        size = batches.global_batch_size(samples)
        iterations, samples = iterations + 1, samples + size
        tokens -= size * curriculum.length(iterations)
    if tokens > 0:  # of samples that grow no more
        wanted = samples - -tokens // (seq_length if curriculum is None else curriculum.last)
        iterations += batches.iterations_to_reach(wanted, samples)
        samples = batches.samples_after(iterations)
    if training.train_iters is not None:
        return dataclasses.replace(training, train_iters=min(training.train_iters, iterations))
    return dataclasses.replace(training, train_samples=min(training.train_samples or samples, samples))
