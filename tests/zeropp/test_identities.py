"""The identities that error feedback and weight differences rest on."""

from __future__ import annotations

import pytest
import torch

from megatron_zpp.zeropp import LoCoConfig
from megatron_zpp.zeropp.reduce.gradient_sum import GradientSum
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback
from megatron_zpp.zeropp.wire.format import wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard

PARAMETERS = (ParameterShard("weight", 500, True), ParameterShard("bias", 20, False))


def feed(loco, num_steps, bits=2):
    """Gradients, what arrived of them, and the error after each step, fp32 [steps, 1, L]."""
    hop = wire_format(PARAMETERS, bits, 64, torch.float32)
    feedback, generator = ErrorFeedback(loco), torch.Generator().manual_seed(0)
    gradients, arrived, errors = [], [], []
    for _ in range(num_steps):
        gradients.append(torch.randn(1, hop.numel, generator=generator))
        wire = feedback.encode(GradientSum(gradients[-1]), hop)
        arrived.append(hop.decode(wire, out=torch.empty(1, hop.numel)))
        errors.append(feedback.error.view(torch.float32)[:, : hop.numel].clone())
    return torch.stack(gradients), torch.stack(arrived), torch.stack(errors)


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.8, 0.95])
def test_what_was_sent_telescopes(beta):
    """With a fixed beta and an exact error, sum(sent) = sum(g) - e_T / (1 - beta): nothing is lost in the long run."""
    gradients, arrived, errors = feed(LoCoConfig(beta=beta, reset_interval=None, error_dtype="fp32"), 200)
    expected = gradients.double().sum(0) - errors[-1].double() / (1 - beta)
    torch.testing.assert_close(arrived.double().sum(0), expected, rtol=0, atol=2e-3)
    assert (arrived.sum(0) - gradients.sum(0)).abs().max() > 0.1  # what the error accounts for is not nothing


@pytest.mark.parametrize("reset", ["hard", "decay"])
@pytest.mark.parametrize("error_dtype", ["fp32", "int8"])
def test_resets_and_decay_count_optimizer_steps_not_micro_batches(reset, error_dtype):
    """The hop within a node encodes every micro-batch; only the step's last one decays, or brings a reset closer."""
    interval, micro_batches, beta = 3, 2, 0.7
    loco = LoCoConfig(beta=beta, reset=reset, reset_interval=interval, hops="both", error_dtype=error_dtype)
    hop = wire_format(PARAMETERS, 3, 64, torch.float32)
    kept = wire_format(PARAMETERS, 8 if error_dtype == "int8" else None, 64, torch.float32)
    feedback, generator = ErrorFeedback(loco), torch.Generator().manual_seed(0)
    error, lost = torch.zeros(2, hop.numel), 0
    for step in range(1, 2 * interval + 2):
        feedback.begin_step()
        for i in range(micro_batches):
            gradients = torch.randn(2, hop.numel, generator=generator)
            is_last = i == micro_batches - 1
            wire = feedback.encode(GradientSum(gradients), hop, is_last=is_last)
            arrived = hop.decode(wire, out=torch.empty_like(gradients))
            moved = beta * error + (1 - beta) * (gradients + error - arrived)
            if is_last and reset == "decay":
                moved = moved * (1 - 1 / interval)
            if is_last and reset == "hard" and step % interval == 0:
                assert feedback.error is None
                error, lost = torch.zeros_like(moved), lost + 1
            else:
                error = kept.decode(kept.encode(moved), out=torch.empty_like(moved))
                assert feedback.decode(feedback.error).equal(error), (step, i)
    assert lost == (2 if reset == "hard" else 0) and (error != 0).any()
