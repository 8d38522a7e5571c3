"""One rank calls the package's collectives: over gloo on a CPU, over NCCL on a GPU, on which two ranks cannot meet.

A group of one rank sends nothing to others, but NCCL refuses here whatever it cannot do: a type, an operation, a group.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.islands.config import IslandConfig
from megatron_zpp.islands.fragment import Fragment
from megatron_zpp.models.cross_entropy import _combine
from megatron_zpp.parallel.distributed import gather_if_any
from megatron_zpp.zeropp import Traffic
from megatron_zpp.zeropp.fsdp.collectives import all_gather, reduce_scatter
from megatron_zpp.zeropp.fsdp.topology import Topology, build_topology
from megatron_zpp.zeropp.fsdp.waits import new_stream, on_stream
from megatron_zpp.zeropp.gather.changed_weights import gather_wires, start_gathers
from megatron_zpp.zeropp.reduce.reduce_scatter import drop_unused, start_exchange
from megatron_zpp.zeropp.wire.format import GradientSum, WireFormat
from megatron_zpp.zeropp.wire.layout import ParameterShard
from tests.gpu import on_devices
from tests.gpu.share_device import restart_group
from tests.ranks import run_ranks
from tests.training.small_run import flags, train_each

PACKAGE = Path(__file__).parents[2] / "megatron_zpp"
ALONE = {"isend", "irecv", "batch_isend_irecv"}  # a rank cannot send to itself
CALLED = {"all_gather", "all_gather_object", "all_reduce", "all_to_all_single", "barrier", "broadcast"}
CALLED |= {"broadcast_object_list", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single"}
CALLED |= {"reduce_scatter_tensor"}
FORMAT = WireFormat([ParameterShard("weight", 512, True)], 4, 128, torch.float32)


def gather(group, device):
    """Wires of several lengths in one collective, and one alone, on the stream of weights."""
    wires = [torch.arange(n, dtype=torch.uint8, device=device) for n in (160, 16, 48)]
    with on_stream(new_stream(device), device):
        gathered, work = start_gathers(wires, group)
        work.wait()
        gathered.append(gather_wires(wires[0], group))
    assert all(a[0].equal(b) for a, b in zip(gathered, [*wires, wires[0]], strict=True))


@dataclass(eq=False)
class Unit:
    device: torch.device
    topology: Topology
    parameters: list[nn.Parameter]
    reduce_scatter: SimpleNamespace


def exchange(group, device):
    """A hop of gradients in 4 bits, and what a step asks of all ranks about parameters without a gradient."""
    wires = FORMAT.encode(torch.randn(1, 512, device=device))
    hop = SimpleNamespace(scales=None)
    hop.encode_pieces = lambda *_: (wires, hop)
    with on_stream(new_stream(device), device):
        total = start_exchange(GradientSum(wires), hop, FORMAT, (0, 0), group).wait().compute()
    assert total.equal(FORMAT.decode(wires[0], torch.empty(512, device=device)))
    used, unused = (nn.Parameter(torch.ones(2, device=device)) for _ in range(2))
    reduction = SimpleNamespace(uses=lambda: [True, False], forget_use=lambda: None)
    used.grad, unused.grad = torch.ones_like(used), torch.zeros_like(unused)
    drop_unused([Unit(device, build_topology(group), [used, unused], reduction)], Traffic())
    assert used.grad is not None and unused.grad is None


def plain(group, device):
    """What replaces FSDP2's collectives where nothing is quantized."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
        values = torch.arange(64, device=device).to(dtype)
        gathered = torch.empty_like(values)
        all_gather(gathered, values, group=group, async_op=True).wait()
        assert gathered.equal(values)
        if dtype.is_floating_point:
            for op in (dist.ReduceOp.SUM, *([dist.ReduceOp.AVG] if device.type == "cuda" else [])):
                reduce_scatter(gathered.zero_(), values, group=group, op=op, async_op=True).wait()
                assert gathered.equal(values)


def flags_and_objects(group, device):
    """Numbers and objects that ranks compare, of every type and operation that the package reduces."""
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            number = torch.tensor(3, dtype=dtype, device=device)
            dist.all_reduce(number, op=op, group=group)
            assert number.item() == 3
    assert gather_if_any(None, group) == [] and gather_if_any("here", group) == ["here"]
    objects = ["sent"]
    dist.broadcast_object_list(objects)
    dist.barrier(group, device_ids=[0] if device.type == "cuda" else None)
    topology = build_topology(group)
    assert topology.world_size == 1
    assert (topology.reduce_group is group) == (device.type == "cpu")  # NCCL's is a second communicator
    if device.type == "cuda":
        exchange(topology.reduce_group, device)


def rows(group, device):
    """Rows for experts and for Muon, of sizes that ranks know, none too; and losses over a divided vocabulary."""
    for dtype, n in [(torch.bfloat16, 5), (torch.uint8, 5), (torch.float32, 0)]:
        sent = torch.arange(8 * n, device=device).to(dtype).view(n, 8)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, [n], [n], group=group)
        assert arrived.equal(sent)
    sums, target = torch.randn(2, 6, device=device)
    owner = torch.zeros(6, dtype=torch.int64, device=device)
    combined = _combine(sums, target, owner, group)
    assert combined[0].allclose(sums) and combined[1].equal(target)


def islands(group, device):
    """Both hops of an outer step, and the start from one island's parameters."""
    parameter = nn.Parameter(torch.randn(1000, device=device))
    before = parameter.detach().clone()
    fragment = Fragment({"weight": parameter}, IslandConfig(sync_interval=2), group, Traffic(), {"weight": parameter})
    fragment.restart()
    assert parameter.equal(before)
    assert fragment.start(step=2)
    fragment.start_second_hop()
    fragment.finish()
    assert parameter.isfinite().all()


CASES = [gather, exchange, plain, flags_and_objects, rows, islands]


def call_each(device, data, store):
    device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    restart_group(device, store, backend="nccl" if device.type == "cuda" else "gloo")
    for case in CASES:
        case(dist.group.WORLD, device)
    runs = {"trainer": flags(data, "--zero-quantized-weights --zero-quantized-gradients --zeropp-loco")}
    return train_each(runs, device=str(device))["trainer"]["lm loss"]


@on_devices
def test_the_backend_can_do_every_collective(device, data, tmp_path):
    (losses,) = run_ranks(1, call_each, device, data, str(tmp_path / "store"))
    assert losses[-1] < losses[0]


def test_a_new_collective_of_the_package_is_tried_over_nccl_too():
    """With names of collectives that nothing here calls, a first run on real GPUs would be the first try."""
    names = "|".join(
        name for name in dir(dist) if re.match("all_|broadcast|reduce|gather|scatter|barrier|.*i?(send|recv)", name)
    )
    called = {name for file in PACKAGE.rglob("*.py") for name in re.findall(rf"\bdist\.({names})\b", file.read_text())}
    assert called - ALONE == CALLED
