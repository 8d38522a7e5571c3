"""A cluster's rates, measured on all of its ranks at once, as a run uses them: arithmetic, kernels, links."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.metrics.throughput import peak_tflops
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.hardware import LATENCY_BETWEEN, LATENCY_WITHIN
from megatron_zpp.zeropp.collectives import all_gather
from megatron_zpp.zeropp.topology import build_topology
from megatron_zpp.zeropp.wire_format import wire_format
from megatron_zpp.zeropp.wire_layout import ParameterShard

HEAD_DIM = 64


@dataclass(frozen=True)
class Sizes:
    """What is measured with: those of the runs that are to be planned."""

    hidden_size: int
    tokens: int  # of a micro-batch
    least_bytes: int = 2**12  # of a collective's pieces
    most_bytes: int = 2**25
    seconds: float = 0.5  # of each measurement, at least


def measure_cluster(
    device: torch.device, ranks_per_node: int | None, sizes: Sizes, say: Callable[[str], None]
) -> ClusterSpec:
    """Collective over all ranks, each of which gets the same. say: called with each result, on every rank.

    ranks_per_node: None = as they run.
    """
    world = dist.group.WORLD
    assert world is not None
    topology = build_topology(world, ranks_per_node)
    products = _of_all(_products(device, sizes))
    say(f"matrix products: {products / 1e12:.4g} TFLOP/s")
    attended = _of_all(_attention(device, sizes))
    say(f"attention: {attended / 1e12:.4g} TFLOP/s")
    kernels = _of_all(_kernels(device, sizes))
    say(f"encoding and decoding: {kernels / 1e9:.4g} GB/s")
    within, within_latency = _link(topology.intra_group, device, sizes)
    say(f"within a node: {within / 1e9:.4g} GB/s a rank, {within_latency * 1e6:.4g} microseconds a hop")
    between, between_latency = _link(topology.inter_group, device, sizes)
    gbits = 8e-9 * between * topology.ranks_per_node  # all local ranks sent at once
    say(f"between nodes: {gbits:.4g} Gbit/s out of a node, {between_latency * 1e6:.4g} microseconds a hop")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    fastest = max(products, attended) / 1e12
    peak = max(peak_tflops(name) or fastest, fastest)
    is_gloo = dist.get_backend() == "gloo"
    return ClusterSpec(
        topology.num_nodes,
        topology.ranks_per_node,
        name,
        peak_tflops=peak,
        efficiency=products / 1e12 / peak,
        attention_efficiency=attended / 1e12 / peak,
        memory_gb=_memory(device, topology.ranks_per_node) / 1e9,
        kernel_gbytes=kernels / 1e9,
        within_gbytes=within / 1e9,
        between_gbits=gbits,
        within_microseconds=within_latency * 1e6 if topology.ranks_per_node > 1 else LATENCY_WITHIN,
        between_microseconds=between_latency * 1e6 if topology.num_nodes > 1 else LATENCY_BETWEEN,
        overlaps=not is_gloo,
        ring_passes=2 if is_gloo else 1,
    )


def _products(device: torch.device, sizes: Sizes) -> float:
    """FLOP/s of an MLP's forward and backward products."""
    tokens, width = sizes.tokens, sizes.hidden_size
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    up = torch.randn(4 * width, width, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(tokens, 4 * width, device=device, dtype=torch.bfloat16)

    def run() -> None:
        F.linear(x, up)
        gradient @ up
        gradient.T @ x

    return 3 * 2 * tokens * width * 4 * width / _seconds(run, device, sizes)


def _attention(device: torch.device, sizes: Sizes) -> float:
    """FLOP/s of a forward and a backward pass of causal attention, as ``costs.arithmetic`` counts them."""
    heads = max(1, sizes.hidden_size // HEAD_DIM)
    q, k, v = (
        torch.randn(1, heads, sizes.tokens, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out.sum(), (q, k, v))

    flops = (
        3.5 * 2 * heads * HEAD_DIM * sizes.tokens * sizes.tokens
    )  # 2 products of half the scores; 2.5 times backward
    return flops / _seconds(run, device, sizes)


def _kernels(device: torch.device, sizes: Sizes) -> float:
    """Bytes that are read and written per second by quantizing to int8 and back."""
    numel = 16 * sizes.hidden_size * sizes.hidden_size // 2
    format = wire_format((ParameterShard("measured", numel, True),), 8, 256, torch.bfloat16)
    values = torch.randn(numel, device=device, dtype=torch.bfloat16)
    decoded = torch.empty_like(values)

    def run() -> None:
        format.decode(format.encode(values), out=decoded)

    return 2 * (values.nbytes + format.nbytes) / _seconds(run, device, sizes)


def _link(group: dist.ProcessGroup, device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Bytes that a rank of the group sends per second in large all-gathers, and seconds of a hop of a small one.

    All groups of the same kind at once. A group of one rank sends nothing: its rate is that of copies.
    """
    hops = max(1, group.size() - 1)

    def gather(nbytes: int) -> float:
        piece = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        of_all = torch.empty(nbytes * group.size(), dtype=torch.uint8, device=device)

        def run() -> None:
            all_gather(of_all, piece, group=group)

        return 1 / _of_all(1 / _seconds(run, device, sizes))

    small, large = gather(sizes.least_bytes), gather(sizes.most_bytes)
    latency = small / hops
    return hops * sizes.most_bytes / max(large - small, 1e-9), latency


def _seconds(run: Callable[[], None], device: torch.device, sizes: Sizes) -> float:
    """Of one call, the median of several, as often on every rank."""
    run()
    times = [_timed(run, device)]
    # Ranks agree on how often, or some would wait in a collective that others do not enter.
    repeats = min(100, max(3, int(sizes.seconds * _of_all(1 / times[0]))))
    times = [_timed(run, device) for _ in range(repeats)]
    return statistics.median(times)


def _timed(run: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _of_all(rate: float) -> float:
    """The slowest rank's: a step waits for it."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    slowest: Tensor = torch.tensor(rate, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    return float(slowest)


def _memory(device: torch.device, ranks_per_node: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_per_node
