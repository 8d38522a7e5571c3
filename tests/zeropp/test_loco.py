"""LoCo's error of one hop by itself loses nothing in the long run."""

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
