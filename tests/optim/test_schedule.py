"""Learning rates and weight decays against values worked out by hand from Megatron's formulas."""

import math

import pytest

from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.schedule import Schedule, resume_schedule
from megatron_zpp.settings.groups import OptimizerSettings, ScheduleSettings, TrainingSettings

OPTIMIZER = OptimizerSettings(lr=1.0, min_lr=0.2)
BATCH = BatchSchedule(global_batch_size=10, micro_batch_size=1, data_parallel_size=1)


def build(
    optimizer: OptimizerSettings = OPTIMIZER, train_iters: int | None = 100, batch: BatchSchedule = BATCH, **schedule
) -> Schedule:
    train_samples = schedule.pop("train_samples", None)
    training = TrainingSettings(train_iters=train_iters, train_samples=train_samples)
    return Schedule.from_settings(optimizer, ScheduleSettings(**schedule), training, batch)


def test_warm_up_is_linear_from_its_start_to_the_peak() -> None:
    schedule = build(lr_warmup_iters=10, lr_warmup_init=0.5)  # 100 samples
    assert [schedule.lr(n) for n in (0, 50, 100)] == [0.5, 0.75, 1.0]
    assert build(lr_warmup_iters=10).lr(0) == 0.0  # Megatron's first step
    assert build().lr(0) == 1.0


@pytest.mark.parametrize(
    ("style", "warmup_iters", "expected"),  # learning rates by samples; 10 steps of warm-up leave 900 samples of decay
    [
        ("constant", 10, {100: 1.0, 550: 1.0, 1000: 1.0, 1001: 1.0}),
        ("linear", 10, {100: 1.0, 550: 0.6, 1000: 0.2, 1001: 0.2}),
        ("cosine", 10, {100: 1.0, 550: 0.6, 1000: 0.2, 1001: 0.2}),
        ("inverse-square-root", 10, {100: 1.0, 550: (100 / 550) ** 0.5, 1000: 0.1**0.5, 1001: 0.2}),
        ("linear", 0, {250: 0.2 + 0.8 * 0.75}),
        ("cosine", 0, {250: 0.2 + 0.8 * (1 + 0.5**0.5) / 2}),
        ("inverse-square-root", 1, {500: 0.2}),  # not below the minimum
        ("inverse-square-root", 0, {0: 1.0}),
    ],
)
def test_each_decay_style_has_megatrons_learning_rates(style: str, warmup_iters: int, expected: dict) -> None:
    schedule = build(lr_decay_style=style, lr_warmup_iters=warmup_iters)
    assert {samples: schedule.lr(samples) for samples in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "quarter"),  # the coefficient a quarter into the final decay
    [("linear", 0.75), ("cosine", (1 + 0.5**0.5) / 2), ("exponential", 2 * 0.5**0.25 - 1), ("minus_sqrt", 0.5)],
)
def test_wsd_holds_then_decays(style: str, quarter: float) -> None:
    schedule = build(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=40, lr_warmup_iters=10)
    assert schedule.lr(100) == schedule.lr(600) == 1.0
    assert schedule.lr(700) == pytest.approx(0.2 + 0.8 * quarter)
    assert schedule.lr(1000) == pytest.approx(0.2)
    assert schedule.lr(1001) == 0.2


def test_lengths_in_samples_and_as_fraction_of_the_decay() -> None:
    in_samples = build(train_iters=None, train_samples=2000, lr_decay_samples=1000, lr_warmup_samples=100)
    assert in_samples.lr(550) == pytest.approx(0.6)
    # The fraction is of the decay, not of the run.
    fraction = build(train_iters=None, train_samples=2000, lr_decay_samples=1000, lr_warmup_fraction=0.1)
    assert fraction.lr(50) == 0.5
    assert fraction.lr(550) == pytest.approx(0.6)
    assert build(train_iters=200, lr_decay_iters=100).lr(500) == pytest.approx(0.6)


def test_iterations_under_ramp_up_are_the_samples_they_consume() -> None:
    # Ten steps of 5 reach the end of the ramp, the other 90 take 10.
    ramp = BatchSchedule(10, 1, 1, rampup=(5, 5, 50))
    schedule = build(batch=ramp, lr_warmup_iters=10)
    assert (schedule.warmup_samples, schedule.decay_samples) == (50, 950)
    assert schedule.lr(ramp.samples_after(100)) == pytest.approx(0.2)


