"""The collectives under FSDP2's real hooks, on real gloo ranks, equal the oracle bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, oracle
from megatron_zpp.zeropp.oracle import Hop
from tests.ranks import run_ranks
from tests.zeropp.fsdp_model import (
    ChosenGradients,
    build,
    coefficients,
    gathered,
    local_gradients,
    parameters_of,
    shards_of,
)

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
DTYPES = [torch.float32, torch.bfloat16]
ALL_BITS = [2, 3, 4, 6, 8, None]
BLOCKS = [32, 128, 256, None]


def divisors(n):
    return [p for p in range(1, n + 1) if n % p == 0]


def covering(*axes):
    """Cases in which every value of every axis occurs with several of the others: the grid, thinned."""
    grid = list(itertools.product(*axes))
    return grid if len(grid) <= 24 else grid[:: len(grid) // 24 | 1]


def _all_gather_grid():
    """Rank 0 returns the first case in which what a forward pass sees differs from the oracle."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = parameters_of(world_size)
    master = [p.detach() for p in ChosenGradients().weights]
    for ranks_per_node, bits, intra_bits, block, dtype in covering(
        divisors(world_size), ALL_BITS, [None, 8], BLOCKS, DTYPES
    ):
        hpz = ranks_per_node > 1
        config = ZeroPPConfig(
            quantized_weights=bits is not None,
            hpz_partition_size=ranks_per_node,
            weight_bits=bits,
            weight_intra_bits=intra_bits if hpz else None,
            weight_block_size=block,
        )
        model, _ = build(config, dtype)
        shards = shards_of([p.to(dtype) for p in master], world_size)
        inter = Hop(bits, block, dtype)
        intra = Hop(config.weight_intra_bits, block, dtype)
        if hpz and ranks_per_node == world_size:  # one node: no hop between nodes and so no secondary partition
            intra = None
        expected = oracle.all_gather(shards, parameters, inter, intra if hpz else None)
        got = shards_of([p.to(dtype) for p in gathered(model)], world_size)
        # FSDP2 leaves its padding out of what it hands on; the oracle keeps it as the zeros that were sent.
        if not got.equal(expected):
            return f"rank {rank}: P={ranks_per_node} {config} {dtype}: {(got.float() - expected.float()).abs().max()}"
    return None


def _reduce_scatter_grid():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = parameters_of(world_size)
    for ranks_per_node, bits, intra_bits, block, dtype, num_micro_batches in covering(
        divisors(world_size), ALL_BITS, [None, 4, 8], BLOCKS, DTYPES, [1, 3]
    ):
        config = ZeroPPConfig(
            quantized_gradients=True,
            ranks_per_node=ranks_per_node,
            gradient_bits=bits,
            gradient_intra_bits=intra_bits,
            gradient_block_size=block,
        )
        model, zeropp = build(config, dtype)
        for i in range(num_micro_batches):
            zeropp.set_is_last_micro_batch(i == num_micro_batches - 1)
            model(coefficients(rank, i)).backward()
        micro_batches = [
            [shards_of([c.to(dtype) for c in coefficients(r, i)], world_size) for r in range(world_size)]
            for i in range(num_micro_batches)
        ]
        totals = oracle.reduce_scatter(
            micro_batches, ranks_per_node, parameters, Hop(intra_bits, block, dtype), Hop(bits, block, dtype)
        )
        expected = (totals[rank] / world_size).to(dtype).float()
        if not local_gradients(model, world_size).equal(expected):
            return f"rank {rank}: P={ranks_per_node} {config} {dtype} {num_micro_batches} micro-batches"
    return None


@WORLD_SIZES
def test_all_gather_equals_the_oracle(world_size):
    assert run_ranks(world_size, _all_gather_grid) == [None] * world_size


@WORLD_SIZES
def test_reduce_scatter_equals_the_oracle(world_size):
    assert run_ranks(world_size, _reduce_scatter_grid) == [None] * world_size


def _constant_gradients(value):
    model, _ = build(ZeroPPConfig(quantized_gradients=True, ranks_per_node=2, gradient_bits=2, gradient_intra_bits=3))
    model([torch.full_like(c, value) for c in coefficients(0)]).backward()
    return [p.grad.full_tensor() for p in model.weights]


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_a_constant_gradient_keeps_its_scale_over_both_hops(value):
    """DeepSpeed's qgZ returned 1.53 and -2 here."""
    for gradient in run_ranks(4, _constant_gradients, value)[0]:
        torch.testing.assert_close(gradient, torch.full_like(gradient, value), rtol=1e-6, atol=0)


def _poisoned_gradient(poison):
    rank = dist.get_rank()
    model, _ = build(ZeroPPConfig(quantized_gradients=True, ranks_per_node=2, gradient_block_size=32))
    chosen = coefficients(rank)
    if rank == 3:
        chosen[2][10, 3] = poison
    model(chosen).backward()
    return [p.grad.full_tensor() for p in model.weights]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_inf_of_one_rank_reach_the_owner(poison):
    gradients = run_ranks(4, _poisoned_gradient, poison)[0]
    assert not gradients[2][10, 3].isfinite()
    assert all(gradient.isfinite().all() for i, gradient in enumerate(gradients) if i != 2)


def _scaled(factor):
    model, _ = build(ZeroPPConfig(quantized_gradients=True, ranks_per_node=2, gradient_bits=8))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model([torch.ones_like(c) for c in coefficients(0)]).backward()
    return model.weights[0].grad.full_tensor().mean().item()


@pytest.mark.parametrize("factor, expected", [(None, 1.0), (1.0, 4.0), (10.0, 0.4)])
def test_division_is_what_fsdp_asks_for(factor, expected):
    assert run_ranks(4, _scaled, factor) == pytest.approx([expected] * 4, rel=1e-6)


def _loco_steps(loco, num_steps, bits, block):
    """This rank's reduced gradients of each step, without a division by W."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = ZeroPPConfig(
        quantized_gradients=True, ranks_per_node=2, gradient_bits=bits, gradient_block_size=block, loco=loco
    )
    model, _ = build(config)
    model.set_gradient_divide_factor(1.0)
    steps = []
    for step in range(num_steps):
        model(coefficients(rank, step)).backward()
        steps.append(local_gradients(model, world_size))
        model.zero_grad()
    return steps


@pytest.mark.parametrize("loco", [LoCoConfig(), LoCoConfig(beta=0.0, reset_interval=3)])
def test_loco_equals_the_oracle_over_steps_and_resets(loco):
    world_size, bits, block, num_steps = 4, 2, 32, 7
    got = run_ranks(world_size, _loco_steps, loco, num_steps, bits, block)
    feedback = oracle.Feedback(loco, block)
    for step in range(num_steps):
        gradients = [[shards_of(coefficients(r, step), world_size) for r in range(world_size)]]
        hops = Hop(8, block, torch.float32), Hop(bits, block, torch.float32)
        totals = oracle.reduce_scatter(gradients, 2, parameters_of(world_size), *hops, feedback)
        for rank in range(world_size):
            assert got[rank][step].equal(totals[rank]), f"rank {rank}, step {step}"


@pytest.mark.parametrize("ranks_per_node, world_size", [(1, 1), (2, 2)])
def test_everything_on_works_without_a_second_node(ranks_per_node, world_size):
    outputs = run_ranks(world_size, _everything_on, ranks_per_node)
    assert all(output == outputs[0] for output in outputs)


def _everything_on(ranks_per_node):
    config = ZeroPPConfig(True, ranks_per_node, True, LoCoConfig())
    model, _ = build(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(coefficients(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().sum().item() for p in model.weights]
