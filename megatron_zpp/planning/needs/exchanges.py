"""Every collective that the FSDP2 units of a run would cause, in bytes of the wire formats.

``planning/needs/estimate.py`` adds them up, and ``planning`` puts them in the order of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_zpp.parallel.pipeline import sharding_stage
from megatron_zpp.parallel.sharding import mixed_precision
from megatron_zpp.planning.needs.planned_units import PlannedUnit
from megatron_zpp.planning.needs.rank_groups import RankGroup
from megatron_zpp.settings.resolved import ResolvedSettings


@dataclass(frozen=True)
class Exchange:
    """A collective of one group: a ring over its ranks in order, or pieces that each rank sends straight to all others.

    Bytes are the same, and counted as ``zeropp.collectives.count_flat_ring`` does.
    """

    group: RankGroup
    nbytes: int  # of a piece
    passes: int = 1  # 2: an all-reduce, which is a reduce-scatter and a gather
    is_straight: bool = False  # no ring

    @property
    def sent(self) -> int:
        """Bytes that a rank sends."""
        return self.passes * (self.group.size - 1) * self.nbytes

    @property
    def sent_between_nodes(self) -> int:
        """By all ranks of the group; of a ring only a node's last one has a successor on another node."""
        if self.is_straight:
            return self.group.size * (self.group.size - self.group.ranks_per_node) * self.nbytes
        return self.group.nodes * self.sent if self.group.nodes > 1 else 0

    @property
    def sent_within_nodes(self) -> int:
        return self.group.size * self.sent - self.sent_between_nodes


@dataclass(frozen=True)
class UnitExchanges:
    """The collectives of one unit in a step of many that are alike; None: there is none."""

    unit: PlannedUnit
    gathers: int  # so often are its weights gathered in a step
    reductions: int  # and its gradients reduced
    weights_between: Exchange | None  # hpZ's, once per step
    gather: Exchange
    reduce: Exchange | None
    gradients_between: Exchange | None  # qgZ's, once per step
    all_reduce: Exchange | None  # of HSDP's replicas, once per step

    def of_weights(self) -> Iterator[tuple[Exchange, int]]:
        """Each with how often it runs in a step."""
        if self.weights_between is not None:
            yield self.weights_between, 1
        yield self.gather, self.gathers

    def of_gradients(self) -> Iterator[tuple[Exchange, int]]:
        if self.reduce is not None:
            yield self.reduce, self.reductions
        for once in (self.gradients_between, self.all_reduce):
            if once is not None:
                yield once, 1


def exchanges_of(
    settings: ResolvedSettings, unit: PlannedUnit, micro_batches: int, ring_passes: int, replicas: RankGroup | None
) -> UnitExchanges:
    """What ``apply_zeropp`` and FSDP2 would send for a unit.

    ring_passes: of an unquantized reduce-scatter: gloo's is an all-reduce, 2. replicas: the ranks with the same shard.
    """
    config, stage = settings.zeropp, zero_stage_of(settings)
    weights, gradients = travelling_dtypes(settings)
    group, part, formats = unit.group, unit.part, unit.formats(config)
    weights_between = reduce = gradients_between = None
    gather = Exchange(group, weights.itemsize * part.numel)
    if formats.has_secondary_partition:
        sent = formats.differences if formats.sends_differences else formats.weights
        weights_between = Exchange(group.between_nodes, sent(part, weights).nbytes)
        within_node = formats.weights_within_node(part, weights)
        passed_on = within_node.nbytes if within_node is not None else gather.nbytes
        gather = Exchange(group.within_node, group.nodes * passed_on)
    elif config.quantized_weights:
        gather = Exchange(group, formats.weights(part, weights).nbytes)
    if not config.quantized_gradients:
        reduce = Exchange(group, gradients.itemsize * part.numel, ring_passes)
    else:
        if group.ranks_per_node > 1:
            pieces = group.nodes * formats.gradients_within_node(part, gradients).nbytes
            reduce = Exchange(group.within_node, pieces, is_straight=True)
        if group.nodes > 1:
            sum_bytes = formats.gradients_between_nodes(part, gradients).nbytes
            gradients_between = Exchange(group.between_nodes, sum_bytes, is_straight=True)
    all_reduce = None
    if replicas is not None:
        all_reduce = Exchange(replicas, math.ceil(gradients.itemsize * unit.numel / replicas.size), passes=2)
    # Layers are gathered for each forward and backward pass, the others stay gathered between the two.
    gathers = (2 if unit.layer is not None else 1) * micro_batches if stage == 3 else 1
    reductions = micro_batches if stage >= 2 else 1
    return UnitExchanges(unit, gathers, reductions, weights_between, gather, reduce, gradients_between, all_reduce)


def zero_stage_of(settings: ResolvedSettings) -> int:
    """Of ``settings``, or what the pipeline's schedule makes of it."""
    return sharding_stage(settings.zero.zero_stage, settings.distributed.pipeline_schedule)


def travelling_dtypes(settings: ResolvedSettings) -> tuple[torch.dtype, torch.dtype]:
    """What weights travel and compute in, and what unquantized gradients travel in."""
    policy = mixed_precision(settings.precision)
    return policy.param_dtype or torch.float32, policy.reduce_dtype or torch.float32
