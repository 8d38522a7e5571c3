"""Gathers of weights that memory has room to keep between micro-batches are noted."""

from functools import partial
from unittest.mock import patch

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.zeropp import description
from megatron_zpp.zeropp.recipes import RECIPES
from tests.ranks import run_in_turn
from tests.zeropp.fsdp_model import CapturedWarnings
from tests.zeropp.training_on_ranks import Net, shard


def noted(stage: int, micro_batches: int = 3, *, least: int = 1, free: int | None = None) -> list[str]:
    """The warnings of three steps where ``least`` bytes are worth one; the model has 26,736 in 16 bit."""
    memory = description._free_memory if free is None else lambda device: free
    with patch.multiple(description, LEAST_KEPT=least, _free_memory=memory):
        model, config = Net(width=32, hidden=64), RECIPES["int8"].config(ranks_per_node=2)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, config, model.blocks, mp_policy=policy, reshard_after_forward=stage == 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with CapturedWarnings() as warnings:
            for _ in range(3):
                for i in range(micro_batches):
                    is_last = i == micro_batches - 1
                    model.set_is_last_backward(is_last)
                    model.set_reshard_after_backward(is_last or stage == 3)
                    model(torch.ones(8, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return warnings.messages


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
