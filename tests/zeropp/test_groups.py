"""A model whose units are sharded over different groups of ranks, as experts are: each unit goes by its own."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from megatron_zpp.zeropp import LoCoConfig, apply_zeropp
from tests.ranks import run_in_turn
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
from tests.zeropp.training_on_ranks import ALL_FLAGS as DEFAULTS
from tests.zeropp.training_on_ranks import HIERARCHY_ONLY, Net, train

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
except ImportError:  # torch 2.11
    ShardPlacementResult = None
needs_meshes_of_parameters = pytest.mark.skipif(
    ShardPlacementResult is None, reason="this torch's FSDP2 has one mesh for all parameters of a module"
)

STOCHASTIC = dict(weight_rounding="stochastic", gradient_rounding="stochastic")  # each unit draws numbers of its own
ALL_FLAGS = replace(DEFAULTS, loco=LoCoConfig(hops="both"), gradient_bits=3, **STOCHASTIC)
RANKS, STEPS = 4, 3
PAIRS = ((0, 1), (2, 3))  # the groups of the second unit; the first one is on all ranks, two nodes of two


def meshes():
    """All four ranks, and this rank's pair."""
    return init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))["rank"]


def by_parameter(model):
    """As torchtitan's expert parallelism: some parameters of a block on strided pairs, along another dimension."""
    everyone = init_device_mesh("cpu", (RANKS,))
    strided = FSDPMeshInfo(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))["node"], shard_mesh_dim=0)
    experts = set(model.blocks[1][2].parameters())

    def place(parameter):
        if parameter in experts:
            return ShardPlacementResult(placement=Shard(parameter.ndim - 1), mesh_info=strided)
        return None

    for module in (*model.blocks, model):
        fully_shard(module, mesh=everyone, shard_placement_fn=place)


def _train(config):
    """Losses, what is said of the ranks, the bytes that this rank sends between nodes in each step, and unit names."""
    model = Net(num_blocks=2)
    by_parameter(model)
    zeropp = apply_zeropp(model, config) if config is not None else None
    generator = torch.Generator().manual_seed(dist.get_rank())
    trained = train(model, zeropp, lambda *_: model(torch.randn(8, 24, generator=generator)).square().mean(), STEPS, 2)
    if zeropp is None:
        return trained.losses
    units = sorted({key.split("/")[1] for key in own_state(zeropp) if key.startswith("gradients/")})
    return trained.losses, zeropp.describe().splitlines(), trained.between_nodes, units


@pytest.fixture(scope="module")
def found():
    functions = {"oracle": _quantized}
    if ShardPlacementResult is not None:
        configs = {"plain": None, "ours": HIERARCHY_ONLY, "quantized": replace(DEFAULTS, weight_moves=True)}
        functions |= {name: partial(_train, config) for name, config in configs.items()}
    return run_in_turn(RANKS, functions)


@needs_meshes_of_parameters
def test_parameters_of_one_module_on_several_meshes_train_as_under_fsdp2(found):
    model = Net(num_blocks=2)
    units = {model.blocks[1][2]: 2, model.blocks[0]: 4, model.blocks[1][0]: 4, model.head: 4}  # and their ranks
    shards = [sum(p.numel() for p in unit.parameters()) // ranks for unit, ranks in units.items()]
    of_ranks = zip(found["plain"], found["ours"], strict=True)
    for expected, (losses, (everyone, strided), sent, _) in of_ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert everyone.startswith("2 nodes of 2 ranks; ") and everyone.endswith("(3 units)")
        assert strided.startswith("2 nodes of 1 rank; ") and strided.endswith("(1 unit)")
        # A shard of the weights and one of the gradients to the other node, of 4 bytes an element in steps of 16 bytes.
        assert sent == [2 * sum(-(-4 * numel // 16) * 16 for numel in shards)] * STEPS


@needs_meshes_of_parameters
def test_quantized_units_of_one_module_have_names_and_states_of_their_own(found):
    of_ranks = zip(found["plain"], found["quantized"], strict=True)
    for expected, (losses, _, _, units) in of_ranks:
        assert losses == pytest.approx(expected, rel=0.05) and losses != expected
        assert units == ["blocks.0", "blocks.1", "blocks.1[1]", "root"]


def build():
    everyone, pair = meshes()
    model = nn.ModuleDict({"all": ChosenGradients(), "pair": ChosenGradients()})
    fully_shard(model["all"], mesh=everyone)
    fully_shard(model["pair"], mesh=pair)
    return model, apply_zeropp(model, ALL_FLAGS)


def _quantized():
    """Return by unit the weights as they are gathered [W, L], and this rank's gradients [L] of each step."""
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
def quantized(found):
    return found["oracle"]


@pytest.mark.parametrize("unit, groups", [("all", [range(RANKS)]), ("pair", PAIRS)])
def test_each_unit_equals_the_oracle_of_its_group(quantized, unit, groups):
    size = size_of(unit)
    padding = shards_of([torch.ones_like(c) for c in coefficients(0)], size)
    shards = shards_of([p.detach() for p in ChosenGradients().weights], size)
    parameters, num_nodes = parameters_of(size), size // 2
    weights = oracle.all_gather(shards, ALL_FLAGS, num_nodes, parameters, oracle.WeightState(), unit) * padding
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
    assert small.startswith("matrices of all are sent unquantized")  # a pair's ranks hold 32 elements or more
