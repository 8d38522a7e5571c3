"""Every collective that the FSDP2 units of a run would cause, in bytes of the wire formats.

``training/estimate.py`` adds them up, and ``planning`` puts them in the order of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_zpp.parallel.pipeline import sharding_stage
from megatron_zpp.settings.groups import Settings
from megatron_zpp.training.model import mixed_precision
from megatron_zpp.training.planned_units import PlannedUnit
from megatron_zpp.training.rank_groups import RankGroup
from megatron_zpp.zeropp.config import SCALE_DTYPES, ZeroPPConfig
from megatron_zpp.zeropp.wire_format import WireFormat, wire_format


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
    settings: Settings, unit: PlannedUnit, micro_batches: int, ring_passes: int, replicas: RankGroup | None
) -> UnitExchanges:
    """What ``apply_zeropp`` and FSDP2 would send for a unit.

    ring_passes: of an unquantized reduce-scatter: gloo's is an all-reduce, 2. replicas: the ranks with the same shard.
    """
    config, stage = settings.zeropp, zero_stage_of(settings)
    weights, gradients = travelling_dtypes(settings)
    group, has_hierarchy = unit.group, config.hpz_partition_size > 1 and unit.group.nodes > 1
    weights_between = reduce = gradients_between = None
    gather = Exchange(group, weights.itemsize * unit.numel)
    if has_hierarchy:
        weights_between = Exchange(group.between_nodes, weights_format(config, unit, weights).nbytes)
        gather = Exchange(group.within_node, group.nodes * _within_node_bytes(config, unit, weights))
    elif config.quantized_weights:
        gather = Exchange(group, _in_full(config, unit, weights).nbytes)
    if not config.quantized_gradients:
        reduce = Exchange(group, gradients.itemsize * unit.numel, ring_passes)
    else:
        if group.ranks_per_node > 1:
            pieces = group.nodes * _gradients_within_node_format(config, unit, gradients).nbytes
            reduce = Exchange(group.within_node, pieces, is_straight=True)
        if group.nodes > 1:
            sent = gradients_format(config, unit, gradients).nbytes
            gradients_between = Exchange(group.between_nodes, sent, is_straight=True)
    all_reduce = None
    if replicas is not None:
        all_reduce = Exchange(replicas, math.ceil(gradients.itemsize * unit.numel / replicas.size), passes=2)
    # Layers are gathered for each forward and backward pass, the others stay gathered between the two.
    gathers = (2 if unit.layer is not None else 1) * micro_batches if stage == 3 else 1
    reductions = micro_batches if stage >= 2 else 1
    return UnitExchanges(unit, gathers, reductions, weights_between, gather, reduce, gradients_between, all_reduce)


def zero_stage_of(settings: Settings) -> int:
    """Of ``settings``, or what the pipeline's schedule makes of it."""
    return sharding_stage(settings.zero.zero_stage, settings.distributed.pipeline_schedule)


def travelling_dtypes(settings: Settings) -> tuple[torch.dtype, torch.dtype]:
    """What weights travel and compute in, and what unquantized gradients travel in."""
    policy = mixed_precision(settings.precision)
    return policy.param_dtype or torch.float32, policy.reduce_dtype or torch.float32


def weights_format(config: ZeroPPConfig, unit: PlannedUnit, dtype: torch.dtype) -> WireFormat:
    """As a step's weights travel between nodes once their bits have warmed up."""
    if config.weight_difference_bits is None:
        return _in_full(config, unit, dtype)
    bits, size = config.weight_difference_bits, config.weight_difference_block_size
    return wire_format(
        unit.shards, bits, size, dtype, config.weight_difference_scaling, SCALE_DTYPES[config.scale_dtype]
    )


def gradients_format(config: ZeroPPConfig, unit: PlannedUnit, dtype: torch.dtype) -> WireFormat:
    """As a step's gradients travel between nodes once their bits have warmed up."""
    bits, size, scaling = config.gradient_bits, config.gradient_block_size, config.gradient_scaling
    return wire_format(unit.shards, bits, size, config.sums_dtype(dtype), scaling, SCALE_DTYPES[config.scale_dtype])


def _gradients_within_node_format(config: ZeroPPConfig, unit: PlannedUnit, dtype: torch.dtype) -> WireFormat:
    bits, size, scaling = config.gradient_intra_bits, config.gradient_block_size, config.gradient_intra_scaling
    return wire_format(unit.shards, bits, size, dtype, scaling, SCALE_DTYPES[config.scale_dtype])


def _in_full(config: ZeroPPConfig, unit: PlannedUnit, dtype: torch.dtype) -> WireFormat:
    """Of the weights themselves, not of differences."""
    bits = config.weight_bits if config.quantized_weights else None
    scale_dtype = SCALE_DTYPES[config.scale_dtype]
    return wire_format(unit.shards, bits, config.weight_block_size, dtype, config.weight_scaling, scale_dtype)


def secondary_bytes(config: ZeroPPConfig, unit: PlannedUnit, dtype: torch.dtype) -> int:
    """Of one node's shard in hpZ's secondary partition, as a rank keeps it."""
    if config.hpz_secondary_dtype == "int8":
        return _in_full(config, unit, dtype).nbytes
    return dtype.itemsize * unit.numel


def _within_node_bytes(config: ZeroPPConfig, unit: PlannedUnit, dtype: torch.dtype) -> int:
    """The same, as ranks of a node pass it on."""
    if config.weight_intra_bits is None:
        return secondary_bytes(config, unit, dtype)
    size, scaling = config.weight_block_size, config.weight_intra_scaling
    return wire_format(
        unit.shards, config.weight_intra_bits, size, dtype, scaling, SCALE_DTYPES[config.scale_dtype]
    ).nbytes
