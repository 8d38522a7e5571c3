"""A real rank as a training loop sees it; compare EmulatedRanks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .fsdp.collectives import all_gather
from .fsdp.topology import process_rank
from .interface import Ranks, ZeroPPInterface
from .random_states import OwnRandomStates


class OwnRank:
    """The rank that this process is, in torch's default process group; the only one if there is none.

    gathers_over: the ranks whose numbers ``gather`` takes; default all.
    """

    def __init__(self, gathers_over: dist.ProcessGroup | None = None) -> None:
        self.random_states, self._gathers_over = OwnRandomStates(), gathers_over

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[AbstractContextManager[None]]:
        return iter([nullcontext()])

    def step_by_shards(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do: the optimizer has this rank's shards."""

    def shards_of(self, tensor: Tensor) -> Sequence[Tensor]:
        if not isinstance(tensor, DTensor):
            # Taken to be whole on every rank: rank 0 counts it. So under a pipeline a plain tensor of a stage that rank
            # 0 does not run is not counted at all; parameters there must be DTensors.
            return [tensor if process_rank() == 0 else tensor.new_empty(0)]
        if any([placement.is_partial() for placement in tensor.placements]):
            raise ValueError(f"a tensor of placements {tensor.placements} is not summed yet: it has no shards")
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None  # a rank holds no tensors of meshes without it
        local = tensor.to_local()
        for index, placement in zip(coordinate, tensor.placements, strict=True):
            if placement.is_replicate() and index > 0:
                return [local.new_empty(0)]  # the first replica counts
        return [local]

    def gather(self, of_ranks: Tensor) -> Tensor:
        if self.world_size == 1:
            return of_ranks
        group = self._gathers_over or dist.group.WORLD
        assert group is not None  # there are several ranks
        gathered = of_ranks.new_empty(group.size())
        all_gather(gathered, of_ranks, group=group)
        return gathered


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ranks_of(zeropp: ZeroPPInterface | None) -> Ranks:
    """The ranks that this process computes for; without ZeRO++ (ZeRO stage 0) its own."""
    return OwnRank() if zeropp is None else zeropp.ranks
