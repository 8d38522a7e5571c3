"""The collectives under FSDP2's real hooks, on real gloo ranks, equal the oracle bit for bit."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.config import SUPPORTED_BITS
from tests.ranks import run_ranks
from tests.zeropp import oracle
from tests.zeropp.fsdp_model import (
    ChosenGradients,
    build,
    coefficients,
    gathered,
    local_gradients,
    parameters_of,
    shards_of,
)
from tests.zeropp.training_on_ranks import micro_batches

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3, 6])  # 6: with each number of ranks in a node
DTYPES = [torch.float32, torch.bfloat16]
ALL_DTYPES = [*DTYPES, torch.float16]
ALL_BITS = [*SUPPORTED_BITS, None]
BLOCKS = [32, 128, 256, None]


def divisors(n):
    return [p for p in range(1, n + 1) if n % p == 0]


def covering(*axes):
    """About 20 cases in which every value of every axis occurs with several of the others: the grid, thinned."""
    grid = list(itertools.product(*axes))
    return grid[:: next(n for n in itertools.count(len(grid) // 20) if math.gcd(n, len(grid)) == 1)]


@dataclass(frozen=True)
class Case:
    """One setting on ``num_nodes`` nodes, over some versions of the parameters or some optimizer steps."""

    config: ZeroPPConfig
    num_nodes: int
    dtype: torch.dtype
    num_steps: int = 1
    num_micro_batches: int = 1


class Growth(torch.optim.Optimizer):
    """Lets parameters grow by 1 %; needs no gradients."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1.01)


def _gather_on_ranks(cases):
    """Return for each case and version of the parameters what a forward pass sees on this rank, as [W, L]."""
    world_size = dist.get_world_size()
    seen = []
    for case in cases:
        model, _ = build(case.config, case.dtype)
        optimizer = Growth(model.parameters(), {})
        for _ in range(case.num_steps):
            first, again = gathered(model), gathered(model)  # as in forward and backward
            assert all(a.equal(b) for a, b in zip(first, again, strict=True)), f"two gathers differ: {case}"
            seen.append(shards_of([p.to(case.dtype) for p in first], world_size))
            optimizer.step()
    return seen


