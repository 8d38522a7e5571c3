"""Muon on real ranks against torch.optim.Muon in one process, on whole matrices and on each node's rows."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megatron_zpp.zeropp import Muon, ZeroPPConfig, apply_zeropp, emulate_zeropp
from tests.ranks import run_ranks

# Rows that 4 ranks on 2 nodes share evenly and not, with empty shards, an empty node, and as many as columns.
SHAPES = [(16, 12), (13, 24), (3, 8), (40, 5), (2, 6), (8, 8)]
RANKS, NODES = 4, 2
ARGUMENTS = dict(lr=0.02, weight_decay=0.1)


class Matrices(nn.Module):
    """Matrices and two other parameters, whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = nn.ParameterList([torch.randn(shape, generator=generator) for shape in SHAPES])
        self.others = nn.ParameterList([torch.randn(shape, generator=generator) for shape in [(7,), (9, 5)]])

    def forward(self, coefficients: list[Tensor]) -> Tensor:
        parameters = [*self.matrices, *self.others]
        return sum((p * c).sum() for p, c in zip(parameters, coefficients, strict=True))


def coefficients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in [*SHAPES, (7,), (9, 5)]]


def groups(model: Matrices) -> list[dict]:
    return [dict(params=list(model.matrices)), dict(params=list(model.others), use_muon=False)]


def on_ranks(config: ZeroPPConfig, arguments: dict, steps: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The parameters after some steps, whole, and what this rank's optimizer sent in each: within, between nodes."""
    model = Matrices()
    fully_shard(model)
    zeropp = apply_zeropp(model, config)
    optimizer = Muon(groups(model), zeropp, **ARGUMENTS, **arguments)
    sent = []
    for step in range(steps):
        model(coefficients(step)).backward()
        zeropp.traffic.take()
        optimizer.step()
        traffic = zeropp.traffic.take()
        sent.append((traffic.intra_node, traffic.inter_node))
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in [*model.matrices, *model.others]], sent


def emulated(arguments: dict, steps: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The same, of all ranks together."""
    model = Matrices()
    zeropp = emulate_zeropp(model, ZeroPPConfig(), NODES, RANKS // NODES)
    optimizer = Muon(groups(model), zeropp, **ARGUMENTS, **arguments)
    zeropp.ranks.step_by_shards(optimizer)
    sent = []
    for step in range(steps):
        zeropp.set_is_last_micro_batch(True)
        for as_rank in zeropp.ranks:
            with as_rank:
                model(coefficients(step)).backward()
        zeropp.traffic.take()
        optimizer.step()
        traffic = zeropp.traffic.take()
        sent.append((traffic.intra_node, traffic.inter_node))
        optimizer.zero_grad()
    return [p.detach() for p in [*model.matrices, *model.others]], sent


def blocks_of(rows: int) -> list[slice]:
    """The rows of each node: FSDP2 gives each rank ceil(rows / W), while there are any."""
    per_node = math.ceil(rows / RANKS) * (RANKS // NODES)
    stops = [0, *(min(rows, per_node * (node + 1)) for node in range(NODES))]
    return [slice(start, stop) for start, stop in pairwise(stops) if stop > start]


def expected(whole_at: list[bool], arguments: dict) -> list[Tensor]:
    """By torch.optim.Muon and AdamW in one process: whole matrices at some steps, node blocks at the others.

    Momentum is the same in both, so that optimizers of blocks and of matrices can go over the same parameters: the one
    whose turn it is not sees a learning rate of 0.
    """
    model = Matrices()
    torch_arguments = {**ARGUMENTS, **arguments}
    blocks = [nn.Parameter(m.detach()[rows]) for m in model.matrices for rows in blocks_of(len(m))]  # views
    by_whole = torch.optim.Muon(model.matrices, **torch_arguments)
    by_blocks = torch.optim.Muon(blocks, **torch_arguments)
    adamw = torch.optim.AdamW(model.others, **ARGUMENTS)
    for step, whole in enumerate(whole_at):
        for parameter, gradient in zip([*model.matrices, *model.others], coefficients(step), strict=True):
            parameter.grad = gradient
        of_blocks = [c[rows] for c in coefficients(step)[: len(SHAPES)] for rows in blocks_of(len(c))]
        for block, gradient in zip(blocks, of_blocks, strict=True):
            block.grad = gradient
        by_whole.param_groups[0]["lr"] = ARGUMENTS["lr"] if whole else 0.0
        by_blocks.param_groups[0]["lr"] = 0.0 if whole else ARGUMENTS["lr"]
        for optimizer in (by_whole, by_blocks, adamw):
            optimizer.step()
    return [p.detach() for p in [*model.matrices, *model.others]]


CASES = {
    "whole matrices": (1, [True] * 4),
    "node blocks": (None, [False] * 4),
    "every third whole": (3, [True, False, False, True]),
}


def _on_ranks_in_turn(cases: dict[str, dict]) -> dict:
    return {name: on_ranks(ZeroPPConfig(ranks_per_node=2), arguments, steps=4) for name, arguments in cases.items()}


@pytest.fixture(scope="module")
def trained() -> dict:
    """By case: on real ranks, and emulated."""
    cases = {name: dict(period=period) for name, (period, _) in CASES.items()}
    cases["plain momentum"] = dict(period=1, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3)
    cases["4 bits"] = dict(period=2, momentum_bits=4, momentum_block_size=32)
    real = run_ranks(RANKS, _on_ranks_in_turn, cases)
    return {name: ([of_rank[name] for of_rank in real], emulated(arguments, 4)) for name, arguments in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch_in_one_process(trained, name: str) -> None:
    real, _ = trained[name]
    oracle = expected(CASES[name][1], {})
    for parameters, _ in real:
        for mine, theirs in zip(parameters, oracle, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_takes_the_arguments_of_torch(trained) -> None:
    real, _ = trained["plain momentum"]
    oracle = expected([True] * 4, dict(nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3))
    for mine, theirs in zip(real[0][0], oracle, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_emulated_ranks_equal_real_ones_to_the_bit(trained) -> None:
    for name, (real, (parameters, sent)) in trained.items():
        for mine, theirs in zip(parameters, real[0][0], strict=True):
            assert mine.equal(theirs), name
        of_all = [tuple(map(sum, zip(*of_step, strict=True))) for of_step in zip(*(s for _, s in real), strict=True)]
        assert sent == of_all, name
