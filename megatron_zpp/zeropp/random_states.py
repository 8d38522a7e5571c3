"""The random states of emulated ranks, such as dropout draws from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomStates:
    """Each rank's own states of torch's generators of one device and the CPU; one for all until ``seed``."""

    def __init__(self, device: torch.device, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._has_cuda = device.type == "cuda"
        self.states: list[dict[str, Tensor]] = []  # of each rank: "cpu" and, with a GPU, "cuda"

    def seed(self, seed: int) -> None:
        """Rank r begins as with ``torch.manual_seed(seed + r)``."""
        outside = self._now()
        self.states = []
        for rank in range(self.num_ranks):
            torch.manual_seed(seed + rank)
            self.states.append(self._now())
        self._set(outside)

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Draw from the rank's states, and leave the process's own alone."""
        if not self.states:
            yield
            return
        outside = self._now()
        self._set(self.states[rank])
        try:
            yield
        finally:
            self.states[rank] = self._now()
            self._set(outside)

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """What is drawn in here is drawn again afterwards."""
        states = list(self.states)
        try:
            yield
        finally:
            self.states = states

    def _now(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._has_cuda:
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def _set(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self._has_cuda:
            torch.cuda.set_rng_state(states["cuda"])