def _reduce_on_ranks(cases):
    """Return this rank's reduced gradients [L] for each case and optimizer step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reduced = []
    for case in cases:
        model, zeropp = build(case.config, case.dtype)
        for step in range(case.num_steps):
            for i in micro_batches(zeropp, case.num_micro_batches):
                model(coefficients(rank, step * case.num_micro_batches + i)).backward()
            reduced.append(local_gradients(model, world_size))
            model.zero_grad()
    return reduced


def check_all_gather(world_size, cases):
    seen = run_ranks(world_size, _gather_on_ranks, cases)
    step = iter(range(len(seen[0])))
    for case in cases:
        master = [p.detach() for p in ChosenGradients().weights]
        state = oracle.WeightState()
        for version in range(case.num_steps):
            shards = shards_of([p.to(case.dtype) for p in master], world_size)
            expected = oracle.all_gather(shards, case.config, case.num_nodes, parameters_of(world_size), state)
            expected *= padding_mask(world_size)
            index = next(step)
            for rank in range(world_size):
                assert seen[rank][index].equal(expected), f"rank {rank}, version {version}, {case}"
            for p in master:
                p.mul_(1.01)


def check_reduce_scatter(world_size, cases):
    reduced = run_ranks(world_size, _reduce_on_ranks, cases)
    index, ranks = iter(range(len(reduced[0]))), range(world_size)
    for case in cases:
        state = oracle.GradientState()
        for step in range(case.num_steps):
            draws = [step * case.num_micro_batches + i for i in range(case.num_micro_batches)]
            before, after = division(case.dtype, world_size)
            gradients = [
                [shards_of([c.to(case.dtype) for c in coefficients(r, draw)], world_size) / before for r in ranks]
                for draw in draws
            ]
            totals = oracle.reduce_scatter(gradients, case.config, case.num_nodes, parameters_of(world_size), state)
            i = next(index)
            for rank, total in enumerate(totals):
                # The mean is taken in fp32, and not rounded to what FSDP2 reduces in.
                expected = total / after * padding_mask(world_size)[rank]
                assert reduced[rank][i].equal(expected), f"rank {rank}, step {step}, {case}"


def division(dtype, world_size):
    """What FSDP2 divides by before and after the reduction: for fp16 about the root of W each, against overflow."""
    before = 1
    while dtype == torch.float16 and world_size % before == 0 and world_size / before > before:
        before *= 2
    return before, world_size / before


def padding_mask(world_size):
    """[W, L]: 0 where FSDP2 pads. It drops these values, into which a rotation may spread quantization errors."""
    return shards_of([torch.ones_like(c) for c in coefficients(0)], world_size)


@WORLD_SIZES
def test_all_gather_equals_the_oracle(world_size):
    cases = []
    for ranks_per_node, bits, intra_bits, block, dtype in covering(
        divisors(world_size), ALL_BITS[1:], [None, 8], BLOCKS, ALL_DTYPES
    ):
        config = ZeroPPConfig(
            quantized_weights=bits is not None,
            hpz_partition_size=ranks_per_node,
            weight_bits=bits,
            weight_scaling="mean" if bits == 1 else "absmax",
            weight_intra_bits=intra_bits if ranks_per_node > 1 else None,
            weight_block_size=block,
        )
        cases.append(Case(config, world_size // ranks_per_node, dtype))
    check_all_gather(world_size, cases)


@WORLD_SIZES
def test_reduce_scatter_equals_the_oracle(world_size):
    cases = []
    for ranks_per_node, bits, intra_bits, block, dtype, num_micro_batches in covering(
        divisors(world_size), ALL_BITS, [None, 4, 8], BLOCKS, ALL_DTYPES, [1, 3]
    ):
        config = ZeroPPConfig(
            quantized_gradients=True,
            ranks_per_node=ranks_per_node,
            gradient_bits=bits,
            gradient_intra_bits=intra_bits,
            gradient_block_size=32 if bits == 1 else block,
        )
        cases.append(Case(config, world_size // ranks_per_node, dtype, num_micro_batches=num_micro_batches))
    check_reduce_scatter(world_size, cases)


WEIGHT_OPTIONS = {
    "int8 secondary partition": dict(quantized_weights=True, hpz_secondary_dtype="int8"),
    "2-bit weights, int8 secondary partition": dict(
        quantized_weights=True, weight_bits=2, hpz_secondary_dtype="int8", scale_dtype="bf16"
    ),
    "4-bit weights by mean": dict(quantized_weights=True, weight_bits=4, weight_scaling="mean"),
    "moved codes": dict(quantized_weights=True, weight_moves=True, weight_block_size=64),
    "moved 4-bit codes, short scales": dict(
        quantized_weights=True, weight_bits=4, weight_moves=True, scale_dtype="bf16", hpz_secondary_dtype="int8"
    ),
    "moved bits": dict(weight_moves=True),
    "by mean within a node, short scales": dict(
        weight_intra_bits=3, weight_intra_scaling="mean", quantized_weights=True, scale_dtype="bf16"
    ),
    "stochastic": dict(quantized_weights=True, weight_bits=4, weight_rounding="stochastic"),
    "stochastic on both hops": dict(
        quantized_weights=True, weight_bits=6, weight_intra_bits=4, weight_rounding="stochastic", seed=5
    ),
}


def test_weight_options_equal_the_oracle_over_versions():
    configs = [ZeroPPConfig(hpz_partition_size=2, **options) for options in WEIGHT_OPTIONS.values()]
    cases = [Case(config, 2, DTYPES[i % 2], num_steps=4) for i, config in enumerate(configs)]
    flat = ZeroPPConfig(quantized_weights=True, weight_bits=4, weight_rounding="stochastic")
    check_all_gather(4, [*cases, Case(flat, 1, torch.float32, num_steps=3)])


GRADIENT_OPTIONS = {
    "loco": dict(loco=LoCoConfig()),
    "error feedback with hard resets": dict(loco=LoCoConfig(beta=0.0, reset_interval=2)),
    "loco on both hops": dict(loco=LoCoConfig(hops="both", reset_interval=2), gradient_intra_bits=4),
    "loco with decay, bf16 error": dict(loco=LoCoConfig(reset="decay", reset_interval=10, error_dtype="bf16")),
    "loco on both hops with decay": dict(
        loco=LoCoConfig(hops="both", reset="decay", reset_interval=3), gradient_intra_bits=4
    ),
    "stochastic": dict(gradient_rounding="stochastic", loco=LoCoConfig()),
    "more bits at first": dict(loco=LoCoConfig(), gradient_scaling="absmax", gradient_bits_warmup="2:3"),
    "absmax codes, short scales": dict(
        loco=LoCoConfig(),
        gradient_scaling="absmax",
        gradient_intra_bits=4,
        gradient_intra_scaling="mean",
        scale_dtype="bf16",
    ),
    "scales of elements": dict(gradient_element_scales=True, loco=LoCoConfig()),
    "scales of elements, 4 bits, no feedback": dict(
        gradient_element_scales=True, gradient_bits=4, gradient_rounding="stochastic"
    ),
    "scales of elements, absmax, one scale": dict(
        gradient_element_scales=True,
        gradient_scaling="absmax",
        gradient_block_size=None,
        loco=LoCoConfig(error_dtype="bf16", reset="decay", reset_interval=10),
    ),
    "1 bit, scales of elements": dict(
        gradient_bits=1, gradient_element_scales=True, gradient_bits_warmup="1:4", loco=LoCoConfig(), scale_dtype="bf16"
    ),
    "1 bit on both hops": dict(
        gradient_bits=1, gradient_intra_bits=1, gradient_block_size=64, loco=LoCoConfig(hops="both")
    ),
    "everything": dict(hadamard=True, gradient_rounding="stochastic", loco=LoCoConfig(hops="both"), seed=3),
}


def test_gradient_options_equal_the_oracle_over_steps():
    cases = []
    for i, options in enumerate(GRADIENT_OPTIONS.values()):
        low_bit = dict(gradient_bits=2, gradient_block_size=32) | options
        config = ZeroPPConfig(quantized_gradients=True, ranks_per_node=2, **low_bit)
        cases.append(Case(config, 2, DTYPES[i % 2], num_steps=3, num_micro_batches=2))
    check_reduce_scatter(4, cases)


SUM_OPTIONS = {
    "int8 with everything": dict(gradient_sum_dtype="int8", **GRADIENT_OPTIONS["everything"]),
    "bf16, decaying LoCo": dict(
        gradient_sum_dtype="bf16", offload="all", **GRADIENT_OPTIONS["loco on both hops with decay"]
    ),
    "int8 of what came unquantized": dict(gradient_sum_dtype="int8", gradient_intra_bits=None, loco=LoCoConfig()),
    "one scale": dict(gradient_sum_dtype="int8", gradient_block_size=None, offload="sums"),
}


@pytest.mark.parametrize("world_size, ranks_per_node", [(4, 2), (3, 1)])
def test_sums_between_micro_batches_equal_the_oracle(world_size, ranks_per_node):
    cases = []
    for options in list(SUM_OPTIONS.values())[:: 1 if ranks_per_node > 1 else 3]:
        low_bit = dict(gradient_block_size=32) | options
        config = ZeroPPConfig(quantized_gradients=True, ranks_per_node=ranks_per_node, **low_bit)
        cases.append(Case(config, world_size // ranks_per_node, torch.bfloat16, num_steps=2, num_micro_batches=3))
    check_reduce_scatter(world_size, cases)


def _constant_gradients(value):
    config = ZeroPPConfig(
        quantized_gradients=True,
        ranks_per_node=2,
        gradient_bits=2,
        gradient_scaling="absmax",
        gradient_intra_bits=3,
        gradient_intra_scaling="absmax",
    )
    model, _ = build(config)
    model([torch.full_like(c, value) for c in coefficients(0)]).backward()
    return [p.grad.full_tensor() for p in model.weights]


def _poisoned_gradient(poison):
    rank = dist.get_rank()
    model, _ = build(ZeroPPConfig(quantized_gradients=True, ranks_per_node=2, gradient_block_size=32))
    chosen = coefficients(rank)
    if rank == 3:
        chosen[2][10, 3] = poison
    model(chosen).backward()
    return [p.grad.full_tensor() for p in model.weights]


def _scaled(factor):
    model, _ = build(ZeroPPConfig(quantized_gradients=True, ranks_per_node=2, gradient_bits=8))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model([torch.ones_like(c) for c in coefficients(0)]).backward()
    return model.weights[0].grad.full_tensor().mean().item()


def _by_value():
    """Gradients: constant ones, those with a NaN or an Inf, and the mean for each divide factor."""
    constant = {value: _constant_gradients(value) for value in (1.0, -1.0)}
    poisoned = [_poisoned_gradient(poison) for poison in (torch.nan, torch.inf)]
    return constant, poisoned, [_scaled(factor) for factor in (None, 1.0, 10.0)]


def test_gradients_keep_their_size_and_nan_and_inf_reach_the_owner():
    """DeepSpeed's qgZ returned 1.53 and -2 for constant gradients of 1 and -1."""
    for constant, poisoned, means in run_ranks(4, _by_value):
        for value, gradients in constant.items():
            for gradient in gradients:
                torch.testing.assert_close(gradient, torch.full_like(gradient, value), rtol=1e-6, atol=0)
        for gradients in poisoned:
            assert not gradients[2][10, 3].isfinite()
            assert all(gradient.isfinite().all() for i, gradient in enumerate(gradients) if i != 2)
        assert means == pytest.approx([1.0, 4.0, 0.4], rel=1e-6)  # divided as FSDP2 is asked to
