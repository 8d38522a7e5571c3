"""Advice after ``--zeropp auto``: once, and only where steps are not as predicted."""

from __future__ import annotations

import pytest

from megatron_zpp.metrics.advice import STEPS, Advice
from megatron_zpp.planning.step import StepTime


@pytest.mark.parametrize("seconds, says", [(1.0, False), (1.4, False), (1.6, True), (0.6, True)])
def test_it_speaks_once_if_steps_are_not_as_predicted(seconds, says):
    advice = Advice(StepTime(compute=0.8, exposed_between=0.2))
    assert advice.after(STEPS - 1, seconds, 0.5) is None
    said = advice.after(1, seconds, 0.5)
    assert (said is not None) == says
    if said is not None:
        assert f"a step takes {seconds:.3g} s and waits 0.5 s" in said and "predicted 1 and 0.2" in said
    assert advice.after(STEPS, 10 * seconds, 0.5) is None


def test_without_a_prediction_it_is_silent():
    assert Advice(None).after(10 * STEPS, 1.0, 0.0) is None
