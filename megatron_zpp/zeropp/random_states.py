"""The random states that dropout draws from: torch's generators of the CPU and one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .fsdp.state_keys import below
from .fsdp.topology import process_rank
from .interface import RandomStates


class OwnRandomStates:
    """Those of a real rank: this process's own."""

    def seed(self, of_rank: Callable[[int], int]) -> None:
        torch.manual_seed(of_rank(process_rank()))

    def state_dict(self) -> dict[str, Tensor]:
        states = generator_states(has_cuda=torch.cuda.is_available())
        return {f"{process_rank()}.{device}": state for device, state in states.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        set_generator_states(below(state, f"{process_rank()}."))


@contextmanager
def unmoved(random_states: RandomStates) -> Iterator[None]:
    """What the ranks of this process draw in here is drawn again afterwards."""
    before = random_states.state_dict()
    try:
        yield
    finally:
        random_states.load_state_dict(before)


def generator_states(has_cuda: bool) -> dict[str, Tensor]:
    """By device, "cpu" and, on request, "cuda"."""
    states = {"cpu": torch.get_rng_state()}
    if has_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Take back what ``generator_states`` gave."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
