"""Weights that FSDP2 keeps gathered between micro-batches, by its own three switches."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.zeropp import description
from megatron_zpp.zeropp.recipes import RECIPES
from tests.ranks import run_in_turn
from tests.zeropp.fsdp_model import CapturedWarnings
from tests.zeropp.training_on_ranks import Net, equal, evaluate, shard, shards

MICRO_BATCHES, STEPS = 3, 4
STAGES = (3, 2, 1)


def train(recipe: str, stage: int):
    """Losses, this rank's shards at the end, and its bytes in each step: between nodes and within.

    The three lines of docs/reference/library.md make the stage.
    """
    model = Net(width=64, hidden=96)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config = RECIPES[recipe].config(ranks_per_node=2)
    zeropp = shard(model, config, model.blocks, mp_policy=policy, reshard_after_forward=stage == 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses, sent = torch.Generator().manual_seed(dist.get_rank()), [], []
    for step in range(STEPS):
        for i in range(MICRO_BATCHES):
            is_last = i == MICRO_BATCHES - 1
            model.set_is_last_backward(is_last)
            if stage <= 2:
                model.set_reshard_after_backward(is_last)
            if stage == 1:
                model.set_requires_gradient_sync(is_last)
            x = torch.randn(8, 64, generator=generator)
            loss = (model(x)[:, :8] - x[:, :8].roll(1, 1)).square().mean() / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            losses.append(evaluate(model, torch.ones(1, 64)).mean().item())
        traffic = zeropp.traffic.take()
        sent.append((traffic.inter_node, traffic.intra_node))
    return losses, shards(model), sent


@pytest.mark.parametrize("recipe", ["lossless", "int8"])
def test_kept_weights_train_the_same_and_gather_once_per_step(recipe):
    by_stage = run_in_turn(4, {str(stage): partial(train, recipe, stage) for stage in STAGES})
    for again, kept, summed in zip(*(by_stage[str(stage)] for stage in STAGES), strict=True):
        assert kept[0] == again[0] and equal(kept[1], again[1])
        assert summed[0] == pytest.approx(again[0], rel=0.05)
        for of_step in zip(again[2], kept[2], summed[2], strict=True):
            (between, within), *others = of_step
            assert [nbytes for nbytes, _ in others] == pytest.approx([between] * 2, rel=0.2)
            assert within > others[0][1] > others[1][1]


def noted(keeps: bool, accumulates: bool, least: int = 1, free: float | None = None) -> list[str]:
    """The warnings of three steps with weights of 26,736 bytes in 16 bit, where ``least`` are worth a note.

    free: bytes that are said to be free; None = as many as this machine has.
    """
    memory = description._free_memory if free is None else lambda device: free
    model = Net(width=32, hidden=64)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    shard(model, RECIPES["int8"].config(2), model.blocks, mp_policy=policy, reshard_after_forward=not keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with CapturedWarnings() as warnings, patch.multiple(description, LEAST_KEPT=least, _free_memory=memory):
        for _ in range(3):
            for is_last in (False, True) if accumulates else (True,):
                model.set_is_last_backward(is_last)
                model.set_reshard_after_backward(is_last or not keeps)
                model(torch.ones(1, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return warnings.messages


def test_gathers_that_memory_makes_needless_are_noted_once_on_one_rank():
    cases = {"again": (False, True, 26_736), "kept": (True, True), "one micro-batch": (False, False)}
    cases |= {"small": (False, True, 30_000), "no memory": (False, True, 1, 26_735)}
    said = run_in_turn(2, {name: partial(noted, *case) for name, case in cases.items()})
    first, second = said.pop("again")
    assert len(first) == 1 and "micro-batch of a step gathers the same weights again, 2.7e-05 GB, and" in first[0]
    assert not second and not any(messages for ranks in said.values() for messages in ranks)
