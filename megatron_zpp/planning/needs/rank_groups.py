"""Which ranks of a cluster share what, in a planned run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_zpp.parallel.mesh import ranks_per_model_copy
from megatron_zpp.settings.groups import DistributedSettings

Kind = Literal["tensor", "context", "pipeline", "averaging", "sharding", "replicas", "experts", "expert sharding"]


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
    """How a run divides the ranks of its nodes, ordered as ``parallel.mesh.AXES``."""

    nodes: int
    ranks_per_node: int
    distributed: DistributedSettings

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def group(self, kind: Kind) -> RankGroup:
        """Return the shape of groups of this kind. Raises ValueError if nodes would have different parts of them."""
        distributed, ranks = self.distributed, self.world_size // self.distributed.islands
        tensor, context = distributed.tensor_model_parallel_size, distributed.context_parallel_size
        pipeline, experts = distributed.pipeline_model_parallel_size, distributed.expert_model_parallel_size
        replicas = distributed.num_distributed_optimizer_instances
        averaging = context * (ranks // ranks_per_model_copy(distributed))
        sharding = averaging // replicas
        size, stride = {
            "tensor": (tensor, 1),
            "context": (context, tensor),
            "pipeline": (pipeline, ranks // pipeline),  # one rank of each stage
            "averaging": (averaging, tensor),  # average gradients: have other samples, or other parts of samples
            "sharding": (sharding, tensor),  # share one model's shards; HSDP makes several such groups
            "replicas": (replicas, sharding * tensor),  # have the same shard, one of each HSDP replica
            "experts": (experts, tensor),  # divide a layer's experts
            "expert sharding": (sharding // experts, experts * tensor),  # those of "sharding" with the same experts
        }[kind]
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
