"""Measure the cluster that a run has, on all of its ranks at once: arithmetic, kernels, links."""

import itertools
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.metrics.throughput import peak_tflops, synchronize
from megatron_zpp.models.bf16_products import prepare_products
from megatron_zpp.parallel.distributed import print_once
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
from megatron_zpp.planning.needs.division import RankGroup
from megatron_zpp.planning.needs.traffic import Exchange
from megatron_zpp.planning.step import arithmetic
from megatron_zpp.zeropp.fsdp.collectives import all_gather, reduce_scatter
from megatron_zpp.zeropp.fsdp.topology import Topology, build_topology
from megatron_zpp.zeropp.wire.format import wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard

HEAD_DIM = 64
LAYERS, VOCABULARY = 4, 1024
LEAST_TOKENS = 16  # for a model with nearly no arithmetic
UNITS, UNIT_WIDTH = 8, 64  # linear layers with nearly no arithmetic
SIZE_STEP = 4  # between measured sizes of collectives


@dataclass(frozen=True)
class Options:
    """How to measure: sizes of the runs to plan, the device."""

    device: torch.device
    hidden_size: int
    tokens: int  # per micro-batch
    least_bytes: int = 2**12  # smallest piece of a collective
    most_bytes: int = 2**24
    seconds: float = 0.5  # per measurement, at least
    least_repeats: int = 3
    most_seconds: float = math.inf  # a collective that takes longer is the largest one measured
    is_brief: bool = False  # leave out kinds of collectives that no recipe has in a group


def measure_cluster(ranks_per_node: int | None, options: Options) -> Cluster:
    """Measure each rate. Collective; returns the same on all ranks. ranks_per_node: None = as they run."""
    world, device = dist.group.WORLD, options.device
    assert world is not None
    topology = build_topology(world, ranks_per_node)
    prepare_products(device)
    products, attended, kernels = _measure_rates(options)
    links, ranks_per_node = measure_links(topology, options), topology.ranks_per_node
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), float(torch.cuda.get_device_properties(device).total_memory)
    else:
        name, memory = "CPU", host_bytes / ranks_per_node
    fastest = max(products, attended) / 1e12
    peak = max(peak_tflops(name) or fastest, fastest)
    cluster = Cluster(
        topology.num_nodes,
        ranks_per_node,
        name,
        peak_tflops=peak,
        efficiency=products / 1e12 / peak,
        attention_efficiency=attended / 1e12 / peak,
        memory_gb=memory / 1e9,
        kernel_gbytes=kernels / 1e9,
        host_gb=host_bytes / 1e9,
        ring_passes=2 if dist.get_backend() == "gloo" else 1,
        **links,
    )
    cluster = replace(cluster, entry_microseconds=1e6 * _entry_seconds(cluster, options))
    return _with_layers(cluster, topology.intra_group, options)


def measure_links(topology: Topology, options: Options) -> dict[str, Any]:
    """Measure collectives; return what they say of the links, as fields of ``Cluster``. Collective."""
    nodes, ranks_per_node = topology.num_nodes, topology.ranks_per_node
    one_node, same_local_rank = RankGroup(1, ranks_per_node), RankGroup(nodes, 1)
    groups = {one_node: topology.intra_group, same_local_rank: topology.inter_group}
    curves = _measure_curves(groups | {RankGroup(nodes, ranks_per_node): topology.group}, options)
    within, within_latency = _rate_and_latency(curves[curve_name(GATHER, one_node)], ranks_per_node)
    between, between_latency = _rate_and_latency(curves[curve_name(GATHER, same_local_rank)], nodes)
    return dict(
        within_gbytes=within / 1e9,
        between_gbits=8e-9 * between * ranks_per_node,  # all local ranks sent at once
        within_microseconds=within_latency * 1e6 if ranks_per_node > 1 else LATENCY_WITHIN,
        between_microseconds=between_latency * 1e6 if nodes > 1 else LATENCY_BETWEEN,
        collective_seconds=curves,
    )


