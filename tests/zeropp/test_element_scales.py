"""Scales of elements: both ends agree, what should cancel does, and quiet elements arrive with less noise."""

import pytest
import torch
from torch import Tensor

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback
from megatron_zpp.zeropp.wire.format import GradientSum, WireFormat, wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard
from megatron_zpp.zeropp.wire.scales import ElementScales

PARAMETERS = (ParameterShard("matrix", 600, True), ParameterShard("bias", 5, False), ParameterShard("rows", 70, True))
NUMEL = 675
HOP = wire_format(PARAMETERS, 2, 64, torch.float32)
LOUDNESS = 2.0 ** torch.linspace(-6, 0, NUMEL)[torch.randperm(NUMEL, generator=torch.Generator().manual_seed(9))]


def gradients_of(node: int, step: int) -> Tensor:
    """[2, L], elements of which differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(100 * step + node)
    return torch.randn(2, NUMEL, generator=generator) * LOUDNESS


class TwoNodes:
    """What one rank on each of two nodes sends to the other."""

    def __init__(self, hop: WireFormat = HOP, loco: LoCoConfig | None = None, learns: bool = True) -> None:
        self.hop, self.scales, self.learns = hop, [ElementScales(), ElementScales()], learns
        self.feedback = [ErrorFeedback(loco), ErrorFeedback(loco)] if loco is not None else None

    def step(self, gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The wires uint8 [2, nbytes] that each rank sends, and the sum [L] that arrives there."""
        if self.learns:
            self.scales = [scales.moved() for scales in self.scales]
        wires = []
        for node, own in enumerate(gradients):
            self.scales[node] = self.scales[node].for_format(self.hop)
            exponents = self.scales[node].sent
            if self.feedback is None:
                wires.append(GradientSum(own).to_wire(self.hop, None, exponents=exponents))
            else:
                wire, self.feedback[node] = self.feedback[node].compensate(
                    GradientSum(own), self.hop, exponents=exponents
                )
                wires.append(wire)
        totals = []
        for node, scales in enumerate(self.scales):
            received = torch.stack([sent[node] for sent in wires])
            totals.append(GradientSum(received, self.hop, exponents=scales.received).compute())
            self.scales[node] = scales.observed(self.hop, wires[node], received)
        return wires, totals

    def steps(self, first: int, last: int, factor: float = 1.0) -> list[Tensor]:
        """The wires of steps ``first`` to ``last``, of gradients times ``factor``."""
        return [
            torch.stack(self.step([factor * gradients_of(node, step) for node in (0, 1)])[0])
            for step in range(first, last)
        ]


@pytest.mark.parametrize("bits", [2, 4])
def test_quiet_elements_arrive_with_less_noise(bits):
    """The error of each element relative to its own size, after both ends have learned for 200 steps."""
    hop = wire_format(PARAMETERS, bits, None, torch.float32)
    errors = []
    for learns in (True, False):
        nodes, of_steps = TwoNodes(hop, learns=learns), []
        for step in range(300):
            gradients = [gradients_of(node, step) for node in (0, 1)]
            _, (total, _) = nodes.step(gradients)
            of_steps.append((total - gradients[0][0] - gradients[1][0]) / LOUDNESS)
        errors.append(torch.stack(of_steps[200:]).square().mean().sqrt().item())
    with_scales, without = errors
    assert with_scales < without / 3, errors


def test_the_loss_scale_cancels():
    """Another loss scale moves no scale of an element, and the sums that arrive by exactly its factor."""
    plain, scaled, factor = TwoNodes(), TwoNodes(), 2.0**12
    for nodes in (plain, scaled):
        nodes.steps(0, 10)
    learned = [scales.exponents.clone() for scales in plain.scales]
    for step in range(10, 20):
        gradients = [gradients_of(node, step) for node in (0, 1)]
        _, expected = plain.step(gradients)
        _, totals = scaled.step([factor * gradient for gradient in gradients])
        assert all(total.equal(factor * other) for total, other in zip(totals, expected, strict=True)), step
    for scales, other, before in zip(plain.scales, scaled.scales, learned, strict=True):
        moved = scales.moved().exponents
        assert moved.equal(other.moved().exponents) and not moved.equal(before)


def test_zeros_stay_zeros_and_nothing_else_is_lost_of_a_nan():
    nodes = TwoNodes()
    nodes.steps(0, 31)  # the next one moves the scales of all quiet codes
    gradients = [gradients_of(node, 31) for node in (0, 1)]
    for own in gradients:
        own[:, 64:128:2] = 0.0
    gradients[1][0, 200] = torch.nan
    gradients[1][0, 300] = torch.inf
    before = [scales.state_dict()["exponents"] for scales in nodes.scales]
    _, (total, _) = nodes.step(gradients)
    assert not total[64:128:2].any() and total[65:128:2].any()
    poisoned = torch.zeros(NUMEL, dtype=torch.bool)
    poisoned[192:320] = True
    assert total[poisoned].isnan().all() and total[~poisoned].isfinite().all()
    assert total[600:605].equal((gradients[0] + gradients[1])[0, 600:605])
    # The poisoned blocks told nothing to those who sent or received them.
    for node, scales in enumerate(nodes.scales):
        of_blocks = (scales.state_dict()["exponents"] == before[node])[..., 192:320].all(dim=-1)  # [2, 2]
        assert of_blocks.tolist() == ([[False, False], [False, True]] if node == 0 else [[True, False], [False, False]])


def test_codes_of_which_elements_have_scales_are_needed():
    with pytest.raises(ValueError, match="gradient_element_scales requires gradient_bits"):
        ZeroPPConfig(quantized_gradients=True, gradient_bits=None, gradient_element_scales=True)
    with pytest.raises(ValueError, match="requires quantized_gradients"):
        ZeroPPConfig(gradient_element_scales=True)


@pytest.mark.parametrize("width", [64, 96])  # row widths: blocks have 64 elements
def test_rows_that_are_seldom_met_are_sent_without_noise(width):
    """Errors of embedding rows wait for the row's next gradient: sent before, they would move the scales.

    Compares the noise of all steps relative to their gradients, with scales of elements and without.
    """
    rows, steps = 32, 600
    hop = wire_format((ParameterShard("embedding", rows * width, True),), 2, 64, torch.float32)
    noises = []
    for learns in (True, False):
        generator = torch.Generator().manual_seed(4)
        nodes, noise, size = TwoNodes(hop, LoCoConfig(), learns), 0.0, 0.0
        for _ in range(steps):
            met = torch.rand(rows, 1, generator=generator) < 0.01
            own = [torch.randn(rows, width, generator=generator) * met for _ in range(2)]
            _, (total, _) = nodes.step([gradient.view(1, -1).repeat(2, 1) for gradient in own])
            noise += (total.view(rows, width) - own[0] - own[1]).square().sum().item()
            size += (own[0] + own[1]).square().sum().item()
        noises.append((noise / size) ** 0.5)
    with_scales, without = noises
    assert with_scales < 1.2 * without < 0.6, noises