def test_resume_demands_the_same_schedule_or_a_choice() -> None:
    saved, changed = build(lr_warmup_iters=10), build(lr_warmup_iters=20)
    assert resume_schedule(saved, saved.state_dict()) == saved
    older = dict(start_weight_decay=0.01, end_weight_decay=0.01, weight_decay_samples=9, weight_decay_style="constant")
    older |= {name: value for name, value in saved.state_dict().items() if name != "weight_decay"}
    assert resume_schedule(saved, older) == saved
    grew = older | {"weight_decay_style": "linear"}
    for use_checkpoint in (False, True):
        with pytest.raises(ValueError, match=r"its weight decay grew .*\(linear\).*: --over.* --weight-decay"):
            resume_schedule(saved, grew, use_checkpoint=use_checkpoint)
    assert resume_schedule(saved, grew, override=True) == saved
    with pytest.raises(ValueError, match="warmup_samples 100 in the checkpoint, 200 by the flags"):
        resume_schedule(changed, saved.state_dict())
    assert resume_schedule(changed, saved.state_dict(), override=True) == changed
    assert resume_schedule(changed, saved.state_dict(), use_checkpoint=True) == saved
    with pytest.raises(ValueError, match="'max_lr' missing or wrong"):
        resume_schedule(saved, saved.state_dict() | {"max_lr": "high"}, use_checkpoint=True)


CONSTANT = OptimizerSettings(lr=1.0, min_lr=0.2, weight_decay=0.1)


@pytest.mark.parametrize(
    ("flags", "longer", "differs"),
    [
        ({"lr_decay_style": "constant"}, {}, None),
        ({"lr_decay_style": "constant", "lr_warmup_iters": 10}, {}, None),
        ({"lr_decay_style": "linear", "lr_decay_iters": 100}, {}, None),
        ({"lr_decay_style": "linear", "lr_decay_iters": 100}, {"lr_wsd_decay_style": "cosine"}, None),
        ({"lr_decay_style": "constant"}, {"lr_warmup_init": 0.5}, None),  # without a warm-up
        ({"lr_decay_style": "linear"}, {}, "decay_samples 1000 in"),
        ({"lr_decay_style": "constant"}, {"lr_decay_style": "cosine"}, "decay_style constant in"),
        ({"lr_decay_style": "constant", "lr_warmup_fraction": 0.1}, {}, "warmup_samples 100.0 in"),
    ],
)
def test_a_longer_run_is_refused_only_for_values_that_a_step_depends_on(flags, longer, differs) -> None:
    saved = build(CONSTANT, **flags)
    now = build(CONSTANT, train_iters=150, **flags | longer)
    if differs is None:
        assert resume_schedule(now, saved.state_dict()) == now
        samples = range(0, 1000, 50)
        assert [now.lr(n) for n in samples] == [saved.lr(n) for n in samples]
    else:
        with pytest.raises(ValueError, match=differs):
            resume_schedule(now, saved.state_dict())


def test_lengths_in_tokens_are_samples_of_the_sequence_length():
    in_tokens = dict(lr_decay_tokens=6401, lr_warmup_tokens=640)
    training = TrainingSettings(train_samples=900, seq_length=64)
    made = Schedule.from_settings(OptimizerSettings(lr=1.0), ScheduleSettings(**in_tokens), training, BATCH)
    assert (made.decay_samples, made.warmup_samples) == (101, 10)


def test_decoupled_learning_rates_have_the_same_shape():
    optimizer = OptimizerSettings(lr=1.0, min_lr=0.5, decoupled_lr=4.0, decoupled_min_lr=2.0)
    schedule = build(optimizer, train_iters=10, lr_warmup_iters=2)
    for samples in 0, 5, 20, 60, 100, 200:
        assert schedule.decoupled_lr(optimizer, samples) == pytest.approx(4 * schedule.lr(samples))
    assert schedule.decoupled_lr(OptimizerSettings(lr=1.0), 5) is None
    with pytest.raises(ValueError, match=r"--decoupled-lr 0\.1 is below --decoupled-min-lr 0\.5"):
        build(OptimizerSettings(lr=1.0, min_lr=0.5, decoupled_lr=0.1), train_iters=10)


def test_a_logarithmic_warm_up_is_deepspeeds():
    steps, top, bottom = 8, 1.0, 0.1
    log = dict(lr_warmup_init=bottom, lr_warmup_style="log", lr_decay_style="constant")
    schedule = build(OptimizerSettings(lr=top), train_iters=20, lr_warmup_iters=steps, **log)
    for step in range(steps):
        expected = bottom + (top - bottom) * math.log(step + 1) / math.log(steps)
        assert schedule.lr(10 * step) == pytest.approx(expected)
    assert schedule.lr(10 * steps) == top
    assert Schedule.from_state_dict(schedule.state_dict()) == schedule
    linear = build(OptimizerSettings(lr=top), train_iters=20, lr_warmup_iters=8)
    assert resume_schedule(linear, linear.state_dict()) == linear
    with pytest.raises(ValueError, match="warmup_log_steps"):
        resume_schedule(schedule, linear.state_dict())
