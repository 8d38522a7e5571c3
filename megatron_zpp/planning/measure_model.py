"""What a small model takes on a cluster that products, attention and collectives do not explain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.sharding import mixed_precision
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.costs import arithmetic
from megatron_zpp.planning.needs.exchanges import Exchange
from megatron_zpp.planning.needs.rank_groups import RankGroup
from megatron_zpp.planning.stopwatch import Sizes, median_seconds, slowest
from megatron_zpp.settings.resolved import ResolvedSettings

HEAD_DIM = 64
LAYERS, VOCABULARY = 4, 1024
LEAST_TOKENS = 16  # of a model that has nearly no arithmetic
UNITS, UNIT_WIDTH = 8, 64  # the same of one without layers


@dataclass(frozen=True)
class SmallGPT:
    """A model whose time is known to ``costs.arithmetic`` but for rates of the cluster."""

    hidden_size: int
    cluster: ClusterSpec
    device: torch.device
    sizes: Sizes

    @cached_property
    def settings(self) -> ResolvedSettings:
        flags = (
            f"--num-layers {LAYERS} --hidden-size {self.hidden_size} --seq-length {self.sizes.tokens} "
            f"--num-attention-heads {self.hidden_size // HEAD_DIM} --micro-batch-size 1 --train-iters 1 --lr 1 --bf16 "
            f"--mock-data --vocab-size {VOCABULARY - 1} --hidden-dropout 0 --attention-dropout 0 --grad-reduce-in-bf16"
        )
        return parse_settings(GPT, flags.split(), self.cluster.world_size, note=lambda _: None)

    @cached_property
    def planned(self) -> Transformer:
        """Of which only the shapes exist."""
        return GPT.build_model(self.settings.model, VOCABULARY)

    def measured(self) -> tuple[float, float]:
        """Seconds of forward and backward pass without collectives, and of clipping and the optimizer's step.

        Where collectives do not overlap, under FSDP2: with its copies, which on a CPU are much of it.
        """
        cluster, device = self.cluster, self.device
        model = GPT.build_model(self.settings.model, VOCABULARY)
        numel = sum(parameter.numel() for parameter in model.parameters())
        of_layer = sum(parameter.numel() for parameter in model.layers[0].parameters())
        model.to_empty(device=device)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        if cluster.overlaps:
            model.to(torch.bfloat16)
        for unit in () if cluster.overlaps else (*model.layers, model):
            fully_shard(unit, mp_policy=mixed_precision(self.settings.precision))
        tokens = torch.randint(VOCABULARY, (1, self.sizes.tokens), device=device)
        positions = torch.arange(self.sizes.tokens, device=device).unsqueeze(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

        def passes() -> None:
            model.zero_grad()
            model(tokens, tokens, positions, None).mean().backward()

        def step() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        seconds = 1 / slowest(1 / median_seconds(passes, device, self.sizes))
        if not cluster.overlaps:
            of_root = numel - LAYERS * of_layer
            seconds -= LAYERS * _sharded(cluster, 2 * of_layer, gathers=2) + _sharded(cluster, 2 * of_root, gathers=1)
        return seconds, 1 / slowest(1 / median_seconds(step, device, self.sizes))

    def predicted(self, layer_gbytes: float) -> float:
        """Of the two passes."""
        cluster = replace(self.cluster, layer_gbytes=layer_gbytes)
        both = arithmetic(GPT, self.settings, cluster, self.planned)
        return sum(LAYERS * each.layer + each.head for each in both)


def with_layers(cluster: ClusterSpec, device: torch.device, sizes: Sizes) -> ClusterSpec:
    """With what the program itself takes for a layer, by a model of nearly no arithmetic; and the rate of all that is
    between matrix products, by one as wide as what is to be planned.
    """
    smallest = SmallGPT(HEAD_DIM, cluster, device, replace(sizes, tokens=LEAST_TOKENS))
    of_passes, of_step = (max(0.0, seconds) / LAYERS for seconds in smallest.measured())
    cluster = replace(cluster, layer_microseconds=1e6 * of_passes, step_microseconds=1e6 * of_step)
    model = SmallGPT(sizes.hidden_size, cluster, device, sizes)
    seconds, products = model.measured()[0], model.predicted(1e12)
    # Where products alone seem to take longer than the model, the rest is as fast as other kernels.
    gbytes = (model.predicted(1.0) - products) / (seconds - products) if seconds > products else cluster.kernel_gbytes
    return replace(cluster, layer_gbytes=min(gbytes, cluster.kernel_gbytes))


def _sharded(cluster: ClusterSpec, nbytes: int, gathers: int) -> float:
    """Seconds of the collectives of one FSDP2 unit of so many bytes: gathers, and a reduction."""
    ranks = RankGroup(cluster.nodes, cluster.gpus_per_node)
    gather = Exchange(ranks, nbytes // ranks.size)
    return gathers * cluster.seconds_of(gather) + cluster.seconds_of(replace(gather, passes=cluster.ring_passes))


def entry_seconds(cluster: ClusterSpec, device: torch.device, sizes: Sizes) -> float:
    """Seconds that a collective takes under FSDP2 beyond its own: hooks, and waiting for the last rank to come.

    Of units so small that there is nearly no arithmetic.
    """
    model = nn.Sequential(*(nn.Linear(UNIT_WIDTH, UNIT_WIDTH, bias=False) for _ in range(UNITS))).to(device)
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    x = torch.randn(1, UNIT_WIDTH, device=device)
    measured = 1 / slowest(1 / median_seconds(lambda: model(x).sum().backward(), device, sizes))
    # Weights are gathered for the forward and for the backward pass.
    of_collectives = UNITS * _sharded(cluster, UNIT_WIDTH * UNIT_WIDTH * torch.float32.itemsize, gathers=2)
    return max(0.0, measured - of_collectives) / (3 * UNITS)
