"""Batch sizes along the run, and samples that grow: Megatron's ramp-up, DeepSpeed's curriculum, counts of both."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.optim.batch_size import BatchSchedule, Curriculum, end_after_tokens, read_steps
from megatron_zpp.settings.groups import TrainingSettings


def test_ramp_up_follows_megatron() -> None:
    # 16 -> 64 by 16: three increments, one every 300 / 3 = 100 consumed samples.
    batch = BatchSchedule(64, 2, 4, rampup=(16, 16, 300))
    by_consumed = {0: 16, 99: 16, 100: 32, 199: 32, 200: 48, 299: 48, 300: 64, 301: 64, 10**6: 64}
    assert {consumed: batch.global_batch_size(consumed) for consumed in by_consumed} == by_consumed
    assert batch.num_micro_batches(200) == 48 // 8
    assert BatchSchedule(32, 2, 4, rampup=(32, 8, 100)).global_batch_size(0) == 32  # starts at its end


def test_steps_follow_megatron() -> None:
    steps = read_steps(["0:8", "1.6K:16,", "0.01M:32"], seq_length=32)
    assert steps == [(0, 8), (50, 16), (312, 32)] == read_steps(["0:8 1.6K:16 0.01M:32"], 32)
    batch = BatchSchedule(32, 2, 4, steps=steps)
    by_consumed = {0: 8, 49: 8, 50: 16, 311: 16, 312: 32, 10**6: 32}
    assert {consumed: batch.global_batch_size(consumed) for consumed in by_consumed} == by_consumed
    assert batch.samples_after(8) == 7 * 8 + 16 and batch.total_iterations(72) == 8
    assert batch.micro_batch_counts() == {1, 2, 4}


@pytest.mark.parametrize("wrong", ["8", "0:x", "64:8", "0:8 40:16 20:32", "0:8 3:16", "0:0", ""])
def test_impossible_steps_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="--step-batch-size-schedule"):
        read_steps([wrong], seq_length=32)


@settings(deadline=None)
@given(
    unit=st.integers(1, 4),
    start=st.integers(1, 5),
    increment=st.integers(1, 4),
    increments=st.integers(0, 6),
    ramp_samples=st.integers(1, 3000),
    iterations=st.integers(0, 400),
)
def test_counts_equal_stepping_through_the_run(
    unit: int, start: int, increment: int, increments: int, ramp_samples: int, iterations: int
) -> None:
    final = (start + increment * increments) * unit
    batch = BatchSchedule(final, 1, unit, rampup=(start * unit, increment * unit, ramp_samples))
    consumed = 0
    for _ in range(iterations):
        consumed += batch.global_batch_size(consumed)
    assert batch.samples_after(iterations) == consumed
    assert batch.total_iterations(consumed) == iterations
    assert batch.total_iterations(consumed + batch.global_batch_size(consumed) - 1) == iterations
    assert batch.iterations_to_reach(consumed) == iterations
    assert batch.iterations_to_reach(consumed + 1) == iterations + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(global_batch_size=100),
            r"100 is not divisible by micro-batch size 4 \* data-parallel size 8 = 32; use 96",
        ),
        (dict(global_batch_size=16), "use 32$"),
        (dict(global_batch_size=64, rampup=(16, 16, 300)), "16 during --rampup-batch-size is not divisible"),
        (dict(global_batch_size=96, rampup=(32, 48, 300)), "increment 48 does not divide"),
        (dict(global_batch_size=64, rampup=(96, 32, 300)), "starts at 96"),
        (dict(global_batch_size=64, steps=[(0, 48), (9, 64)]), "48 during --step-batch-size-schedule is not divisible"),
    ],
)
def test_impossible_sizes_are_refused_at_once(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSchedule(micro_batch_size=4, data_parallel_size=8, **arguments)


def test_lengths_are_deepspeeds():
    curriculum = Curriculum(first=80, last=2048, iters=13767)
    for iteration in 1, 2, 500, 6883, 13766, 13767, 20000:
        difficulty = math.floor(iteration / 13767 * (2048 - 80) + 80)
        assert curriculum.length(iteration) == min(difficulty - difficulty % 8, 2048)
    assert [Curriculum(8, 32, 3).length(iteration) for iteration in range(1, 6)] == [16, 24, 32, 32, 32]


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
