"""LoCo's error of one hop by itself: nothing is lost in the long run, and what an undone step leaves of it."""

from __future__ import annotations

import pytest
import torch

from megatron_zpp.zeropp import LoCoConfig
from megatron_zpp.zeropp.reduce.gradient_sum import GradientSum
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback
from megatron_zpp.zeropp.wire.format import wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard

HOP = wire_format((ParameterShard("matrix", 256, True), ParameterShard("bias", 5, False)), 2, 32, torch.float32)


def gradients(seed: int, factor: float = 1.0) -> GradientSum:
    return GradientSum(torch.randn(2, HOP.numel, generator=torch.Generator().manual_seed(seed)) * factor)


def after_one_step(exact_undo: bool, **options: object) -> ErrorFeedback:
    feedback = ErrorFeedback(LoCoConfig(exact_undo=exact_undo, **options))
    feedback.begin_step()
    feedback.encode(gradients(0), HOP)
    return feedback


@pytest.mark.parametrize("exact_undo", [True, False])
def test_a_step_that_encoded_nothing_is_undone_without_loss(exact_undo):
    feedback = after_one_step(exact_undo)
    error = feedback.error.clone()
    feedback.begin_step()
    feedback.undo_step()
    assert feedback.error.equal(error) and feedback.steps == 1


@pytest.mark.parametrize("factor", [1.0, 1e30, float("inf")])
def test_an_undone_step_is_gone(factor):
    for exact_undo in (True, False):
        feedback = after_one_step(exact_undo)
        error = feedback.error.clone()
        feedback.begin_step()
        feedback.encode(gradients(1, factor), HOP)
        feedback.undo_step()
        if exact_undo:
            assert feedback.error.equal(error) and feedback.steps == 1
        else:
            assert feedback.error is None and feedback.steps == 0
        rest = ErrorFeedback(feedback.config) if not exact_undo else after_one_step(exact_undo)
        for loco in (feedback, rest):
            loco.begin_step()
        assert feedback.encode(gradients(2), HOP).equal(rest.encode(gradients(2), HOP))
        assert feedback.error.equal(rest.error)


def test_without_exact_undo_there_is_no_second_copy_from_step_to_step():
    for exact_undo in (True, False):
        feedback = after_one_step(exact_undo)
        feedback.begin_step()
        old = feedback.error
        feedback.encode(gradients(1), HOP)
        kept = {id(value) for value in (feedback.error, feedback._before_step[0]) if value is not None}
        assert (id(old) in kept) == exact_undo and len(kept) == 1 + exact_undo


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.8, 0.95])
def test_what_was_sent_telescopes(beta):
    """With a fixed beta and an exact error, sum(sent) = sum(g) - e_T / (1 - beta)."""
    feedback = ErrorFeedback(LoCoConfig(beta=beta, reset_interval=None, error_dtype="fp32"))
    sent, arrived = (torch.zeros(2, HOP.numel, dtype=torch.float64) for _ in range(2))
    for step in range(200):
        feedback.begin_step()
        wire = feedback.encode(gradients(step), HOP)
        arrived += HOP.decode(wire, out=torch.empty(2, HOP.numel))
        sent += gradients(step).compute()
    expected = sent - feedback.decode(feedback.error).double() / (1 - beta)
    torch.testing.assert_close(arrived, expected, rtol=0, atol=2e-3)
    assert (arrived - sent).abs().max() > 0.1  # what the error accounts for is not nothing
