"""Batch size by consumed samples, as in Megatron; sample length by iteration, as in DeepSpeed's curriculum."""

from __future__ import annotations

import dataclasses
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from megatron_zpp.settings.resolved import ResolvedTraining


class BatchSchedule:
    """The number of samples of each optimizer step, a pure function of the consumed samples.

    With ``rampup=(start, increment, samples)`` the batch grows from ``start`` to ``global_batch_size`` by
    ``increment``, in stages of equally many samples. ``steps``, (consumed samples, batch size from then on), lists any
    other sizes; see ``read_steps``.

    Raises ValueError if a size is not a multiple of ``micro_batch_size * data_parallel_size``, or the ramp does not
    end.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        rampup: Sequence[int] | None = None,
        steps: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._micro_batch_size = micro_batch_size
        self._data_parallel_size = data_parallel_size
        self._samples_per_micro_batch = micro_batch_size * data_parallel_size  # over all ranks

        if rampup is not None:
            start, increment, samples = rampup
            if start > global_batch_size:
                above = f"starts at {start}, above --global-batch-size {global_batch_size}"
                raise ValueError(f"--rampup-batch-size {above}")
            if (global_batch_size - start) % increment:
                rest = f"--global-batch-size {global_batch_size} - start {start} = {global_batch_size - start}"
                raise ValueError(f"--rampup-batch-size: the increment {increment} does not divide {rest}")
            count = (global_batch_size - start) // increment or 1
            sizes = range(start, global_batch_size + 1, increment)
            steps = [(-(-number * samples // count), size) for number, size in enumerate(sizes)]
        self._begins, self._sizes = zip(*(steps or [(0, global_batch_size)]), strict=True)
        cause = "--step-batch-size-schedule" if rampup is None else "--rampup-batch-size"
        for size in self._sizes:
            self._check_divisible(size, "" if size == global_batch_size else f" during {cause}")

    @classmethod
    def from_settings(cls, training: ResolvedTraining, data_parallel_size: int) -> BatchSchedule:
        """Build the schedule of a run. Raises ValueError as the constructor does."""
        schedule = training.step_batch_size_schedule
        return cls(
            training.global_batch_size,
            training.micro_batch_size,
            data_parallel_size,
            training.rampup_batch_size,
            None if schedule is None else read_steps(schedule, training.seq_length),
        )

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples that the step after ``consumed_samples`` trains on, over all ranks."""
        return self.num_micro_batches(consumed_samples) * self._samples_per_micro_batch

    def num_micro_batches(self, consumed_samples: int) -> int:
        """Forward passes per rank in the step after ``consumed_samples``."""
        return self._sizes[self._level(consumed_samples)] // self._samples_per_micro_batch

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

    def _level(self, consumed_samples: int) -> int:
        return bisect_right(self._begins, consumed_samples) - 1

    def _levels(self, consumed: int = 0) -> Iterator[tuple[int, int | None]]:
        """Yield ``(batch size, steps at it)`` in order; the last has no end, and None steps."""
        while (level := self._level(consumed)) < len(self._sizes) - 1:
            size = self.global_batch_size(consumed)
            steps = -(-(self._begins[level + 1] - consumed) // size)  # those that start before the next size is due
            yield size, steps
            consumed += steps * size
        yield self.global_batch_size(consumed), None

    def _check_divisible(self, size: int, during: str) -> None:
        unit = self._samples_per_micro_batch
        if size % unit == 0:
            return
        lower, upper = size // unit * unit, (size // unit + 1) * unit
        suggestion = f"{lower} or {upper}" if lower else str(upper)
        raise ValueError(
            f"global batch size {size}{during} is not divisible by micro-batch size {self._micro_batch_size} * "
            f"data-parallel size {self._data_parallel_size} = {unit}; use {suggestion}"
        )


def read_steps(schedule: Sequence[str], seq_length: int) -> list[tuple[int, int]]:
    """Read "0:384 200B:768", tokens and batch sizes, as (samples, batch size) in order. Raises ValueError."""
    steps, unit = list[tuple[int, int]](), {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    for step in " ".join(schedule).replace(",", " ").split():
        match = re.fullmatch(r"([0-9]+\.?[0-9]*)([KMBT]?):([1-9][0-9]*)", step.upper())
        if match is None:
            raise ValueError(f"--step-batch-size-schedule {step} must be TOKENS:BATCH_SIZE, as 0:384 or 200B:768")
        steps.append((int(float(match[1]) * unit[match[2]]) // seq_length, int(match[3])))
    begins = [begin for begin, _ in steps]
    if not begins or begins[0] != 0 or any(begin >= later for begin, later in pairwise(begins)):
        raise ValueError("--step-batch-size-schedule must begin at 0 tokens, and each step a sample or more later")
    return steps


@dataclass(frozen=True)
class Curriculum:
    """Sample lengths that grow linearly from ``first`` to ``last`` tokens over ``iters`` optimizer steps."""

    first: int
    last: int
    iters: int
    step: ClassVar[int] = 8  # lengths are multiples of this

    @classmethod
    def from_settings(cls, training: ResolvedTraining) -> Curriculum | None:
        """Return None without a curriculum. Raises ValueError for an impossible one."""
        first, last, iters = training.curriculum_min_length, training.seq_length, training.curriculum_iters
        if first is None:
            return None
        if iters is None:
            raise ValueError("--curriculum-min-length requires --curriculum-iters, the steps over which samples grow")
        if first > last:
            raise ValueError(f"samples cannot grow from --curriculum-min-length {first} to --seq-length {last}")
        return cls(first, last, iters)

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
    if tokens > 0:  # tokens after samples have reached their full length
        wanted = samples - -tokens // (seq_length if curriculum is None else curriculum.last)
        iterations += batches.iterations_to_reach(wanted, samples)
        samples = batches.samples_after(iterations)
    if training.train_iters is not None:
        return dataclasses.replace(training, train_iters=min(training.train_iters, iterations))
    return dataclasses.replace(training, train_samples=min(training.train_samples or samples, samples))
