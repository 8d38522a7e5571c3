"""torch.distributed's flat collectives under one name for all supported versions, and the plain ones with counters."""

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .find_units import set_all_reduce_hook
from .fsdp_unit import FSDPUnit, GradientReduction, WeightGather
from .shared import Shared, Traffic
from .topology import Topology

# torch 2.13 renamed these two; the old names still work there but warn.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class PlainAllGather(WeightGather):
    """FSDP2's own all-gather, counted."""

    def __init__(self, unit: FSDPUnit, shared: Shared) -> None:
        self.unit, self.shared = unit, shared

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        count_flat_ring(self.shared.traffic, self.unit.topology, input_tensor.nbytes, self.unit.stays_gathered)
        with self.shared.waits.collective("gather", self.unit.label, crosses_nodes=self.unit.topology.num_nodes > 1):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class PlainReduceScatter(GradientReduction):
    """FSDP2's own reduce-scatter, counted."""

    def __init__(self, unit: FSDPUnit, shared: Shared) -> None:
        self.unit, self.shared = unit, shared

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        # Not every loop marks the last micro-batch, so this does not mean that the unit has trained. A loop may mark it
        # between the forward and the backward pass.
        self.shared.position.set_is_last(self.unit.is_last_backward)
        self.shared.position.mark_reduced()
        count_reduce_scatter(self.shared.traffic, self.unit.topology, output_tensor)
        with self.shared.waits.collective("reduce", self.unit.label, crosses_nodes=self.unit.topology.num_nodes > 1):
            return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def count_reduce_scatter(traffic: Traffic, layout: Topology, output: Tensor) -> None:
    """Count the plain reduce-scatter to ``output`` [L]."""
    # gloo's is an all-reduce, that is a ring's reduce-scatter and its all-gather.
    passes = 2 if output.device.type == "cpu" else 1
    count_flat_ring(traffic, layout, passes * output.nbytes)


def count_all_reduce(traffic: Traffic, layout: Topology, nbytes: int) -> None:
    """Count an all-reduce of ``nbytes``: a ring's reduce-scatter and its all-gather."""
    count_flat_ring(traffic, layout, 2 * math.ceil(nbytes / layout.world_size))


def count_all_reduces(unit: FSDPUnit, traffic: Traffic) -> None:
    """Count FSDP2's own all-reduces of the unit's gradients over its replicas, if it has any (HSDP)."""
    replicas = unit.replicas
    if replicas is not None:
        set_all_reduce_hook(unit, lambda reduced: count_all_reduce(traffic, replicas, reduced.nbytes))


def count_flat_ring(traffic: Traffic, layout: Topology, nbytes: int, stays: bool = False) -> None:
    """Count a ring over all W ranks in rank order, in which each rank passes W - 1 pieces of ``nbytes`` on.

    Only the last rank of a node has its successor on another node. ``stays``: see ``Traffic.add``.
    """
    sent = (layout.world_size - 1) * nbytes
    if layout.num_nodes > 1 and layout.local_rank == layout.ranks_per_node - 1:
        traffic.add(inter_node=sent, stays=stays)
    else:
        traffic.add(intra_node=sent, stays=stays)
