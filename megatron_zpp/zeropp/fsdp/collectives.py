"""torch.distributed's flat collectives under one name for all supported versions, and the bytes that they send."""

import math

import torch.distributed as dist
from torch import Tensor

from .shared import Traffic
from .topology import Topology

# torch 2.13 renamed these two; the old names still work there but warn.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def count_reduce_scatter(traffic: Traffic, layout: Topology, output: Tensor) -> None:
    """Count the plain reduce-scatter to ``output`` [L]."""
    # gloo's is an all-reduce, that is a ring's reduce-scatter and its all-gather.
    count_flat_ring(traffic, layout, output.nbytes * (2 if output.device.type == "cpu" else 1))


def count_all_reduce(traffic: Traffic, layout: Topology, nbytes: int) -> None:
    """Count an all-reduce of ``nbytes``: a ring's reduce-scatter and its all-gather."""
    count_flat_ring(traffic, layout, 2 * math.ceil(nbytes / layout.world_size))


def count_flat_ring(traffic: Traffic, layout: Topology, nbytes: int, stays: bool = False) -> None:
    """Count a ring over all W ranks in rank order, in which each rank passes W - 1 pieces of ``nbytes`` on.

    Only the last rank of a node has its successor on another node. ``stays``: see ``Traffic.add``.
    """
    sent = (layout.world_size - 1) * nbytes
    if layout.num_nodes > 1 and layout.local_rank == layout.ranks_per_node - 1:
        traffic.add(inter_node=sent, stays=stays)
    else:
        traffic.add(intra_node=sent, stays=stays)
