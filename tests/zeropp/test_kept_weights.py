"""Weights that FSDP2 keeps gathered between micro-batches, by its own three switches."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.zeropp.recipes import RECIPES
from tests.ranks import run_in_turn
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
