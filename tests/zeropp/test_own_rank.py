"""A process without a process group is rank 0 of one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_zpp.zeropp import OwnRank


def test_a_process_without_a_process_group_is_the_only_rank():
    assert not dist.is_initialized()
    ranks = OwnRank()
    assert (ranks.world_size, len(ranks)) == (1, 1)
    tensor = torch.ones(3)
    assert ranks.shards_of(tensor)[0] is tensor and ranks.gather(tensor) is tensor


def test_its_random_states_are_seeded_and_taken_back():
    random_states = OwnRank().random_states
    random_states.seed(lambda rank: 7 + rank)
    state, numbers = random_states.state_dict(), torch.rand(3)
    assert "0.cpu" in state
    random_states.load_state_dict(state)
    assert torch.rand(3).equal(numbers)
    assert torch.rand(3, generator=torch.Generator().manual_seed(7)).equal(numbers)
