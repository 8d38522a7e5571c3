"""Weights that FSDP2 keeps gathered between micro-batches, by the three lines of docs/reference/library.md."""

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


def train(recipe: str, stage: int, micro_batches: int = 3):
    """Losses, this rank's shards at the end, its bytes in each of three steps, and warnings."""
    model, losses, sent = Net(width=32, hidden=64), [], []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config = RECIPES[recipe].config(ranks_per_node=2)
    zeropp = shard(model, config, model.blocks, mp_policy=policy, reshard_after_forward=stage == 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with CapturedWarnings() as warnings:
        for step in range(3):
            for i in range(micro_batches):
                is_last = i == micro_batches - 1
                model.set_is_last_backward(is_last)
                model.set_reshard_after_backward(is_last or stage == 3)
                model.set_requires_gradient_sync(is_last or stage > 1)
                loss = model(torch.randn(8, 32, generator=generator)).square().mean() / micro_batches
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                losses.append(evaluate(model, torch.ones(1, 32)).mean().item())
            sent.append(zeropp.traffic.take())
    return losses, shards(model), sent, warnings.messages


@pytest.mark.parametrize("recipe", [*RECIPES][1:3])
def test_kept_weights_train_the_same_and_gather_once_per_step(recipe):
    ranks = run_in_turn(4, {str(stage): partial(train, recipe, stage) for stage in (3, 2, 1)})
    for again, kept, summed in zip(*ranks.values(), strict=True):
        assert kept[0] == again[0] and equal(kept[1], again[1])
        assert summed[0] == pytest.approx(again[0], rel=0.05)
        for stage_3, stage_2, stage_1 in zip(again[2], kept[2], summed[2], strict=True):
            for sent in (stage_2, stage_1):
                assert sent.inter_node == pytest.approx(stage_3.inter_node, rel=0.2)
            assert stage_3.intra_node > stage_2.intra_node > stage_1.intra_node


def noted(*arguments, least: int = 1, free: int | None = None) -> list[str]:
    """The warnings where ``least`` bytes are worth one; the model has 26,736 in 16 bit."""
    memory = description._free_memory if free is None else lambda device: free
    with patch.multiple(description, LEAST_KEPT=least, _free_memory=memory):
        return train("int8", *arguments)[3]


def test_gathers_that_memory_makes_needless_are_noted_once_on_one_rank():
    cases = {
        "again": partial(noted, 3, least=26_736),
        "kept": partial(noted, 2),
        "one micro-batch": partial(noted, 3, 1),
        "small": partial(noted, 3, least=30_000),
        "no memory": partial(noted, 3, free=26_735),
    }
    said = run_in_turn(2, cases)
    first, second = said.pop("again")
    assert len(first) == 1 and "micro-batch of a step gathers the same weights again, 2.7e-05 GB, and" in first[0]
    assert not second and not any(messages for ranks in said.values() for messages in ranks)
