"""The ranks of a run as a grid. This file alone names the grid's axes.

An axis is added here, as one line of ``AXES``, and in ``settings/groups.py``, as the setting that sizes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Of the grid, slowest first, tp fastest as in Megatron: within an island
# rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp.
# Each with the setting of ``DistributedSettings`` that sizes it; None: the ranks that the others leave.
AXES: dict[str, str | None] = {
    "island": "islands",  # samples, of ranks that agree on parameters now and then
    "pp": "pipeline_model_parallel_size",  # stages
    "dp": None,  # samples
    "cp": "context_parallel_size",  # parts of a sequence
    "tp": "tensor_model_parallel_size",  # parts of a linear layer
}
SHARDED_AXES = ("dp", "cp")  # among whose ranks FSDP shards parameters: together they are one dimension for it
MODEL_PARALLEL_AXES = {axis: setting for axis, setting in AXES.items() if setting is not None and axis != "island"}
MODEL_PARALLEL_SETTINGS = tuple(reversed(MODEL_PARALLEL_AXES.values()))


def model_parallel_sizes(settings: Any) -> dict[str, int]:
    """The size of each axis along which ranks have parts of a model, of a ``DistributedSettings``."""
    return {axis: getattr(settings, setting) for axis, setting in MODEL_PARALLEL_AXES.items()}


def ranks_per_model_copy(settings: Any) -> int:
    """Ranks that hold one copy of the model and read the same samples; the rest of the ranks is data-parallel."""
    return math.prod(model_parallel_sizes(settings).values())


@dataclass(frozen=True)
class Mesh:
    """The grid as this rank sees it."""

    grid: DeviceMesh  # a dimension for each of AXES, of sizes from 1 on
    fsdp: DeviceMesh  # SHARDED_AXES as one dimension: the ranks over which FSDP averages gradients
    # What fully_shard gets: fsdp, which holds one model; or [replicate, shard] (HSDP), each row of which holds one.
    sharding: DeviceMesh
    emulated_ranks: int = 1  # data-parallel ranks that this process computes for, if it is the only one
    emulated_islands: int = 1  # that they are divided into
    # The ranks of fsdp as [expert_replicate, expert_fsdp, ep]: along the last one each has other experts, along the
    # others they share the same. None: all ranks share all experts.
    of_experts: DeviceMesh | None = None
    num_jobs: int = 1  # that are an island each, this one among them
    job: int = 0  # this one's number

    def sizes(self) -> dict[str, int]:
        """Ranks along each axis, emulated ones included."""
        emulated = {"island": self.emulated_islands, "dp": self.emulated_ranks // self.emulated_islands}
        sizes = {axis: self.grid[axis].size() * emulated.get(axis, 1) for axis in AXES}
        return sizes | ({"ep": self.ep_size} if self.ep_size > 1 else {})

    @cached_property  # which every step asks
    def island(self) -> DeviceMesh:
        """The ranks of this rank's place in all islands."""
        return self.grid["island"]

    @property
    def pp(self) -> DeviceMesh:
        """The ranks with this rank's samples and parts of layers, one of each pipeline stage."""
        return self.grid["pp"]

    @property
    def cp(self) -> DeviceMesh:
        """The ranks with the other parts of this rank's sequences."""
        return self.grid["cp"]

    @property
    def tp(self) -> DeviceMesh:
        """The ranks with the other parts of this rank's layers."""
        return self.grid["tp"]

    @property
    def ep(self) -> DeviceMesh:
        """The ranks with other samples, and the other experts of this rank's layers."""
        assert self.of_experts is not None
        return self.of_experts["ep"]

    @property
    def expert_sharding(self) -> DeviceMesh:
        """The mesh that fully_shard gets for this rank's experts; as ``sharding``."""
        assert self.of_experts is not None
        is_replicated = self.of_experts["expert_replicate"].size() > 1
        return self.of_experts["expert_replicate", "expert_fsdp"] if is_replicated else self.of_experts["expert_fsdp"]

    @cached_property
    def ranks_of_island(self) -> dist.ProcessGroup | None:
        """All ranks of this rank's island; None if they are all that there are."""
        if self.island.size() == 1:
            return None
        others = tuple(axis for axis in AXES if axis != "island")
        return self.grid[others]._flatten("ranks_of_island").get_group()

    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other parts of this rank's layers; None if it has them whole."""
        return self.tp.get_group() if self.tp_size > 1 else None

    @property
    def pp_size(self) -> int:
        return self.pp.size()

    @property
    def num_islands(self) -> int:
        """Of this job."""
        return self.island.size() * self.emulated_islands

    @property
    def dp_size(self) -> int:
        """Ranks that train on different samples, of all islands."""
        return self.num_jobs * self.dp_size_of_job

    @property
    def dp_size_of_job(self) -> int:
        """Those that this job has. They evaluate on all samples: who else is there is not known."""
        return self.num_islands * self.sizes()["dp"]

    @property
    def fsdp_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.fsdp.size() * self.emulated_ranks // self.emulated_islands

    @property
    def cp_size(self) -> int:
        return self.cp.size()

    @property
    def tp_size(self) -> int:
        return self.tp.size()

    @property
    def ep_size(self) -> int:
        return 1 if self.of_experts is None else self.ep.size()

    @property
    def pp_rank(self) -> int:
        return self.grid.get_local_rank("pp")

    @property
    def dp_rank(self) -> int:
        """Which part of a batch this rank trains on."""
        return self.job * self.dp_size_of_job + self.dp_rank_of_job

    @property
    def dp_rank_of_job(self) -> int:
        """Which part of a batch this rank evaluates on."""
        return self.grid.get_local_rank("island") * self.grid["dp"].size() + self.grid.get_local_rank("dp")

    @property
    def cp_rank(self) -> int:
        return self.grid.get_local_rank("cp")

    @property
    def tp_rank(self) -> int:
        return self.grid.get_local_rank("tp")


def build_mesh(
    device_type: str,
    sizes: Mapping[str, int] | None = None,
    emulated_ranks: int = 1,
    replicas: int = 1,
    expert_parallel: int = 1,
    emulated_islands: int = 1,
    num_jobs: int = 1,
    job: int = 0,
) -> Mesh:
    """Divide all ranks of the default process group, whose number must be a multiple of the product. Collective.

    sizes: by axis; one that is not in it has size 1, and dp what is left.
    replicas: groups of ranks that each hold the whole of what FSDP shards; a divisor of the ranks of ``Mesh.fsdp``.
    expert_parallel: consecutive ranks of ``Mesh.fsdp``, among which experts are divided; a divisor of them, too.
    num_jobs, job: where each island is a job of its own.
    """
    sizes = dict.fromkeys(AXES, 1) | dict(sizes or {})
    sizes["dp"] = dist.get_world_size() // math.prod(size for axis, size in sizes.items() if axis != "dp")
    grid = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=tuple(AXES))
    fsdp = sharding = grid[SHARDED_AXES]._flatten("fsdp")
    if replicas > 1:
        sharding = fsdp._unflatten(0, (replicas, fsdp.size() // replicas), ("replicate", "shard"))
    of_experts = None
    if expert_parallel > 1:
        # Where every rank has a replica, so has every one of those with the same experts.
        same = fsdp.size() // expert_parallel
        sizes_of_experts = (same, 1) if replicas == fsdp.size() > 1 else (1, same)
        names = ("expert_replicate", "expert_fsdp", "ep")
        of_experts = fsdp._unflatten(0, (*sizes_of_experts, expert_parallel), names)
    return Mesh(grid, fsdp, sharding, emulated_ranks, emulated_islands, of_experts, num_jobs, job)
