"""A process without a process group is rank 0 of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron_zpp.zeropp import OwnRank
from tests.ranks import run_ranks


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


def _counted_once():
    """What this rank counts of three tensors, and the ranks' numbers in order."""
    ranks, rank = OwnRank(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    pair = torch.tensor([2.0 * (rank % 2), 2.0 * (rank % 2) + 1])
    tensors = [
        DTensor.from_local(pair, mesh, [Replicate(), Shard(0)]),
        DTensor.from_local(torch.tensor([float(rank)]), mesh, [Shard(0), Shard(0)]),
        torch.arange(3.0),  # taken to be whole on every rank
    ]
    with pytest.raises(ValueError, match="is not summed yet"):
        ranks.shards_of(DTensor.from_local(pair, mesh, [Replicate(), Partial()]))
    counted = [[shard.tolist() for shard in ranks.shards_of(tensor)] for tensor in tensors]
    return counted, ranks.gather(torch.tensor([10.0 + rank])).tolist()


def test_every_element_is_counted_by_one_of_the_ranks():
    of_ranks = run_ranks(4, _counted_once)
    assert [counted for counted, _ in of_ranks] == [
        [[[0, 1]], [[0]], [[0, 1, 2]]],
        [[[2, 3]], [[1]], [[]]],
        [[[]], [[2]], [[]]],  # the second replica of the first tensor
        [[[]], [[3]], [[]]],
    ]
    assert all(numbers == [10, 11, 12, 13] for _, numbers in of_ranks)
