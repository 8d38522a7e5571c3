"""A cluster's rates, measured on all of its ranks at once, as a run uses them: arithmetic, kernels, links."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_zpp.metrics.throughput import peak_tflops
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.curves import GATHER, curve_name
from megatron_zpp.planning.hardware import LATENCY_BETWEEN, LATENCY_WITHIN
from megatron_zpp.planning.measure_collectives import measured_curves, rate_and_latency
from megatron_zpp.planning.measure_model import HEAD_DIM, entry_seconds, with_layers
from megatron_zpp.planning.needs.rank_groups import RankGroup
from megatron_zpp.planning.stopwatch import Sizes, median_seconds, slowest
from megatron_zpp.zeropp.fsdp.topology import build_topology
from megatron_zpp.zeropp.wire.format import wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard


def measure_cluster(
    device: torch.device, ranks_per_node: int | None, sizes: Sizes, say: Callable[[str], None]
) -> ClusterSpec:
    """Collective over all ranks, each of which gets the same. say: called with each result, on every rank.

    ranks_per_node: None = as they run.
    """
    world = dist.group.WORLD
    assert world is not None
    topology = build_topology(world, ranks_per_node)
    products = slowest(_products(device, sizes))
    say(f"matrix products: {products / 1e12:.4g} TFLOP/s")
    attended = slowest(_attention(device, sizes))
    say(f"attention: {attended / 1e12:.4g} TFLOP/s")
    kernels = slowest(_kernels(device, sizes))
    say(f"encoding and decoding: {kernels / 1e9:.4g} GB/s")
    nodes, ranks_per_node = topology.num_nodes, topology.ranks_per_node
    groups = {
        RankGroup(1, ranks_per_node): topology.intra_group,
        RankGroup(nodes, 1): topology.inter_group,
        RankGroup(nodes, ranks_per_node): world,
    }
    curves = measured_curves(groups, device, sizes)
    within, within_latency = rate_and_latency(curves[curve_name(GATHER, RankGroup(1, ranks_per_node))], ranks_per_node)
    between, between_latency = rate_and_latency(curves[curve_name(GATHER, RankGroup(nodes, 1))], nodes)
    say(f"within a node: {within / 1e9:.4g} GB/s a rank, {within_latency * 1e6:.4g} microseconds a hop")
    gbits = 8e-9 * between * ranks_per_node  # all local ranks sent at once
    say(f"between nodes: {gbits:.4g} Gbit/s out of a node, {between_latency * 1e6:.4g} microseconds a hop")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    fastest = max(products, attended) / 1e12
    peak = max(peak_tflops(name) or fastest, fastest)
    cluster = ClusterSpec(
        nodes,
        ranks_per_node,
        name,
        peak_tflops=peak,
        efficiency=products / 1e12 / peak,
        attention_efficiency=attended / 1e12 / peak,
        memory_gb=_memory(device, ranks_per_node) / 1e9,
        kernel_gbytes=kernels / 1e9,
        within_gbytes=within / 1e9,
        between_gbits=gbits,
        within_microseconds=within_latency * 1e6 if ranks_per_node > 1 else LATENCY_WITHIN,
        between_microseconds=between_latency * 1e6 if nodes > 1 else LATENCY_BETWEEN,
        overlaps=dist.get_backend() != "gloo",
        ring_passes=2 if dist.get_backend() == "gloo" else 1,
        collective_seconds=curves,
    )
    if not cluster.overlaps:
        cluster = replace(cluster, entry_microseconds=1e6 * entry_seconds(cluster, device, sizes))
        say(f"ranks wait for each other at a collective for {cluster.entry_microseconds:.4g} microseconds")
    cluster = with_layers(cluster, device, sizes)
    say(f"between matrix products: {cluster.layer_gbytes:.4g} GB/s")
    passes, step = cluster.layer_microseconds, cluster.step_microseconds
    say(f"the program itself takes {passes:.4g} microseconds for a layer's passes, and {step:.4g} for its step")
    return cluster


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

    return 3 * 2 * tokens * width * 4 * width / median_seconds(run, device, sizes)


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
    return flops / median_seconds(run, device, sizes)


def _kernels(device: torch.device, sizes: Sizes) -> float:
    """Bytes that are read and written per second by quantizing to int8 and back."""
    numel = 16 * sizes.hidden_size * sizes.hidden_size // 2
    format = wire_format((ParameterShard("measured", numel, True),), 8, 256, torch.bfloat16)
    values = torch.randn(numel, device=device, dtype=torch.bfloat16)
    decoded = torch.empty_like(values)

    def run() -> None:
        format.decode(format.encode(values), out=decoded)

    return 2 * (values.nbytes + format.nbytes) / median_seconds(run, device, sizes)


def _memory(device: torch.device, ranks_per_node: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks_per_node
