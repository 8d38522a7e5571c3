"""The random states of emulated ranks, such as dropout draws from."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..own_rank import generator_states, set_generator_states


class EmulatedRandomStates:
    """Each rank's own states of torch's generators of one device and the CPU; one for all until ``seed``."""

    def __init__(self, device: torch.device, num_ranks: int, first_rank: int = 0) -> None:
        self.num_ranks, self.first_rank = num_ranks, first_rank
        self._has_cuda = device.type == "cuda"
        self._states: list[dict[str, Tensor]] = []  # of each rank: "cpu" and, with a GPU, "cuda"

    def seed(self, of_rank: Callable[[int], int]) -> None:
        outside = generator_states(self._has_cuda)
        self._states = []
        for rank in range(self.num_ranks):
            torch.manual_seed(of_rank(self.first_rank + rank))
            self._states.append(generator_states(self._has_cuda))
        set_generator_states(outside)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Draw from the rank's states, and leave the process's own alone."""
        if not self._states:
            yield
            return
        outside = generator_states(self._has_cuda)
        set_generator_states(self._states[rank])
        try:
            yield
        finally:
            self._states[rank] = generator_states(self._has_cuda)
            set_generator_states(outside)

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{rank}.{device}": state
            for rank, of_rank in enumerate(self._states, self.first_rank)
            for device, state in of_rank.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        devices = ("cpu", "cuda") if self._has_cuda else ("cpu",)
        # An empty state was saved before ``seed``: again one for all.
        ranks = range(self.first_rank, self.first_rank + self.num_ranks if state else self.first_rank)
        self._states = [{device: state[f"{rank}.{device}"] for device in devices} for rank in ranks]