def _measure_rates(options: Options) -> tuple[float, float, float]:
    """Measure the FLOP/s of matrix products and attention in both passes, and the bytes per second of quantization."""
    tokens, width = options.tokens, options.hidden_size
    random = partial(torch.randn, device=options.device, dtype=torch.bfloat16)
    x, up, gradient = random(tokens, width), random(4 * width, width), random(tokens, 4 * width)
    mlp_seconds = _median_seconds(lambda: (F.linear(x, up), gradient @ up, gradient.T @ x), options)
    heads = max(1, width // HEAD_DIM)
    q, k, v = (random(1, heads, tokens, HEAD_DIM, requires_grad=True) for _ in range(3))

    def attend() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out.sum(), (q, k, v))

    attention_seconds = _median_seconds(attend, options)
    values = random(16 * width * width // 2)
    format = wire_format((ParameterShard("measured", values.numel(), True),), 8, 256, torch.bfloat16)
    decoded = torch.empty_like(values)
    quantization_seconds = _median_seconds(lambda: format.decode(format.encode(values), out=decoded), options)
    return (
        3 * 2 * tokens * width * 4 * width / mlp_seconds,
        # 2 products of half the scores; 2.5 times backward, as ``step.arithmetic`` counts
        3.5 * 2 * heads * HEAD_DIM * tokens * tokens / attention_seconds,
        2 * (values.nbytes + format.nbytes) / quantization_seconds,
    )


def _measure_curves(groups: Mapping[RankGroup, dist.ProcessGroup], options: Options) -> dict[str, Curve]:
    """Measure every kind of collective on every kind of group. All groups of the same kind run at once."""
    # Only gloo's reductions are slower than gathers.
    kinds = (GATHER, STRAIGHT, REDUCTION) if dist.get_backend() == "gloo" else (GATHER, STRAIGHT)
    steps = int(math.log(options.most_bytes / options.least_bytes, SIZE_STEP))
    curves: dict[str, Curve] = {}
    for (shape, group), kind in itertools.product(groups.items(), kinds):
        if options.is_brief and kind == (
            REDUCTION if shape.nodes == 1 else STRAIGHT if shape.ranks_per_node > 1 else None
        ):
            continue
        curve = {}
        for nbytes in (options.least_bytes * SIZE_STEP**step for step in range(steps + 1)):
            piece = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=options.device)
            pieces = torch.zeros(group.size() * piece.numel(), dtype=torch.bfloat16, device=options.device)
            received = torch.empty_like(pieces)
            runs: dict[str, Callable[[], Any]] = {
                GATHER: partial(all_gather, received, piece, group=group),
                STRAIGHT: partial(dist.all_to_all_single, received, pieces, group=group),
                REDUCTION: partial(reduce_scatter, piece, pieces, group=group),
            }
            curve[str(nbytes)] = _median_seconds(runs[kind], options)
            if curve[str(nbytes)] > options.most_seconds:
                break
        curves[curve_name(kind, shape)] = curve
    return curves


def _rate_and_latency(curve: Curve, ranks: int) -> tuple[float, float]:
    """Return a rank's bytes per second at the best size (of copies if it is alone), and the least seconds of a hop."""
    hops, latency = max(1, ranks - 1), min(curve.values())
    rates = (hops * int(nbytes) / (seconds - latency) for nbytes, seconds in curve.items() if seconds > 2 * latency)
    return max(rates, default=hops * max(int(n) / s for n, s in curve.items())), latency / hops


