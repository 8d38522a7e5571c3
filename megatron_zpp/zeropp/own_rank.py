"""The random states of one rank, that dropout draws from."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .fsdp.topology import process_rank


def random_state_dict() -> dict[str, Tensor]:
    """Return the states of torch's generators on this rank, uint8, by "RANK.cpu" and on a GPU "RANK.cuda"."""
    states = {f"{process_rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{process_rank()}.cuda"] = torch.cuda.get_rng_state()
    return states


def load_random_state_dict(states: Mapping[str, Tensor]) -> None:
    """Restore what ``random_state_dict`` returned on this rank."""
    torch.set_rng_state(states[f"{process_rank()}.cpu"])
    if f"{process_rank()}.cuda" in states:
        torch.cuda.set_rng_state(states[f"{process_rank()}.cuda"])
