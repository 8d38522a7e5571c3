"""A cluster's rates, measured on all of its ranks at once, as a run uses them: arithmetic, kernels, links.

A small model shows what products, attention and collectives do not explain.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.metrics.throughput import peak_tflops, synchronize
from megatron_zpp.parallel.sharding import mixed_precision
from megatron_zpp.planning.cluster import (
    GATHER,
    LATENCY_BETWEEN,
    LATENCY_WITHIN,
    REDUCTION,
    STRAIGHT,
    Cluster,
    Curve,
    curve_name,
)
from megatron_zpp.planning.costs import arithmetic
from megatron_zpp.planning.needs.rank_groups import RankGroup
from megatron_zpp.planning.needs.traffic import Exchange
from megatron_zpp.zeropp.fsdp.collectives import all_gather, reduce_scatter
from megatron_zpp.zeropp.fsdp.topology import build_topology
from megatron_zpp.zeropp.wire.format import wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard

HEAD_DIM = 64
LAYERS, VOCABULARY = 4, 1024
LEAST_TOKENS = 16  # of a model that has nearly no arithmetic
UNITS, UNIT_WIDTH = 8, 64  # the same of one without layers
SIZE_STEP = 4  # between measured sizes of collectives


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure with: those of the runs that are to be planned."""

    hidden_size: int
    tokens: int  # of a micro-batch
    least_bytes: int = 2**12  # of a collective's pieces
    most_bytes: int = 2**24
    seconds: float = 0.5  # of each measurement, at least


