"""Emulated ranks as a training loop sees them; compare OwnRank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..wire.layout import rows_per_rank
from .random_states import EmulatedRandomStates
from .unit import step_by_shards


class EmulatedRanks:
    """All data-parallel ranks of a run, in one process."""

    def __init__(
        self,
        device: torch.device,
        world_size: int,
        as_rank: Callable[[int], AbstractContextManager[None]],
        first_rank: int = 0,
    ) -> None:
        self.world_size, self._as_rank = world_size, as_rank
        self.random_states = EmulatedRandomStates(device, world_size, first_rank)

    def __len__(self) -> int:
        return self.world_size

    def __iter__(self) -> Iterator[AbstractContextManager[None]]:
        return map(self._as_rank, range(self.world_size))

    def step_by_shards(self, optimizer: torch.optim.Optimizer) -> None:
        step_by_shards(optimizer, self.world_size)

    def shards_of(self, tensor: Tensor) -> Sequence[Tensor]:
        rows = rows_per_rank(tensor.shape[0], self.world_size)
        shards = tensor.split(max(1, rows))  # fewer than W, where none are left for the last ranks
        return [*shards, *[tensor[:0]] * (self.world_size - len(shards))]

    def gather(self, of_ranks: Tensor) -> Tensor:
        return of_ranks
