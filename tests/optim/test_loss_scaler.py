"""The dynamic loss scale grows, tolerates and backs off as Megatron's."""

import pytest

from megatron_zpp.optim.gradients import LossScaler
from megatron_zpp.settings.groups import PrecisionSettings


def dynamic(**changes: float) -> LossScaler:
    return LossScaler(**{"scale": 1024.0, "dynamic": True, "window": 3, "hysteresis": 2, **changes})


def run(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow, ``.`` a clean step."""
    scales = []
    for step in overflows:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


def test_doubles_after_a_window_of_clean_steps_in_a_row() -> None:
    assert run(dynamic(), "......") == [1024, 1024, 2048, 2048, 2048, 4096]
    assert run(dynamic(), "..x...") == [1024, 1024, 1024, 1024, 1024, 2048]  # an overflow starts the count again


def test_first_overflow_is_tolerated_then_each_halves() -> None:
    assert run(dynamic(), "xxx") == [1024, 512, 256]


def test_tolerance_returns_only_with_growth() -> None:
    assert run(dynamic(), "x..x") == [1024, 1024, 1024, 512]  # clean steps alone do not refill it
    assert run(dynamic(), "x...x") == [1024, 1024, 1024, 2048, 2048]  # growth does


def test_never_below_the_minimum() -> None:
    assert run(dynamic(scale=4.0, hysteresis=1, min_scale=2.0), "xxx") == [2, 2, 2]


def test_resume_continues_in_the_middle_of_a_window() -> None:
    whole, first = dynamic(), dynamic()
    expected = run(whole, "x..x......")
    start = run(first, "x..x.")
    second = dynamic()
    second.load_state_dict(first.state_dict())
    assert start + run(second, ".....") == expected


def test_fixed_scales_do_not_move() -> None:
    fixed = LossScaler.from_settings(PrecisionSettings(fp16=True, loss_scale=128.0))
    assert run(fixed, "xx...") == [128] * 5
    fixed.load_state_dict(dynamic().state_dict())
    assert fixed.scale == 128
    assert LossScaler.from_settings(PrecisionSettings(bf16=True)).scale == 1.0


def test_settings_reach_the_dynamic_scale() -> None:
    assert LossScaler.from_settings(PrecisionSettings(fp16=True)).scale == 2.0**32
    settings = PrecisionSettings(
        fp16=True, initial_loss_scale=8.0, loss_scale_window=1, hysteresis=1, min_loss_scale=4.0
    )
    assert run(LossScaler.from_settings(settings), ".xxx") == [16, 8, 4, 4]


@pytest.mark.parametrize("bad", [dict(scale=0.5), dict(window=0), dict(hysteresis=0), dict(scale=-1.0)])
def test_impossible_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError):
        dynamic(**bad)
