"""The ranks of a run as a grid: pipeline stages x data-parallel x context-parallel x tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Mesh:
    """The grid (pp, dp, cp, tp) as this rank sees it, tp fastest as in Megatron:

    rank = ((pp_rank * dp_size + dp_rank) * cp_size + cp_rank) * tp_size + tp_rank
    """

    grid: DeviceMesh  # four dimensions, of sizes from 1 on
    fsdp: DeviceMesh  # dp x cp as one dimension: the ranks among which FSDP shards parameters
    emulated_ranks: int = 1  # data-parallel ranks that this process computes for, if it is the only one

    @property
    def pp_size(self) -> int:
        return self.grid["pp"].size()

    @property
    def dp_size(self) -> int:
        return self.grid["dp"].size() * self.emulated_ranks

    @property
    def fsdp_size(self) -> int:
        """Shards of a parameter."""
        return self.fsdp.size() * self.emulated_ranks

    @property
    def cp_size(self) -> int:
        return self.grid["cp"].size()

    @property
    def tp_size(self) -> int:
        return self.grid["tp"].size()

    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other parts of this rank's layers; None if it has them whole."""
        return self.grid["tp"].get_group() if self.tp_size > 1 else None

    @property
    def pp_rank(self) -> int:
        return self.grid.get_local_rank("pp")

    @property
    def dp_rank(self) -> int:
        """Which part of a batch this rank reads."""
        return self.grid.get_local_rank("dp")

    @property
    def cp_rank(self) -> int:
        return self.grid.get_local_rank("cp")

    @property
    def tp_rank(self) -> int:
        return self.grid.get_local_rank("tp")


def build_mesh(device_type: str, tp_size: int = 1, pp_size: int = 1, cp_size: int = 1, emulated_ranks: int = 1) -> Mesh:
    """Cut all ranks of the default process group; their number must be a multiple of the product. Collective."""
    dp_size = dist.get_world_size() // (pp_size * cp_size * tp_size)
    names = ("pp", "dp", "cp", "tp")
    grid = init_device_mesh(device_type, (pp_size, dp_size, cp_size, tp_size), mesh_dim_names=names)
    return Mesh(grid, grid["dp", "cp"]._flatten("fsdp"), emulated_ranks)
