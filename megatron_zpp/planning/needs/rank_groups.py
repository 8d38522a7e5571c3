"""Which ranks of a cluster share what, for a run that is not started."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.parallel.mesh import ranks_per_model_copy
from megatron_zpp.settings.groups import DistributedSettings


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share something: ``ranks_per_node`` on each of ``nodes``."""

    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class RankGrid:
    """How a run divides the ranks of its nodes, ordered as ``parallel.mesh.AXES``.

    Properties raise ValueError if nodes would have different numbers of a group's ranks.
    """

    nodes: int
    ranks_per_node: int
    distributed: DistributedSettings

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def ranks_per_island(self) -> int:
        return self.world_size // self.distributed.islands

    @property
    def gradient_averaging(self) -> RankGroup:
        """The ranks over which gradients are averaged: those with other samples, or other parts of samples."""
        copies = self.ranks_per_island // ranks_per_model_copy(self.distributed)
        return self._group(self.distributed.context_parallel_size * copies, self._tensor)

    @property
    def sharding(self) -> RankGroup:
        """The ranks that share the shards of one model; HSDP makes several such groups."""
        replicas = self.distributed.num_distributed_optimizer_instances
        return self._group(self.gradient_averaging.size // replicas, self._tensor)

    @property
    def replicas(self) -> RankGroup | None:
        """The ranks that have the same shard, one of each HSDP replica; None without HSDP."""
        size = self.distributed.num_distributed_optimizer_instances
        return self._group(size, self.sharding.size * self._tensor) if size > 1 else None

    @property
    def expert_parallel(self) -> RankGroup:
        """The ranks that divide a layer's experts."""
        return self._group(self.distributed.expert_model_parallel_size, self._tensor)

    @property
    def expert_sharding(self) -> RankGroup:
        """The ranks of ``sharding`` that share the same experts."""
        parts = self.distributed.expert_model_parallel_size
        return self._group(self.sharding.size // parts, parts * self._tensor)

    @property
    def tensor_parallel(self) -> RankGroup:
        return self._group(self._tensor, 1)

    @property
    def context_parallel(self) -> RankGroup:
        return self._group(self.distributed.context_parallel_size, self._tensor)

    @property
    def pipeline(self) -> RankGroup:
        """One rank of each stage."""
        size = self.distributed.pipeline_model_parallel_size
        return self._group(size, self.ranks_per_island // size)

    @property
    def _tensor(self) -> int:
        return self.distributed.tensor_model_parallel_size

    def _group(self, size: int, stride: int) -> RankGroup:
        """Place ``size`` ranks, each ``stride`` after the one before, on the nodes."""
        span, per_node = size * stride, self.ranks_per_node
        if size == 1:
            return RankGroup(1, 1)
        if per_node % span == 0:
            return RankGroup(1, size)
        if stride % per_node == 0:
            return RankGroup(size, 1)
        if span % per_node == 0 and per_node % stride == 0:
            return RankGroup(span // per_node, per_node // stride)
        raise ValueError(
            f"groups of {size} ranks, each {stride} after the one before, do not lie alike on nodes of {per_node}: "
            "choose parallel sizes that divide a node's ranks, or are multiples of them"
        )
