"""The monitor's statistics equal the oracle's quantizer's on the same gradients, over all ranks."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.fsdp.monitor import gather_samples, record_error
from tests.ranks import run_in_turn
from tests.zeropp.fsdp_model import build, coefficients, local_gradients, parameters_of, shards_of
from tests.zeropp.oracle import Hop

RANKS, NODES, BLOCK, STEPS, BETA = 4, 2, 32, 2, 0.75
CONFIG = ZeroPPConfig(
    quantized_weights=True,
    hpz_partition_size=RANKS // NODES,
    quantized_gradients=True,
    gradient_bits=3,
    gradient_intra_bits=6,
    gradient_block_size=BLOCK,
    loco=LoCoConfig(beta=BETA, error_dtype="fp32", hops="both"),
)


def _train(every):
    """Two steps: what the monitor says of each, and the last one's gradients."""
    model, zeropp = build(CONFIG)
    zeropp.monitor_errors(every)
    statistics = []
    for step in range(STEPS):
        model.zero_grad()
        model(coefficients(dist.get_rank(), step)).backward()
        statistics.append(zeropp.quantization_errors())
    return statistics, local_gradients(model, RANKS)


def _samples_of_one_stage():
    """What ranks of a pipeline read when only one of them has sampled."""
    alone = SimpleNamespace(group=dist.new_group([dist.get_rank()], use_local_synchronization=True))
    unit = SimpleNamespace(name="layer", topology=alone, samples={})
    if dist.get_rank() == 1:
        record_error(unit, "gradients/inter", torch.full((2,), 2.0), torch.full((2,), 3.0))
    return gather_samples([unit], pipeline=dist.group.WORLD, tensor_parallel=None)


def test_a_stage_without_samples_reads_those_of_others(found):
    assert found["one stage"] == [{"error/gradients/inter": 0.5, "error/gradients/inter/layer": 0.5}] * RANKS


@pytest.fixture(scope="module")
def found():
    functions = {f"every {every}": functools.partial(_train, every) for every in (1, 3, None)}
    return run_in_turn(
        RANKS,
        functions | {"one stage": _samples_of_one_stage, "poisoned": _with_an_infinite_gradient_and_a_block_of_zeros},
    )


def rms_ratio(numerators, denominators) -> float:
    def square(tensors):
        return sum(tensor.double().square().sum().item() for tensor in tensors)

    return math.sqrt(square(numerators) / square(denominators))


def share_of_largest(hop: Hop, shards: list[Tensor]) -> float:
    """Codes of the two outermost levels over all of the quantized parameters' blocks, for shards [..., L]."""
    largest = total = 0
    for each in shards:
        _, levels = hop.transmit_levels(each, None)
        largest += int((levels.abs() >= 2 ** (hop.bits - 1) - 1).sum())
        total += sum(BLOCK * int((~levels[..., block.start].isnan()).sum()) for block in hop.blocks())
    return largest / total


def expected() -> dict[str, float]:
    """Statistics of the second step, from the formulas: h = g + e, sent = Q(h), e <- beta e + (1 - beta)(h - sent)."""
    parameters = parameters_of(RANKS)
    hops = {name: Hop(parameters, bits, BLOCK, torch.float32) for name, bits in (("intra", 6), ("inter", 3))}
    errors: dict[tuple[str, int], Tensor | float] = {}
    numel = sum(parameter.numel for parameter in parameters)
    for step in range(STEPS):
        gradients = {"intra": {}, "inter": {}}
        for rank in range(RANKS):
            shards = shards_of(coefficients(rank, step), RANKS).view(NODES, -1, numel)
            gradients["intra"][rank] = shards.transpose(0, 1)  # [P, N, L]
        before, compensated, sent = {}, {"intra": {}, "inter": {}}, {"intra": {}, "inter": {}}
        for name, hop in hops.items():
            for rank in range(RANKS):
                if name == "inter":
                    node, local_rank = divmod(rank, RANKS // NODES)
                    peers = range(node * RANKS // NODES, (node + 1) * RANKS // NODES)
                    gradients["inter"][rank] = sum(sent["intra"][peer][local_rank] for peer in peers)  # [N, L]
                before[name, rank] = errors.get((name, rank), torch.zeros(()))
                compensated[name][rank] = gradients[name][rank] + before[name, rank]
                sent[name][rank] = hop.transmit_all(compensated[name][rank], None)
                lost = compensated[name][rank] - sent[name][rank]
                errors[name, rank] = BETA * before[name, rank] + (1 - BETA) * lost
    values = {}
    for name, hop in hops.items():
        g = [gradients[name][rank] for rank in range(RANKS)]
        values[f"error/gradients/{name}"] = rms_ratio([sent[name][r] - g[r] for r in range(RANKS)], g)
        values[f"error-state/gradients/{name}"] = rms_ratio([before[name, r] for r in range(RANKS)], g)
        values[f"largest-codes/gradients/{name}"] = share_of_largest(hop, list(compensated[name].values()))
        values[f"nonfinite-blocks/gradients/{name}"] = 0
    return values


def test_statistics_are_those_of_the_formulas(found):
    statistics = [of_rank[0] for of_rank in found["every 1"]]
    assert all(of_rank == statistics[0] for of_rank in statistics)  # they are of all ranks together
    first, second = statistics[0]
    assert first["error-state/gradients/inter"] == first["error-state/gradients/intra"] == 0  # nothing to add yet
    for name, value in expected().items():
        assert second[name] == second[f"{name}/root"] == pytest.approx(value, rel=1e-5), name
    assert 1e-3 < second["error/weights"] < 1e-2
    assert 1 / 256 <= second["largest-codes/weights"] < 1.2 / 256  # a shard of 148 elements is a block, too


def test_steps_in_between_are_not_sampled_and_nothing_depends_on_sampling(found):
    (first, second), _ = found["every 3"][0]
    assert first and second == {}
    for (statistics, never), (_, always) in zip(found["every None"], found["every 1"], strict=True):
        assert statistics == [{}, {}]
        assert torch.equal(never, always)


def _with_an_infinite_gradient_and_a_block_of_zeros():
    model, zeropp = build(CONFIG)
    zeropp.monitor_errors(1)
    chosen = coefficients(dist.get_rank())
    chosen[2].zero_()
    chosen[2][0, 0] = math.inf if dist.get_rank() == 3 else 0
    model(chosen).backward()
    return zeropp.quantization_errors()


def test_blocks_with_an_inf_are_counted_and_zeros_are_not_saturated(found):
    statistics = found["poisoned"][0]
    assert statistics["nonfinite-blocks/gradients/intra"] == 1
    assert statistics["nonfinite-blocks/gradients/inter"] == 1  # in the sum of one node
    assert statistics["nonfinite-blocks/weights"] == 0
    assert math.isnan(statistics["error/gradients/inter"])
    assert 1 / BLOCK < statistics["largest-codes/gradients/inter"] < 1  # neither NaN nor zeros count
