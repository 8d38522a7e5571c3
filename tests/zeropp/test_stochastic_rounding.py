"""Stochastic rounding is unbiased, and what is drawn for one wire is independent of what is drawn for any other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.fsdp.shared import Shared
from megatron_zpp.zeropp.fsdp.topology import RankLayout
from megatron_zpp.zeropp.fsdp.unit import Unit
from megatron_zpp.zeropp.gather.weight_encoder import WeightEncoder
from megatron_zpp.zeropp.reduce.gradient_hops import GradientHops
from megatron_zpp.zeropp.reduce.gradient_sum import GradientSum
from megatron_zpp.zeropp.wire.layout import ParameterShard
from megatron_zpp.zeropp.wire.quantization import counter_uniform
from tests.zeropp import oracle

NUMEL, BLOCK, NODES, RANKS_PER_NODE = 4096, 64, 2, 2
CONFIG = ZeroPPConfig(
    quantized_weights=True,
    hpz_partition_size=RANKS_PER_NODE,
    quantized_gradients=True,
    weight_bits=4,
    weight_intra_bits=4,
    gradient_intra_bits=4,
    weight_block_size=BLOCK,
    gradient_block_size=BLOCK,
    weight_rounding="stochastic",
    gradient_rounding="stochastic",
)


@dataclass(eq=False)
class OneMatrix(Unit):
    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def parameters(self) -> list[Tensor]:
        return [torch.empty(NUMEL, 1, requires_grad=True)]


def values(fraction: float, *rows: int) -> Tensor:
    """[..., L]: all ``fraction`` of a step between two codes, but for one in each block, which sets the scale."""
    filled = torch.full((*rows, NUMEL // BLOCK, BLOCK), fraction)
    filled[..., 0] = 7.0  # the largest code of 4 bits
    return filled.flatten(-2)


def rounded(format, wires: Tensor) -> Tensor:
    """What arrived [draws, elements] of the elements that lie between two codes."""
    arrived = format.decode(wires, torch.empty(*wires.shape[:-1], NUMEL)).unflatten(-1, (-1, BLOCK))
    assert (arrived[..., 0] == 7).all()
    return arrived[..., 1:].flatten(-2).flatten(0, -2)


def gradient_draws(config: ZeroPPConfig, unit: str, rank: int, steps: int, fraction: float) -> Iterator[Tensor]:
    """Of every wire that a rank sends in steps of two micro-batches."""
    shared = Shared(config)
    hops = GradientHops(
        OneMatrix(unit, (ParameterShard("weight", NUMEL, True),)), RankLayout(NODES, RANKS_PER_NODE, rank), shared
    )
    micro_batch = shared.micro_batch
    within, between = hops.within_node, hops.between_nodes
    for _, is_last in itertools.product(range(steps), (False, True)):
        micro_batch.is_last = is_last
        own = hops.begin(hops.unit.whole, values(fraction, NODES, RANKS_PER_NODE))
        yield rounded(within.format, within.send(own))
        if not is_last:
            hops.keep(GradientSum(torch.zeros(NODES, NUMEL)))  # as if the node's ranks had sent nothing
            continue
        yield rounded(between.format, between.send(hops.with_kept(GradientSum(values(fraction, NODES)))))
        hops.sent()


def weight_draws(config: ZeroPPConfig, unit: str, rank: int, versions: int, fraction: float) -> Iterator[Tensor]:
    """Of every wire that a rank sends of some versions of its parameters."""
    layout = RankLayout(NODES, RANKS_PER_NODE, rank)
    matrix = OneMatrix(unit, (ParameterShard("weight", NUMEL, True),))
    encoder = WeightEncoder(matrix, NODES, Shared(config))
    for _ in range(versions):
        encoder.versions += 1
        format = encoder.formats.weights(matrix.whole, torch.float32)
        yield rounded(format, encoder.encode(values(fraction), format, rank).unsqueeze(0))
        if layout.node == 0:  # the other nodes send the same
            partition = encoder.encode_within_node(values(fraction, NODES), format, layout.local_rank)
            yield rounded(format, partition)


def all_draws(fraction: float, config: ZeroPPConfig = CONFIG, steps: int = 2) -> Tensor:
    """[draws, elements] of two units on all ranks."""
    draws = [
        draw
        for of_kind in (gradient_draws, weight_draws)
        for unit in ("layers.0", "layers.1")
        for rank in range(NODES * RANKS_PER_NODE)
        for draw in of_kind(config, unit, rank, steps, fraction)
    ]
    return torch.cat(draws)


def test_no_two_wires_share_their_noise():
    """Over seeds, kinds, hops, units, ranks, steps, micro-batches, pieces and elements, correlations are chance."""
    signs = torch.cat([all_draws(0.5), all_draws(0.5, replace(CONFIG, seed=1), steps=1)]) * 2 - 1  # +-1
    assert (signs.abs() == 1).all()
    draws, elements = signs.shape
    assert draws > 150
    chance = 5.5 / math.sqrt(elements)
    correlation = signs @ signs.T / elements
    assert (correlation - torch.eye(draws)).abs().max() < chance
    for lag in (1, 2, 3, 8, BLOCK - 1, elements // 2):  # an element and those after it
        shifted = signs @ signs.roll(lag, 1).T / elements
        assert shifted.abs().max() < chance, lag


@pytest.mark.parametrize("fraction", [0.125, 0.5, 0.9])
def test_rounding_is_unbiased(fraction):
    """The mean of n roundings of a value is the value, off by sqrt(f (1 - f) / n)."""
    for draws in (all_draws(fraction), -all_draws(-fraction)):
        assert ((draws == 0) | (draws == 1)).all()
        for n in (1, 4, 16, 64):
            error = draws[: len(draws) // n * n].unflatten(0, (-1, n)).mean(1) - fraction
            expected = math.sqrt(fraction * (1 - fraction) / n)
            assert error.square().mean().sqrt().item() == pytest.approx(expected, rel=0.03), n
            assert abs(error.mean().item()) < 5 * math.sqrt(fraction * (1 - fraction) / draws.numel())


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31, 2**32 - 1])
def test_the_generator_is_that_of_the_oracle(seed):
    assert counter_uniform(5000, seed, torch.device("cpu")).equal(oracle.uniform(seed, 5000))
