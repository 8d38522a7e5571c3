"""The staging backend itself, on CPU tensors and, where there is a GPU, on CUDA tensors: equal to gloo to the bit."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from megatron_zpp.zeropp.fsdp.collectives import all_gather, reduce_scatter
from tests.gpu.staged_backend import NAME, register
from tests.ranks import run_ranks

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
WORLD_SIZE = 3
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def results_of_all_collectives(group, device):
    """What each of torch.distributed's collectives gives on this rank, over several types."""
    rank, results = dist.get_rank(), {}
    mesh = DeviceMesh.from_group(group, device)
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(rank)
        whole = torch.randint(50, (WORLD_SIZE * 1000,), generator=generator).to(dtype)
        x = whole[rank * 1000 : (rank + 1) * 1000].to(device)
        whole = whole.to(device)
        parts = list(whole.chunk(WORLD_SIZE))

        def keep(name, *tensors, dtype=dtype):
            results[name, dtype] = [tensor.cpu() for tensor in tensors]

        for op in ("SUM", "MAX", *(["AVG"] if dtype.is_floating_point else [])):
            reduced, scattered = x.clone(), torch.empty_like(x)
            dist.all_reduce(reduced, op=getattr(dist.ReduceOp, op), group=group)
            dist.reduce_scatter(scattered, parts, op=getattr(dist.ReduceOp, op), group=group)
            keep(f"all_reduce and reduce_scatter {op}", reduced, scattered)
            reduce_scatter(scattered, whole, op=getattr(dist.ReduceOp, op), group=group)
            keep(f"reduce_scatter_tensor {op}", scattered)
        gathered = torch.empty_like(whole)
        all_gather(gathered, x, group=group)
        listed = [torch.empty_like(x) for _ in range(WORLD_SIZE)]
        dist.all_gather(listed, x, group=group)
        keep("all_gather", gathered, *listed)
        in_place = torch.zeros_like(whole)
        own = in_place[rank * 1000 : (rank + 1) * 1000].copy_(x)
        all_gather(in_place, own, group=group)  # as FSDP2 does it
        keep("all_gather in place", in_place)
        swapped = torch.empty_like(whole)
        dist.all_to_all_single(swapped, whole, group=group)
        keep("all_to_all_single", swapped)
        uneven = torch.empty(WORLD_SIZE * (rank + 1) * 10, dtype=dtype, device=device)
        sizes = [(r + 1) * 10 for r in range(WORLD_SIZE)]
        dist.all_to_all_single(uneven, whole[: sum(sizes)], [(rank + 1) * 10] * WORLD_SIZE, sizes, group=group)
        keep("all_to_all_single of uneven sizes", uneven)
        sent = x.clone()
        dist.broadcast(sent, src=1, group=group)
        to_one = [torch.empty_like(x) for _ in range(WORLD_SIZE)] if rank == 1 else None
        dist.gather(x, to_one, dst=1, group=group)
        from_one = torch.empty_like(x)
        dist.scatter(from_one, parts if rank == 1 else None, src=1, group=group)
        keep("broadcast, gather, scatter", sent, from_one, *(to_one or []))
        # DTensor's collectives arrive from C++.
        sharded = DTensor.from_local(x, mesh, [Shard(0)])
        partial = DTensor.from_local(whole, mesh, [Partial()])
        keep("DTensor", sharded.full_tensor(), partial.full_tensor(), partial.redistribute(mesh, [Shard(0)]).to_local())
    dist.barrier(group=group)
    objects = [None] * WORLD_SIZE
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    one = [None] * WORLD_SIZE if rank == 0 else None
    dist.gather_object(str(rank), one, dst=0, group=group)
    received = [None]
    dist.scatter_object_list(received, ["a", "b", "c"] if rank == 2 else None, src=2, group=group)
    return results, (objects, one, received)


def staged_and_gloo(device):
    register()
    staged = dist.new_group(backend=NAME)
    return results_of_all_collectives(staged, device), results_of_all_collectives(dist.group.WORLD, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_every_collective_equals_gloo(device):
    for (staged, staged_objects), (gloo, gloo_objects) in run_ranks(WORLD_SIZE, staged_and_gloo, device):
        assert staged_objects == gloo_objects
        assert staged.keys() == gloo.keys()
        for key, tensors in gloo.items():
            assert all(map(torch.equal, staged[key], tensors)), key


def late_inputs_and_early_outputs(device):
    """Inputs that a stream still computes, inputs that change after the call, and outputs before and after wait()."""
    register()
    group = dist.new_group(backend=NAME)
    rank = dist.get_rank()
    on_gpu = device == "cuda"
    x = torch.full((1 << 20,), float(rank), device=device)
    stream = torch.cuda.Stream() if on_gpu else None
    with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
        if on_gpu:
            stream.wait_stream(torch.cuda.default_stream())
            torch.cuda._sleep(200_000_000)  # about 0.1 s
        x += 1
        works, gathered = [], []
        for _ in range(3):
            output = torch.zeros(WORLD_SIZE << 20, device=device)
            gathered.append(output)
            works.append(all_gather(output, x, group=group, async_op=True))
            x = x + 1  # the next one's input; memory of the last one's may be given away
        for work in works:
            work.wait()
        sums = [output.view(WORLD_SIZE, -1).double().mean(dim=1).tolist() for output in gathered]
    return sums


@pytest.mark.parametrize("device", DEVICES)
def test_order_of_streams(device):
    expected = [[rank + 1.0 + i for rank in range(WORLD_SIZE)] for i in range(3)]
    assert run_ranks(WORLD_SIZE, late_inputs_and_early_outputs, device) == [expected] * WORLD_SIZE
