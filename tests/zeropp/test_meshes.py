"""ZeRO++ on a sub-mesh beside tensor parallelism, with CPU offload, and at ZeRO-1 and -2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_zpp.zeropp import LoCoConfig, ZeroPPConfig, apply_zeropp
from tests.ranks import run_ranks

HIERARCHY_ONLY = ZeroPPConfig(
    hpz_partition_size=2, quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None
)
ALL_FLAGS = ZeroPPConfig(True, 2, True, LoCoConfig(), weight_block_size=32, gradient_block_size=32)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 36), nn.GELU(), nn.Linear(36, 24))


def train(model, zeropp, seed, num_steps=6):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(num_steps):
        loss = model(torch.randn(8, 24, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, zeropp.topologies[0] if zeropp is not None else None


def _with_tensor_parallelism(config):
    """8 ranks: data parallel 4 x tensor parallel 2; each tensor-parallel rank has its own FSDP group of 4."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    zeropp = apply_zeropp(model, config) if config is not None else None
    losses, topology = train(model, zeropp, seed=mesh["dp"].get_local_rank())
    groups = (
        [dist.get_process_group_ranks(g) for g in (topology.intra_group, topology.inter_group)] if topology else None
    )
    return losses, groups


def test_tensor_parallel_ranks_never_mix():
    plain = run_ranks(8, _with_tensor_parallelism, None)
    ours = run_ranks(8, _with_tensor_parallelism, HIERARCHY_ONLY)
    for (expected, _), (losses, _) in zip(plain, ours, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert ours[0][1] == [[0, 2], [0, 4]]  # every other rank is of the other tensor-parallel half
    assert ours[7][1] == [[5, 7], [3, 7]]


def test_all_flags_train_beside_tensor_parallelism():
    plain = run_ranks(8, _with_tensor_parallelism, None)[0][0]
    losses = run_ranks(8, _with_tensor_parallelism, ALL_FLAGS)[0][0]
    assert losses == pytest.approx(plain, rel=0.05)


def _sharded(config, reshard, offload):
    model = mlp()
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    fully_shard(model[0], reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return train(model, apply_zeropp(model, config) if config is not None else None, seed=dist.get_rank())[0]


@pytest.mark.parametrize("reshard, offload", [(False, False), (True, True)])
def test_zero_2_and_cpu_offload_equal_plain_fsdp(reshard, offload):
    plain, ours = (
        run_ranks(4, _sharded, None, reshard, offload),
        run_ranks(4, _sharded, HIERARCHY_ONLY, reshard, offload),
    )
    for expected, losses in zip(plain, ours, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)


def _memory():
    """Elements and bytes that the collectives of one Linear(512, 512) keep after a step, and within one."""
    model = nn.Linear(512, 512, bias=False)
    fully_shard(model)
    zeropp = apply_zeropp(model, ALL_FLAGS)
    zeropp.set_is_last_micro_batch(False)
    model(torch.ones(1, 512)).sum().backward()
    hops, gather = zeropp._reduce_scatters[""].hops, zeropp._all_gathers[""]
    partial = hops.node_sum.kept.nbytes
    zeropp.set_is_last_micro_batch(True)
    model(torch.ones(1, 512)).sum().backward()
    return gather.secondary_partition.nbytes, partial, hops.feedback["inter"].error.nbytes


def test_memory_is_what_the_documentation_says():
    parameters, ranks_per_node = 512 * 512, 2
    secondary, partial, error = run_ranks(4, _memory)[0]
    assert secondary == 4 * parameters / ranks_per_node  # gathered in fp32 here
    assert partial == 4 * parameters / ranks_per_node
    assert error == (1 + 4 / 32) * parameters / ranks_per_node  # int8 and scales of blocks of 32
