"""A training step on GPUs that are not there: what it launches, where its tensors are, and whom it waits for.

One rank of 64 nodes of 8, whose collectives bring nothing, and whose tensors are fake: they have devices, types and
shapes, and no values. FSDP2, autograd, the optimizer and ZeRO++ run as they are.

It cannot show what depends on values, on other ranks, or on CUDA: whether kernels launch and are right
(test_kernels.py and test_cuda_source.py ask that), what a launch costs, what NCCL does, and how autograd's threads and
streams behave. What torch's own C++ asks the device is answered with "meta".
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import megatron_zpp.zeropp
from megatron_zpp.zeropp import LoCoConfig, ZeroPP, ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.wire import kernels
from tests.ranks import run_ranks
from tests.zeropp.order.fake_cuda import CUDA, fake_cuda
from tests.zeropp.order.host import Host
from tests.zeropp.order.races import find_races
from tests.zeropp.order.recorder import DEFAULT, Collective, Recorder
from tests.zeropp.order.trace import Operation, Wait
from tests.zeropp.training_on_ranks import Net

NODES, PER_NODE = 64, 8
RANK, WIDTH = 5, 1024
pytestmark = pytest.mark.skipif(kernels.why_not_loaded is not None, reason=f"needs kernels: {kernels.why_not_loaded}")
OURS = {file.name for file in Path(megatron_zpp.zeropp.__file__).parent.rglob("*.py")}
ALL = ZeroPPConfig(
    quantized_weights=True, hpz_partition_size=PER_NODE, quantized_gradients=True, loco=LoCoConfig(exact_undo=False)
)


@dataclass
class Step:
    """What one rank did in one optimizer step, from the first forward pass to the optimizer."""

    collectives: list[tuple[str, int, str, int]]  # name, ranks, dtype, elements that this rank sends
    in_flight: set[tuple[str, int]]  # name and ranks of collectives that run beside the stream that asked for them
    launches: Counter[tuple[str, str]]  # this package's, without collectives: operator, and the stream's variable
    host_waits: list[str]  # where the host waits for the device
    on_host: set[str]  # operators on tensors in host memory
    races: list[str]
    tensors: dict[str, tuple[str, torch.dtype, tuple[int, ...]]]  # what the rank has afterwards


def third_step(config: ZeroPPConfig, micro_batches: int = 2, width: int = WIDTH, **options: Any) -> Step:
    """On a process of its own: a fake group cannot be told from others of the process."""
    dist.destroy_process_group()  # the test's own rank made it
    dist.init_process_group("fake", rank=RANK, world_size=NODES * PER_NODE, store=FakeStore())
    mesh = init_device_mesh("cuda", (NODES * PER_NODE,))
    recorder = Recorder("cuda")

    def sizes_of_moves(tensor: FakeTensor) -> list[int]:
        recorder.answer_host()
        return [2**16] * tensor.numel()

    with fake_cuda(), Host() as host, recorder, patch.object(FakeTensor, "tolist", sizes_of_moves):
        with CUDA:  # two blocks that are units, and a head that is the root's
            model = Net(width, 4 * width, 8 * width, num_blocks=2)
        model.head.bias = None
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        with _disable_current_modes():  # ranks tell each other where they are, in tensors with values
            zeropp = apply_zeropp(model, config, **options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            begin = len(recorder.trace)
            recorder.collectives.clear()
            host.operators.clear()
            host.waits.clear()
            for i in range(micro_batches):
                zeropp.set_is_last_micro_batch(i == micro_batches - 1)
                model(torch.empty(4, width, device=CUDA)).float().square().mean().backward()
            step = recorder.trace[begin:]
            waits = host.waits + [str(w.site) for w in step if isinstance(w, Wait) and w.stream is None]
            on_host = set(host.operators)
            optimizer.step()
        ours = [op for op in step if isinstance(op, Operation) and _is_ours(op) and "c10d" not in op.name]
        streams = [op.stream for op in step if isinstance(op, Operation) and "c10d" in op.name]
        asked = zip(recorder.collectives, streams, strict=True)
        return Step(
            collectives=[_sent(collective) for collective in recorder.collectives],
            in_flight={(c.name, len(c.ranks)) for c, stream in asked if stream.startswith("the communicator")},
            launches=Counter((op.name.removeprefix("aten::"), op.stream.partition(" (")[0]) for op in ours),
            host_waits=waits,
            on_host=on_host,
            races=[str(race) for race in find_races(recorder.trace)],
            tensors=_tensors(model, zeropp),
        )


def _is_ours(op: Operation) -> bool:
    """Whether this package launched it, or had FSDP2 launch it for a flat shard."""
    return op.site[0].file in OURS or "flat_shard" in {line.function for line in op.site}


def _sent(collective: Collective) -> tuple[str, int, str, int]:
    sent = collective.shapes[: len(collective.shapes) // 2]  # what arrives follows
    (dtype,) = {dtype for _, dtype in sent}
    return collective.name, len(collective.ranks), dtype, sum(math.prod(shape) for shape, _ in sent)


def _tensors(model: nn.Module, zeropp: ZeroPP) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
    tensors: dict[str, Any] = {f"gradient of {name}": p.grad.to_local() for name, p in model.named_parameters()}
    for unit in zeropp.units:
        tensors[f"copies of {unit.name}"] = getattr(unit.all_gather, "secondary_partition", None)
        for hop in getattr(unit.reduce_scatter, "hops", {}).values():
            tensors[f"{hop.name} error of {unit.name}"] = hop.feedback.error if hop.feedback is not None else None
    return {name: (str(t.device), t.dtype, tuple(t.shape)) for name, t in tensors.items() if t is not None}


def nbytes(bits: int, block_size: int, matrices: list[int], biases: list[int], value: int) -> int:
    """A wire's, with fp32 scales and ``value`` bytes for an element of a bias: parts begin at multiples of 16."""
    parts = [numel * bits // 8 for numel in matrices]
    parts += [numel // block_size * 4 for numel in matrices]
    parts += [numel * value for numel in biases]
    return sum(math.ceil(part / 16) * 16 for part in parts)


def test_a_step_of_all_flags_launches_what_it_must_and_waits_for_nothing():
    micro_batches = 2
    (step,) = run_ranks(1, third_step, ALL, micro_batches)
    assert step.host_waits == [] and step.on_host == set() and step.races == []

    # What a rank has of the two blocks and of the head: matrices, and biases. Only blocks are freed after forward.
    matrix, gathered, reduced, tensors = 8 * WIDTH**2 // 512, Counter(), Counter(), {}
    all_weights = 0
    for unit, matrices, biases in [("blocks.0", 2, [8, 2]), ("blocks.1", 2, [8, 2]), ("", 1, [])]:
        shards = ([matrix // 2] * 2 if matrices == 2 else [matrix], biases)
        numel, weights = matrix + sum(biases), nbytes(8, 256, *shards, 2)
        within, between = nbytes(8, 128, *shards, 4), nbytes(4, 128, *shards, 4)
        all_weights += weights
        passes = 2 if unit else 1
        within_node = ("c10d::allgather_into_tensor_coalesced_", PER_NODE, "torch.bfloat16", NODES * numel)
        gathered[within_node] += passes * micro_batches
        reduced["c10d::alltoall_base_", PER_NODE, "torch.uint8", PER_NODE * NODES * within] += micro_batches
        reduced["c10d::alltoall_base_", NODES, "torch.uint8", NODES * between] += 1
        tensors[f"copies of {unit}"] = ("cuda:0", torch.bfloat16, (NODES, numel))
        tensors[f"inter error of {unit}"] = ("cuda:0", torch.uint8, (NODES, nbytes(8, 128, *shards, 4)))
    gathered["c10d::allgather_into_tensor_coalesced_", NODES, "torch.uint8", all_weights] += 1  # they are few
    assert Counter(step.collectives) == gathered + reduced
    # A collective that is waited for at once runs on the stream that waits, whose priority is FSDP2's.
    in_flight = {("c10d::allgather_into_tensor_coalesced_", NODES), ("c10d::alltoall_base_", NODES)}
    if not hasattr(dist, "all_gather_single"):  # torch before 2.13 puts every coalesced gather on its group's stream
        in_flight.add(("c10d::allgather_into_tensor_coalesced_", PER_NODE))
    assert step.in_flight == in_flight

    for name, shape in [("0.weight", (8, WIDTH)), ("0.bias", (8,)), ("2.weight", (2, 4 * WIDTH)), ("2.bias", (2,))]:
        tensors |= {f"gradient of blocks.{i}.{name}": ("cuda:0", torch.float32, shape) for i in range(2)}
    tensors["gradient of head.weight"] = ("cuda:0", torch.float32, (16, WIDTH))
    assert step.tensors == tensors

    units, gathers, reductions = 3, "stream", "reduce_scatter_stream"
    assert step.launches == {
        # Weights: cast together, and made one flat shard.
        ("_foreach_copy_", gathers): units,
        ("cat", gathers): units,
        ("megatron_zpp::encode", gathers): units,
        ("megatron_zpp::decode", gathers): units,
        # Gradients: each micro-batch within the node, where the last is added up and encoded in one launch.
        ("megatron_zpp::encode", reductions): units * (micro_batches + 1),
        ("megatron_zpp::decode", reductions): units * (micro_batches - 1 + 1),
        ("zero_", reductions): units * micro_batches,  # what FSDP2 gets
        ("new_full", reductions): units,  # the mean over ranks
        ("div", reductions): units,
        ("_foreach_add_", reductions): units,  # to .grad
    }


CONFIGS = {
    "off": ZeroPPConfig(),
    "int8 copies, bf16 sums": replace(ALL, hpz_secondary_dtype="int8", gradient_sum_dtype="bf16"),
    "int8 sums, element scales": replace(ALL, gradient_sum_dtype="int8", gradient_bits=2, gradient_element_scales=True),
    "stochastic, rotated, both hops": replace(
        ALL,
        weight_intra_bits=8,
        weight_rounding="stochastic",
        gradient_rounding="stochastic",
        hadamard=True,
        loco=LoCoConfig(hops="both", reset="decay"),
    ),
    "sums": replace(ALL, offload="sums"),
    "errors": replace(ALL, offload="errors"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_no_setting_waits_for_the_device_or_computes_on_the_host(name):
    (step,) = run_ranks(1, third_step, CONFIGS[name])
    assert step.host_waits == [] and step.races == []
    in_host = {tensor for tensor, (device, _, _) in step.tensors.items() if device != "cuda:0"}
    assert in_host == {tensor for tensor in step.tensors if name == "errors" and "error" in tensor}
    assert all(stream != DEFAULT for _, stream in step.launches)
    assert step.launches or not CONFIGS[name].enabled
    if name in ("sums", "errors"):
        assert step.on_host == {"aten::empty.memory_format", "aten::copy_", "aten::_to_copy"}
        copies = [step.launches[operator, "reduce_scatter_stream"] for operator in ("copy_", "_to_copy")]
        assert copies == [3, 3]  # there and back, of each unit
    else:
        assert step.on_host == set()


def test_finding_unused_parameters_waits_for_nothing_on_a_rank_that_used_all():
    (step,) = run_ranks(1, partial(third_step, ALL, find_unused_parameters=True))
    assert step.host_waits == [] and step.on_host == set() and step.races == []


MOVES = {
    "moved codes": replace(ALL, weight_moves=True, weight_bits=6),
    "moved bits": replace(ALL, quantized_weights=False, weight_moves=True),
    "copies in host memory": replace(ALL, weight_moves=True, offload="copies"),
}


@pytest.mark.parametrize(
    "name", ["moved codes", pytest.param("moved bits", marks=pytest.mark.long), "copies in host memory"]
)
def test_a_step_of_moved_weights_waits_for_their_sizes_alone(name):
    """kernels.md and what-is-sent.md say so: a wait in each operator would be some hundred a step, of Llama-8B."""
    (step,) = run_ranks(1, third_step, MOVES[name], 2, WIDTH // 8)
    copies = {device for name, (device, _, _) in step.tensors.items() if name.startswith("copies of")}
    assert len(step.host_waits) == 1 and step.races == []
    counts = [step.launches[f"megatron_zpp::{operator}", "stream"] for operator in ("measure_moves", "write_moves")]
    assert counts == [3, 3]
    if MOVES[name].offload == "copies":
        views = {"aten::select.int", "aten::empty_like"}
        assert copies == {"cpu"} and step.on_host == {"aten::copy_", "aten::_to_copy", *views}
        gathers = 2 * (2 + 2 + 1)  # two micro-batches gather two blocks in both passes, and the root once
        assert step.launches["copy_", "stream"] == gathers + 3  # each reads once, and what arrived is written once
    else:
        assert copies == {"cuda:0"} and step.on_host == set()


# What the tests above would see


def _offences() -> dict[str, tuple[bool, bool]]:
    """Return for each program of one line whether the host waits, and whether it uses host memory."""
    seen = {}
    with fake_cuda(), Host() as host, Recorder("cuda") as recorder:
        x = torch.ones(4, device=CUDA)
        for name, program in {
            "to host": lambda: x.to("cpu"),
            "without waiting": lambda: x.to("cpu", non_blocking=True),
            "to device": lambda: torch.zeros(2).to(CUDA),
            "nothing": lambda: x.to(CUDA) + 1,
            "stream": lambda: torch.cuda.current_stream().synchronize(),
        }.items():
            host.waits.clear()
            host.operators.clear()
            begin = len(recorder.trace)
            program()
            waits = [step for step in recorder.trace[begin:] if isinstance(step, Wait) and step.stream is None]
            seen[name] = (bool(waits or host.waits), bool(host.operators))
    return seen


def test_waits_and_host_memory_are_seen():
    (seen,) = run_ranks(1, _offences)
    assert [name for name, (waits, _) in seen.items() if waits] == ["to host", "to device", "stream"]
    assert [name for name, (_, is_on_host) in seen.items() if is_on_host] == ["to host", "without waiting", "to device"]
