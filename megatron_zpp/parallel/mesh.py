"""The ranks of a run as a grid. This file alone names the grid's axes.

An axis is added here, as one line of ``AXES``, and in ``settings/job.py``, as the setting that sizes it.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

# Slowest first, tp fastest as in Megatron: within an island rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp.
# Each has the setting of ``DistributedSettings`` that sizes it; None: the ranks that the others leave.
AXES: dict[str, str | None] = {
    "island": "islands",  # samples, of ranks that average parameters every few steps
    "pp": "pipeline_model_parallel_size",  # stages
    "dp": None,  # samples
    "cp": "context_parallel_size",  # parts of a sequence
    "tp": "tensor_model_parallel_size",  # parts of a linear layer
}
SHARDED_AXES = ("dp", "cp")  # among whose ranks FSDP shards parameters: together they are one dimension for it
MODEL_PARALLEL_SETTINGS = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")


def ranks_per_model_copy(settings: Any) -> int:
    """Count the ranks that hold one copy of the model and read the same samples; the rest is data-parallel."""
    return math.prod(getattr(settings, setting) for setting in MODEL_PARALLEL_SETTINGS)


class Mesh:
    """The grid as this rank sees it: a ``DeviceMesh`` for each axis, with its size and this rank's place in it."""

    def __init__(
        self, device_type: str, sizes: Mapping[str, int] | None = None, replicas: int = 1, expert_parallel: int = 1
    ) -> None:
        """Divide all ranks of the default process group, whose number must be a multiple of the product. Collective.

        Args:
            sizes: by axis; a missing axis has size 1, and dp takes the ranks that are left.
            replicas: groups of ranks that each hold all of what FSDP shards; a divisor of the ranks of ``fsdp``.
            expert_parallel: consecutive ranks of ``fsdp`` that divide the experts; a divisor of them, too.
        """
        sizes = dict.fromkeys(AXES, 1) | dict(sizes or {})
        sizes["dp"] = dist.get_world_size() // math.prod(size for axis, size in sizes.items() if axis != "dp")
        grid = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=tuple(AXES))

        self.island = grid["island"]  # the ranks of this rank's place in all islands
        self.pp = grid["pp"]  # the ranks with this rank's samples and parts of layers, one of each pipeline stage
        self.cp = grid["cp"]  # the ranks with the other parts of this rank's sequences
        self.tp = grid["tp"]  # the ranks with the other parts of this rank's layers
        self.pp_size, self.cp_size, self.tp_size = self.pp.size(), self.cp.size(), self.tp.size()
        self.pp_rank, self.cp_rank, self.tp_rank = (axis.get_local_rank() for axis in (self.pp, self.cp, self.tp))

        # The ranks over which FSDP averages gradients, and the mesh that fully_shard gets: the same ranks, which hold
        # one model, or [replicate, shard] (HSDP), each row of which holds one.
        self.fsdp = self.sharding = grid[SHARDED_AXES]._flatten("fsdp")
        if replicas > 1:
            shape = (replicas, self.fsdp.size() // replicas)
            self.sharding = self.fsdp._unflatten(0, shape, ("replicate", "shard"))
        self.fsdp_size = self.fsdp.size()
        self.ep_size = expert_parallel
        if expert_parallel > 1:
            # Where every rank has a replica, so has each rank of those with the same experts; where some of them have
            # one together, it divides the experts among them.
            same = self.fsdp.size() // expert_parallel
            replicas = min(replicas, same)
            names = ("expert_replicate", "expert_fsdp", "ep")
            experts = self.fsdp._unflatten(0, (replicas, same // replicas, expert_parallel), names)
            self.ep = experts["ep"]  # the ranks with other samples, and the other experts of this rank's layers
            # The mesh that fully_shard gets for this rank's experts.
            self.expert_sharding = experts[("expert_replicate", "expert_fsdp") if replicas > 1 else "expert_fsdp"]

        # The ranks that take a step together, this rank's island; None: all ranks.
        self.step_group: dist.ProcessGroup | None = None
        if self.island.size() > 1:
            self.step_group = grid[tuple(AXES)[1:]]._flatten("step_group").get_group()

        self.sizes = {axis: grid[axis].size() for axis in AXES}
        self.num_islands = self.sizes["island"]
        # Ranks that train on different samples, of all islands, and this rank's place among them.
        self.dp_size = self.num_islands * self.sizes["dp"]
        self.dp_rank = self.island.get_local_rank() * grid["dp"].size() + grid.get_local_rank("dp")
        if expert_parallel > 1:
            self.sizes["ep"] = expert_parallel

    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the ranks with the other parts of this rank's layers; None if it has them whole."""
        return self.tp.get_group() if self.tp_size > 1 else None
