"""One rank's part in an agreement of the islands on one fragment, no matter how what it sends is carried."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_zpp.zeropp import Traffic
from megatron_zpp.zeropp.fsdp.shared import below
from megatron_zpp.zeropp.reduce.gradient_sum import GradientSum
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback
from megatron_zpp.zeropp.wire.format import WireFormat, wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard

from .config import DTYPES, IslandConfig
from .pieces import Pieces


def island_format(config: IslandConfig, pieces: tuple[ParameterShard, ...]) -> WireFormat:
    """The wire format of a piece."""
    return wire_format(pieces, config.bits, config.block_size, DTYPES[config.dtype], config.scaling)


class IslandHops:
    """The mean over K islands of what one rank of each has, in two hops of low bits.

    1. ``send``: a rank encodes a piece for each island, sent all to all.
    2. ``add``: it adds up what came, and encodes this piece of the mean, which all gather. ``receive`` decodes them.

    All islands decode the same bytes, so their results are equal to the bit. With LoCo each hop has an error: the first
    of the pieces [K, L] that the rank sends, the second of the one [L] that it adds up.
    """

    def __init__(self, pieces: Pieces, config: IslandConfig, traffic: Traffic) -> None:
        self.pieces, self.traffic = pieces, traffic
        self.format = island_format(config, pieces.shards)
        self.in_flight: Tensor | None = None  # uint8 [K, nbytes]: what comes here, or has come
        feedback = config.feedback
        self._feedback = {} if feedback is None else {hop: ErrorFeedback(feedback) for hop in ("pieces", "mean")}

    def send(self, differences: Tensor, of: int | None = None) -> Tensor:
        """Encode this rank's pieces fp32 [K, L] over K, so that they add up to the mean: uint8 [K, nbytes].

        of: how many islands the mean is of, where some send nothing but zeros.
        """
        num_islands = differences.new_full((), of or self.pieces.num_islands)  # a tensor: see quantize_blocks
        return self._encode("pieces", GradientSum(differences / num_islands))

    def add(self, received: Tensor) -> Tensor:
        """Add up what the islands sent here, uint8 [K, nbytes], and encode it: uint8 [nbytes]."""
        return self._encode("mean", GradientSum(received, self.format))

    def receive(self, wires: Tensor) -> list[Tensor]:
        """The mean, fp32, of the shapes that were cut, from all its pieces uint8 [K, nbytes]."""
        pieces = torch.empty(self.pieces.num_islands, self.pieces.numel, device=wires.device)
        return self.pieces.join(self.format.decode(wires, out=pieces))

    def _encode(self, hop: str, values: GradientSum) -> Tensor:
        # In either hop a rank passes K - 1 pieces on: one to each other island, or around the ring.
        self.traffic.add(inter_island=(self.pieces.num_islands - 1) * self.format.nbytes)
        if hop in self._feedback:
            return self._feedback[hop].encode(values, self.format)
        return values.encode(self.format, noise_seed=None)

    def state_dict(self) -> dict[str, Tensor]:
        """LoCo's errors, and what is on its way, which must have arrived."""
        state = {} if self.in_flight is None else {"in_flight": self.in_flight}
        for hop, feedback in self._feedback.items():
            state |= {f"{hop}.{key}": value for key, value in feedback.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave; what is not there starts again."""
        self.in_flight = state.get("in_flight")
        for hop, feedback in self._feedback.items():
            feedback.load_state_dict(below(state, f"{hop}."))
