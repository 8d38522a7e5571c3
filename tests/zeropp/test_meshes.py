"""ZeRO++ on a sub-mesh beside tensor parallelism, with CPU offload, and at ZeRO-1 and -2."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import run_in_turn
from tests.zeropp.training_on_ranks import ALL_FLAGS, HIERARCHY_ONLY, shard, train


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 36), nn.GELU(), nn.Linear(36, 24))


def losses_of(model, zeropp, seed):
    generator = torch.Generator().manual_seed(seed)
    return train(model, zeropp, lambda *_: model(torch.randn(8, 24, generator=generator)).square().mean(), 3).losses


def _with_tensor_parallelism(config):
    """8 ranks: data parallel 4 x tensor parallel 2; each tensor-parallel rank has its own FSDP group of 4."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    zeropp = shard(model, config, mesh=mesh["dp"])
    losses = losses_of(model, zeropp, seed=mesh["dp"].get_local_rank())
    if zeropp is None:
        return losses, None
    groups = (zeropp.topologies[0].intra_group, zeropp.topologies[0].inter_group)
    return losses, [dist.get_process_group_ranks(group) for group in groups]


def test_tensor_parallel_ranks_never_mix_and_train_as_under_fsdp2():
    configs = {"plain": None, "ours": HIERARCHY_ONLY, "all flags": ALL_FLAGS}
    found = run_in_turn(8, {name: partial(_with_tensor_parallelism, config) for name, config in configs.items()})
    for (expected, _), (losses, _), (quantized, _) in zip(*found.values(), strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert quantized == pytest.approx(expected, rel=0.05)
    groups = [groups for _, groups in found["ours"]]
    assert groups[0] == [[0, 2], [0, 4]]  # every other rank is of the other tensor-parallel half
    assert groups[7] == [[5, 7], [3, 7]]
