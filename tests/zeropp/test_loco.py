"""LoCo's error of one hop, and the sum that waits for a step's last micro-batch: what rounding does to each."""

from types import SimpleNamespace

import pytest
import torch

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.fsdp.formats import Formats, UnitPart
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback, NodeSum, round_to_bf16
from megatron_zpp.zeropp.wire.format import GradientSum, wire_format
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
        wire, feedback = feedback.compensate(gradients(step), HOP)
        arrived += HOP.decode(wire, out=torch.empty(2, HOP.numel))
        sent += gradients(step).compute()
    expected = sent - feedback.decoded().double() / (1 - beta)
    torch.testing.assert_close(arrived, expected, rtol=0, atol=2e-3)
    assert (arrived - sent).abs().max() > 0.1  # what the error accounts for is not nothing


BLOCKS, SIZE = 64, 32
SMALL = 2.0**-10  # an eighth of a step, of bf16 above 1 and of int8 in a block whose largest value is 1


def node_sum(dtype: str) -> NodeSum:
    shards = (ParameterShard("matrix", BLOCKS * SIZE, True), ParameterShard("bias", 3, False))
    unit = SimpleNamespace(device=torch.device("cpu"), whole=UnitPart.whole(shards))
    config = ZeroPPConfig(quantized_gradients=True, gradient_block_size=SIZE, gradient_sum_dtype=dtype)
    return NodeSum(unit, Formats(config, num_nodes=2), unit.whole)


def values(first: float, others: float) -> torch.Tensor:
    """[1, L], with ``first`` where a block begins."""
    of_blocks = torch.full((BLOCKS, SIZE), others)
    of_blocks[:, 0] = first
    return torch.cat([of_blocks.flatten(), torch.full((3,), others)]).unsqueeze(0)


@pytest.mark.parametrize("dtype, others", [("fp32", 0.0), ("bf16", 1.0), ("int8", 0.0)])
def test_what_is_less_than_half_a_step_is_not_lost(dtype, others):
    total, start = node_sum(dtype), values(1.0, others)
    total = total.with_added(GradientSum(start), noise_seed=0)
    for micro_batch in range(1, 65):
        total = total.with_added(GradientSum(values(0.0, SMALL)), noise_seed=micro_batch)
    gained = (total.plus(GradientSum(torch.zeros_like(start))).compute() - start)[0, : BLOCKS * SIZE]
    assert gained.view(BLOCKS, SIZE)[:, 1:].mean().item() == pytest.approx(64 * SMALL, rel=0.05)


def test_a_loaded_error_is_rescaled_before_its_first_step():
    gradients = GradientSum(torch.linspace(-1, 1, HOP.numel).view(1, -1))
    _, first = ErrorFeedback(LoCoConfig(error_dtype="fp32")).compensate(gradients, HOP)
    again = ErrorFeedback(first.config).loaded(first.state_dict(), first.format)
    assert torch.equal(again.rescaled(0.5).decoded(), 0.5 * first.decoded()) and again.error.any()


def test_nan_and_inf_stay_in_bf16():
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -0.0])
    # The NaN of all ones would overflow into a zero.
    all_ones = torch.tensor([-1, 2**31 - 1], dtype=torch.int32).view(torch.float32)
    for seed in range(100):
        rounded = round_to_bf16(torch.cat([special, all_ones]), seed).float()
        assert rounded[[0, 5, 6]].isnan().all() and rounded[1:5].equal(special[1:5])
