"""Samples that grow while a run goes on, as DeepSpeed's curriculum learning of type seqlen; lengths in tokens."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.settings.resolved import ResolvedTraining


@dataclass(frozen=True)
class Curriculum:
    """From ``first`` to ``last`` tokens a sample along a straight line over ``iters`` optimizer steps."""

    first: int
    last: int
    iters: int
    step: int  # of which lengths are multiples

    @classmethod
    def from_settings(cls, training: ResolvedTraining) -> Curriculum | None:
        """None without a curriculum. Raises ValueError for one that cannot be."""
        first, last, iters = training.curriculum_min_length, training.curriculum_max_length, training.curriculum_iters
        if first is None:
            return None
        if iters is None:
            raise ValueError("over how many steps do samples grow? --curriculum-min-length needs --curriculum-iters")
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
    """``training`` ended by the optimizer step that reaches ``train_tokens``, where it would not end before."""
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
