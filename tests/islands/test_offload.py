"""Agreed parameters and outer momentum in host memory: the same numbers, and on a GPU another place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_zpp.islands import IslandConfig
from megatron_zpp.islands.outer_state import OuterState
from tests.islands.test_diloco import ADAMW, train
from tests.ranks import run_ranks
from tests.zeropp.order.fake_cuda import fake_cuda


def _train_with_and_without(settings: dict[str, object]) -> list[list[Tensor]]:
    return [train(2, IslandConfig(**settings, offload=offload), True, ADAMW) for offload in (False, True)]


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_it_changes_no_number(momentum):
    settings = {"sync_interval": 3, "outer_momentum": momentum, "bits": 4, "loco": True, "block_size": 16}
    settings |= {"fragments": 2, "sync_delay": 1, "merge_alpha": 0.5}
    for kept, offloaded in run_ranks(4, _train_with_and_without, settings):
        assert all(mine.equal(its) for mine, its in zip(offloaded, kept, strict=True))


def _devices(offload: bool) -> tuple[set[str], set[str]]:
    """Where the state is after an agreement, and where a GPU's rank computes it. Fake tensors have devices alone."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cuda", (4,))
    with fake_cuda():
        shard, whole = torch.ones(4, 8, device="cuda"), torch.nn.Parameter(torch.ones(3, device="cuda"))
        parameters = {"shard": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False), "whole": whole}
        outer = OuterState(parameters, IslandConfig(offload=offload))
        differences = outer.differences(parameters)
        outer.step(differences)
        outer.merge_into(parameters)
        state = outer.state_dict()
        assert [*state] == ["agreed.shard", "agreed.whole", "momentum.shard", "momentum.whole"]
        assert isinstance(state["agreed.shard"], DTensor) and state["agreed.shard"].shape == (16, 8)
        at_rest = {str((x.to_local() if isinstance(x, DTensor) else x).device) for x in state.values()}
        return at_rest, {str(difference.device) for difference in differences}


@pytest.mark.parametrize("offload, at_rest", [(False, {"cuda:0"}), (True, {"cpu"})])
def test_beside_a_gpu_it_waits_in_host_memory(offload, at_rest):
    assert run_ranks(1, _devices, offload) == [(at_rest, {"cuda:0"})]