def measure_cluster(
    device: torch.device, ranks_per_node: int | None, sizes: Sizes, say: Callable[[str], None]
) -> Cluster:
    """Measure the cluster. Collective over all ranks, which all get the same.

    ranks_per_node: None = as they run. say: called with each result, on every rank.
    """
    world = dist.group.WORLD
    assert world is not None
    topology = build_topology(world, ranks_per_node)
    products = _products(device, sizes)
    say(f"matrix products: {products / 1e12:.4g} TFLOP/s")
    attended = _attention(device, sizes)
    say(f"attention: {attended / 1e12:.4g} TFLOP/s")
    kernels = _kernels(device, sizes)
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
    cluster = Cluster(
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
    """Return the FLOP/s of an MLP's forward and backward products."""
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
    """Return the FLOP/s of both passes of causal attention, as ``costs.arithmetic`` counts them."""
    heads = max(1, sizes.hidden_size // HEAD_DIM)
    q, k, v = (
        torch.randn(1, heads, sizes.tokens, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out.sum(), (q, k, v))

    # 2 products of half the scores; 2.5 times backward
    return 3.5 * 2 * heads * HEAD_DIM * sizes.tokens * sizes.tokens / median_seconds(run, device, sizes)


def _kernels(device: torch.device, sizes: Sizes) -> float:
    """Return the bytes per second that quantizing to int8 and back reads and writes."""
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


def measured_curves(
    groups: Mapping[RankGroup, dist.ProcessGroup], device: torch.device, sizes: Sizes
) -> dict[str, Curve]:
    """Measure every kind of collective on every kind of group."""
    # Only gloo's reductions are not as fast as gathers.
    kinds = (GATHER, STRAIGHT, REDUCTION) if dist.get_backend() == "gloo" else (GATHER, STRAIGHT)
    return {
        curve_name(kind, group): _curve(kind, process_group, device, sizes)
        for group, process_group in groups.items()
        for kind in kinds
    }


def _curve(kind: str, group: dist.ProcessGroup, device: torch.device, sizes: Sizes) -> Curve:
    """Measure a collective by bytes of a piece. All groups of the same kind run at once."""
    steps = int(math.log(sizes.most_bytes / sizes.least_bytes, SIZE_STEP))
    curve = {}
    for nbytes in (sizes.least_bytes * SIZE_STEP**step for step in range(steps + 1)):
        piece = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        pieces = torch.zeros(group.size() * piece.numel(), dtype=torch.bfloat16, device=device)
        received = torch.empty_like(pieces)
        runs: dict[str, Callable[[], Any]] = {
            GATHER: partial(all_gather, received, piece, group=group),
            STRAIGHT: partial(dist.all_to_all_single, received, pieces, group=group),
            REDUCTION: partial(reduce_scatter, piece, pieces, group=group),
        }
        curve[str(nbytes)] = median_seconds(runs[kind], device, sizes)
    return curve


def rate_and_latency(curve: Curve, ranks: int) -> tuple[float, float]:
    """Return the bytes that a rank sends per second at the best size, and the seconds of a hop of the smallest.

    A single rank sends nothing; its rate is that of copies.
    """
    hops, latency = max(1, ranks - 1), min(curve.values())
    rates = (hops * int(nbytes) / (seconds - latency) for nbytes, seconds in curve.items() if seconds > 2 * latency)
    return max(rates, default=hops * max(int(n) / s for n, s in curve.items())), latency / hops


def _time_small_gpt(
    hidden_size: int, cluster: Cluster, device: torch.device, sizes: Sizes
) -> tuple[float, float, Callable[[float], float]]:
    """Time a model that ``costs.arithmetic`` knows but for rates of the cluster. Collective.

    Return the seconds of both passes without collectives, those of clipping and the optimizer's step, and what is
    predicted for the passes by ``layer_gbytes``. Where collectives do not overlap, the model runs under FSDP2: with its
    copies, which on a CPU are much of the time.
    """
    flags = (
        f"--num-layers {LAYERS} --hidden-size {hidden_size} --seq-length {sizes.tokens} "
        f"--num-attention-heads {hidden_size // HEAD_DIM} --micro-batch-size 1 --train-iters 1 --lr 1 --bf16 "
        f"--mock-data --vocab-size {VOCABULARY - 1} --hidden-dropout 0 --attention-dropout 0 --grad-reduce-in-bf16"
    )
    settings = parse_settings(GPT, flags.split(), cluster.world_size, note=lambda _: None)
    shapes, model = (GPT.build_model(settings.model, VOCABULARY) for _ in range(2))  # the first stays on meta
    layer_numel = sum(parameter.numel() for parameter in model.layers[0].parameters())
    root_numel = sum(parameter.numel() for parameter in model.parameters()) - LAYERS * layer_numel
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    if cluster.overlaps:
        model.to(torch.bfloat16)
    else:
        for unit in (*model.layers, model):
            fully_shard(unit, mp_policy=mixed_precision(settings.precision))
    tokens = torch.randint(VOCABULARY, (1, sizes.tokens), device=device)
    positions = torch.arange(sizes.tokens, device=device).unsqueeze(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def passes() -> None:
        model.zero_grad()
        model(tokens, tokens, positions, None).mean().backward()

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def predicted(layer_gbytes: float) -> float:
        both = arithmetic(GPT, settings, replace(cluster, layer_gbytes=layer_gbytes), shapes)
        return sum(LAYERS * each.layer + each.head for each in both)

    seconds = median_seconds(passes, device, sizes)
    if not cluster.overlaps:
        seconds -= LAYERS * _sharded(cluster, 2 * layer_numel, gathers=2) + _sharded(cluster, 2 * root_numel, gathers=1)
    return seconds, median_seconds(step, device, sizes), predicted


def with_layers(cluster: Cluster, device: torch.device, sizes: Sizes) -> Cluster:
    """Add what the program takes for a layer, and the rate of what is between matrix products.

    The first is measured by a model of nearly no arithmetic, the second by one as wide as what is to be planned.
    """
    *smallest, _ = _time_small_gpt(HEAD_DIM, cluster, device, replace(sizes, tokens=LEAST_TOKENS))
    passes, step = (1e6 * max(0.0, seconds) / LAYERS for seconds in smallest)
    cluster = replace(cluster, layer_microseconds=passes, step_microseconds=step)
    seconds, _, predicted = _time_small_gpt(sizes.hidden_size, cluster, device, sizes)
    products = predicted(1e12)
    # Where products alone seem to take longer than the model, the rest is as fast as other kernels.
    gbytes = (predicted(1.0) - products) / (seconds - products) if seconds > products else cluster.kernel_gbytes
    return replace(cluster, layer_gbytes=min(gbytes, cluster.kernel_gbytes))


def _sharded(cluster: Cluster, nbytes: int, gathers: int) -> float:
    """Return the seconds of the collectives of one FSDP2 unit: ``gathers``, and one reduction."""
    ranks = RankGroup(cluster.nodes, cluster.gpus_per_node)
    gather = Exchange(ranks, nbytes // ranks.size)
    reduction = replace(gather, passes=cluster.ring_passes)
    return gathers * cluster.exchange_seconds(gather) + cluster.exchange_seconds(reduction)


def entry_seconds(cluster: Cluster, device: torch.device, sizes: Sizes) -> float:
    """Return what FSDP2 adds to a collective: hooks, and waiting for the last rank. Collective.

    It is measured on units so small that there is nearly no arithmetic.
    """
    model = nn.Sequential(*(nn.Linear(UNIT_WIDTH, UNIT_WIDTH, bias=False) for _ in range(UNITS))).to(device)
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    x = torch.randn(1, UNIT_WIDTH, device=device)
    measured = median_seconds(lambda: model(x).sum().backward(), device, sizes)
    # Weights are gathered for the forward and for the backward pass.
    collectives = UNITS * _sharded(cluster, UNIT_WIDTH * UNIT_WIDTH * torch.float32.itemsize, gathers=2)
    return max(0.0, measured - collectives) / (3 * UNITS)


def median_seconds(run: Callable[[], Any], device: torch.device, sizes: Sizes) -> float:
    """Return the median seconds of one call on the slowest rank, for which a step waits. Collective."""
    run()
    times = [_timed(run, device)]
    # Ranks agree on how often, or some would wait in a collective that others do not enter.
    repeats = min(100, max(3, int(sizes.seconds / _slowest(times[0]))))
    return _slowest(statistics.median(_timed(run, device) for _ in range(repeats)))


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def _slowest(seconds: float) -> float:
    most = torch.tensor(seconds, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)
