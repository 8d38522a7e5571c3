"""Samples that grow: DeepSpeed's formula, and runs that end at their tokens."""

import math

import pytest

from megatron_zpp.optim.batch_size import BatchSchedule, Curriculum, end_after_tokens
from megatron_zpp.settings.groups import TrainingSettings


def test_lengths_are_deepspeeds():
    curriculum = Curriculum(first=80, last=2048, iters=13767, step=8)
    for iteration in 1, 2, 500, 6883, 13766, 13767, 20000:
        difficulty = math.floor(iteration / 13767 * (2048 - 80) + 80)
        assert curriculum.length(iteration) == min(difficulty - difficulty % 8, 2048)
    assert [Curriculum(8, 32, 3, 8).length(iteration) for iteration in range(1, 6)] == [16, 24, 32, 32, 32]


def test_samples_never_grow_beyond_the_sequence():
    training = TrainingSettings(seq_length=32, curriculum_min_length=8, curriculum_max_length=64, curriculum_iters=2)
    curriculum = Curriculum.from_settings(training)
    assert curriculum is not None and curriculum.length(100) == 32
    assert Curriculum.from_settings(TrainingSettings(seq_length=32)) is None


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("ramp", [None, (4, 2, 40)])
@pytest.mark.parametrize("tokens", [1, 31, 32, 1000, 1024, 5000])
def test_the_last_step_is_the_first_that_reaches_the_tokens(grows, ramp, tokens):
    more = dict(curriculum_min_length=8, curriculum_iters=7) if grows else {}
    training, batches = TrainingSettings(seq_length=32, train_tokens=tokens, **more), BatchSchedule(8, 1, 2, ramp)
    curriculum = Curriculum.from_settings(training)
    samples = trained = iteration = 0
    while trained < tokens:
        iteration, size = iteration + 1, batches.global_batch_size(samples)
        samples, trained = samples + size, trained + size * (curriculum.length(iteration) if curriculum else 32)
    assert end_after_tokens(training, batches).train_samples == samples