def _time_small_gpt(
    cluster: Cluster, node: dist.ProcessGroup, options: Options
) -> tuple[float, float, Callable[[float], float]]:
    """Time a model whose arithmetic ``step.arithmetic`` predicts. Collective.

    Return the seconds of both passes without collectives, of clipping and the optimizer's step, and a prediction
    for the passes by ``layer_gbytes``. The model runs under FSDP2, whose copies take much time on a CPU. A node's
    ranks shard it: FSDP2 hides less of their short collectives behind arithmetic than of slow ones between nodes.
    """
    flags = (
        f"--num-layers {LAYERS} --hidden-size {options.hidden_size} --seq-length {options.tokens} "
        f"--num-attention-heads {options.hidden_size // HEAD_DIM} --micro-batch-size 1 --train-iters 1 --lr 1 --bf16 "
        f"--mock-data --vocab-size {VOCABULARY - 1} --hidden-dropout 0 --attention-dropout 0 --grad-reduce-in-bf16"
    )
    settings = parse_settings(GPT, flags.split(), cluster.world_size, note=lambda _: None)
    shapes, model = (GPT.build_model(settings.model, VOCABULARY) for _ in range(2))  # shapes stays on meta
    layer_numel = sum(parameter.numel() for parameter in model.layers[0].parameters())
    root_numel = sum(parameter.numel() for parameter in model.parameters()) - LAYERS * layer_numel
    model.to_empty(device=options.device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    mesh = DeviceMesh.from_group(node, options.device.type)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=mixed_precision(settings.precision))
    tokens = torch.randint(VOCABULARY, (1, options.tokens), device=options.device)
    positions = torch.arange(options.tokens, device=options.device).unsqueeze(0)
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

    shards = RankGroup(1, cluster.gpus_per_node)
    sent = LAYERS * _sharded(cluster, shards, 2 * layer_numel, gathers=2)
    sent += _sharded(cluster, shards, 2 * root_numel, gathers=1)
    return _median_seconds(passes, options) - sent, _median_seconds(step, options), predicted


def _with_layers(cluster: Cluster, node: dist.ProcessGroup, options: Options) -> Cluster:
    """Add the program's own time, by a model with nearly no arithmetic, and the rate of work between products."""
    *smallest, _ = _time_small_gpt(cluster, node, replace(options, hidden_size=HEAD_DIM, tokens=LEAST_TOKENS))
    passes, step = (1e6 * max(0.0, seconds) / LAYERS for seconds in smallest)
    cluster = replace(cluster, layer_microseconds=passes, step_microseconds=step)
    seconds, _, predicted = _time_small_gpt(cluster, node, options)
    if seconds <= 0 and not options.is_brief:
        print_once("note: FSDP2 hides collectives of the small GPT, whose own time is unknown: give more --tokens")
    products = predicted(1e12)
    # If products alone seem to take longer than the model, assume that the rest is as fast as other kernels.
    gbytes = (predicted(1.0) - products) / (seconds - products) if seconds > products else cluster.kernel_gbytes
    return replace(cluster, layer_gbytes=min(gbytes, cluster.kernel_gbytes))


def _sharded(cluster: Cluster, ranks: RankGroup, nbytes: int, gathers: int) -> float:
    """Return the seconds of the collectives of one FSDP2 unit over ``ranks``: ``gathers``, and one reduction."""
    gather = Exchange(ranks, nbytes // ranks.size)
    reduction = replace(gather, passes=cluster.ring_passes)
    return gathers * cluster.exchange_seconds(gather) + cluster.exchange_seconds(reduction)


def _entry_seconds(cluster: Cluster, options: Options) -> float:
    """Measure what FSDP2 adds to a collective, hooks and waiting for the last rank, on tiny units. Collective."""
    model = nn.Sequential(*(nn.Linear(UNIT_WIDTH, UNIT_WIDTH, bias=False) for _ in range(UNITS))).to(options.device)
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    x = torch.randn(1, UNIT_WIDTH, device=options.device)
    measured = _median_seconds(lambda: model(x).sum().backward(), options)
    # Weights are gathered for both passes.
    ranks = RankGroup(cluster.nodes, cluster.gpus_per_node)
    collectives = UNITS * _sharded(cluster, ranks, UNIT_WIDTH * UNIT_WIDTH * torch.float32.itemsize, gathers=2)
    return max(0.0, measured - collectives) / (3 * UNITS)


def _median_seconds(run: Callable[[], Any], options: Options) -> float:
    """Return the median seconds of one call on the slowest rank, for which a step waits. Collective."""

    def timed() -> float:
        synchronize(options.device)
        start = time.perf_counter()
        run()
        synchronize(options.device)
        return time.perf_counter() - start

    def slowest(seconds: float) -> float:
        most = torch.tensor(seconds, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return float(most)

    run()
    # Ranks agree on the number of calls, or some would wait in a collective that others do not enter.
    repeats = min(100, max(options.least_repeats, int(options.seconds / slowest(timed()))))
    return slowest(statistics.median(timed() for _ in range(repeats)))
