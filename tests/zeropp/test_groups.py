"""A model whose units are sharded over different groups of ranks, as experts are: each unit goes by its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp
from tests.ranks import run_ranks
from tests.zeropp import oracle
from tests.zeropp.fsdp_model import (
    CapturedWarnings,
    ChosenGradients,
    coefficients,
    gathered,
    local_gradients,
    own_state,
    parameters_of,
    shards_of,
)

HIERARCHY_ONLY = ZeroPPConfig(
    hpz_partition_size=2, quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None
)
ALL_FLAGS = ZeroPPConfig(
    True, 2, True, LoCoConfig(hops="both"), weight_block_size=32, gradient_block_size=32, gradient_bits=3
)
RANKS, STEPS = 4, 3
PAIRS = ((0, 1), (2, 3))  # the groups of the second unit; the first one is on all ranks, two nodes of two


def meshes():
    """All four ranks, and this rank's pair."""
    return init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))["rank"]


class MixedGroups(nn.Module):
    """Blocks on all ranks and on pairs in turn; what belongs to no block is on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 36), nn.GELU(), nn.Linear(36, 24)) for _ in range(4))
        self.head = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _train(config):
    everyone, pair = meshes()
    model = MixedGroups()
    for i, block in enumerate(model.blocks):
        fully_shard(block, mesh=pair if i % 2 else everyone)
    fully_shard(model, mesh=everyone)
    zeropp = apply_zeropp(model, config) if config is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(6):
        for i in range(2):
            if zeropp is not None:
                zeropp.set_is_last_micro_batch(i == 1)
            loss = model(torch.randn(8, 24, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, zeropp.describe() if zeropp is not None else None


def test_without_quantization_training_equals_fsdp2():
    plain, ours = run_ranks(RANKS, _train, None), run_ranks(RANKS, _train, HIERARCHY_ONLY)
    for (expected, _), (losses, described) in zip(plain, ours, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        everyone, pair = described.splitlines()
        assert everyone.startswith("2 nodes of 2 ranks; ") and everyone.endswith("(3 units)")
        assert pair.startswith("1 node of 2 ranks; ") and pair.endswith("(2 units)")


def build():
    everyone, pair = meshes()
    model = nn.ModuleDict({"all": ChosenGradients(), "pair": ChosenGradients()})
    fully_shard(model["all"], mesh=everyone)
    fully_shard(model["pair"], mesh=pair)
    return model, apply_zeropp(model, ALL_FLAGS)


def _quantized():
    """By unit: weights as they are gathered [W, L], and this rank's gradients [L] of each step."""
    with CapturedWarnings() as warnings:
        model, zeropp = build()
    zeropp.monitor_errors(1)
    seen = {}
    for unit, of_unit in model.items():
        weights = shards_of(gathered(of_unit), size_of(unit))
        gradients = []
        for step in range(STEPS):
            of_unit(coefficients(dist.get_rank(), step)).backward()
            gradients.append(local_gradients(of_unit, size_of(unit)))
            of_unit.zero_grad()
        seen[unit] = (weights, gradients)
    state, keys = zeropp.state_dict(), sorted(own_state(zeropp))
    model, again = build()
    again.load_state_dict(state)
    assert all(value.equal(again.state_dict()[name]) for name, value in state.items())
    return seen, zeropp.quantization_errors(), keys, warnings.messages


def size_of(unit: str) -> int:
    return RANKS if unit == "all" else 2


@pytest.fixture(scope="module")
def quantized():
    return run_ranks(RANKS, _quantized)


@pytest.mark.parametrize("unit, groups", [("all", [range(RANKS)]), ("pair", PAIRS)])
def test_each_unit_equals_the_oracle_of_its_group(quantized, unit, groups):
    size = size_of(unit)
    padding = shards_of([torch.ones_like(c) for c in coefficients(0)], size)
    shards = shards_of([p.detach() for p in ChosenGradients().weights], size)
    parameters, num_nodes = parameters_of(size), size // 2
    weights = oracle.all_gather(shards, ALL_FLAGS, num_nodes, parameters, oracle.WeightState()) * padding
    for group in groups:
        state = oracle.GradientState()
        for step in range(STEPS):
            gradients = [shards_of(coefficients(rank, step), size) for rank in group]
            totals = oracle.reduce_scatter([gradients], ALL_FLAGS, num_nodes, parameters, state, unit)
            for local, rank in enumerate(group):
                seen, reduced = quantized[rank][0][unit]
                assert seen.equal(weights)
                assert reduced[step].equal(totals[local] / size * padding[local]), (rank, step)


def test_statistics_are_of_each_units_own_ranks(quantized):
    statistics = [of_rank[1] for of_rank in quantized]
    everyone, pair = "error/gradients/intra/all", "error/gradients/intra/pair"
    assert len({of_rank[everyone] for of_rank in statistics}) == 1
    first, second = ({statistics[rank][pair] for rank in ranks} for ranks in PAIRS)
    assert len(first) == len(second) == 1 and first != second  # other gradients on the other pair
    assert all("error/gradients/inter/all" in s and "error/gradients/inter/pair" not in s for s in statistics)


def test_state_and_warnings_are_of_each_unit(quantized):
    for rank, (_, _, state, warnings) in enumerate(quantized):
        assert "gradients/all/inter.error" in state and "gradients/pair/inter.error" not in state
        assert "gradients/pair/intra.error" in state
        if rank > 0:
            assert warnings == []
    hpz, small = quantized[0][3]
    assert "2 data-parallel ranks on one node" in hpz and "hpZ" in hpz
    assert small.startswith("matrices of all travel unquantized")  # a pair's ranks hold 32 elements or more
