"""One rank's part in an outer step: the mean over islands in two quantized hops, however the bytes are sent."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_zpp.zeropp import Traffic
from megatron_zpp.zeropp.fsdp.shared import below
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback, error_format
from megatron_zpp.zeropp.wire.format import GradientSum, WireFormat, wire_format
from megatron_zpp.zeropp.wire.layout import ParameterShard, rows_per_rank

from .config import DTYPES, IslandConfig


def island_format(config: IslandConfig, pieces: tuple[ParameterShard, ...]) -> WireFormat:
    return wire_format(pieces, config.bits, config.block_size, DTYPES[config.dtype], config.scaling)


class IslandHops:
    """The mean over K islands of the tensors that one rank of each holds.

    Each tensor is cut into K equal parts, the last ones padded with zeros. A piece [L] joins one part of each tensor,
    so that blocks never span two tensors.

    1. ``encode_pieces``: encode a piece for each island; an all-to-all sends them.
    2. ``encode_mean``: add up the pieces that arrived, and encode this piece of the mean; an all-gather sends it.
       ``decode_mean`` decodes all K.

    All islands decode the same bytes, so their results are equal to the bit. With LoCo each hop has an error: the first
    of the pieces [K, L] that the rank sends, the second of the piece [L] that it adds up.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        num_islands: int,
        config: IslandConfig,
        traffic: Traffic,
        device: torch.device,
    ) -> None:
        """parts: the rank's part of each parameter, for names and shapes. device: where to encode, and to receive."""
        self.num_islands, self.traffic, self._device = num_islands, traffic, device
        self._shapes = [part.shape for part in parts.values()]
        shards = tuple(
            ParameterShard(name, rows_per_rank(part.numel(), num_islands), quantizable=part.ndim >= 2)
            for name, part in parts.items()
        )
        self._columns = [shard.numel for shard in shards]
        self.format = island_format(config, shards)
        self._in_flight: Tensor | None = None  # uint8 [K, nbytes], which a hop receives or has received
        self._work: tuple[dist.Work, Tensor] | None = None  # the collective in flight, and its input
        feedback = config.feedback
        self._feedback = {} if feedback is None else {hop: ErrorFeedback(feedback) for hop in ("pieces", "mean")}

    def encode_pieces(self, differences: Sequence[Tensor], num_senders: int, is_present: bool) -> Tensor:
        """Encode fp32 tensors, cut and divided so that pieces add up to the mean of all senders: uint8 [K, nbytes].

        is_present: False sends zeros, and neither adds nor changes LoCo's error.
        """
        pieces = torch.zeros(self.num_islands, sum(self._columns), device=self._device)
        if is_present:
            for tensor, column in zip(differences, pieces.split(self._columns, dim=1), strict=True):
                column.copy_(pad(tensor.reshape(-1), (0, column.numel() - tensor.numel())).view_as(column))
        divisor = pieces.new_full((), num_senders)  # a tensor: see quantize_blocks
        return self._encode("pieces", GradientSum(pieces / divisor), is_present)

    def encode_mean(self, received: Tensor) -> Tensor:
        """Add up the pieces from all islands, uint8 [K, nbytes], and encode the sum: uint8 [nbytes]."""
        return self._encode("mean", GradientSum(received, self.format))

    def decode_mean(self, wires: Tensor) -> list[Tensor]:
        """Decode all pieces of the mean, uint8 [K, nbytes], to fp32 tensors of the original shapes."""
        pieces = torch.empty(self.num_islands, sum(self._columns), device=wires.device)
        columns = self.format.decode(wires, out=pieces).split(self._columns, dim=1)
        return [
            column.reshape(-1)[: shape.numel()].view(shape) for column, shape in zip(columns, self._shapes, strict=True)
        ]

    @property
    def is_in_flight(self) -> bool:
        """Whether a hop was started. False in a run that resumes on other ranks than those that saved."""
        return self._in_flight is not None

    def launch(self, received: Tensor, work: tuple[dist.Work, Tensor]) -> None:
        """Keep the tensor that a hop receives, and its collective with what that sends."""
        self._in_flight, self._work = received, work

    def take(self) -> Tensor:
        """Wait for the hop in flight, and return what it received."""
        self._wait()
        received, self._in_flight = self._in_flight, None
        assert received is not None
        return received

    def _wait(self) -> None:
        if self._work is not None:
            self._work[0].wait()
            self._work = None

    def _encode(self, hop: str, values: GradientSum, has_feedback: bool = True) -> Tensor:
        # In either hop a rank sends K - 1 pieces: one to each other island, or around the ring.
        self.traffic.add(inter_island=(self.num_islands - 1) * self.format.nbytes)
        if has_feedback and hop in self._feedback:
            wire, self._feedback[hop] = self._feedback[hop].compensate(values, self.format)
            return wire
        return values.to_wire(self.format, noise_seed=None)

    def state_dict(self) -> dict[str, Tensor]:
        """Return LoCo's errors, and what the hop in flight receives, after waiting for it."""
        self._wait()
        state = {} if self._in_flight is None else {"in_flight": self._in_flight}
        for hop, feedback in self._feedback.items():
            state |= {f"{hop}.{key}": value for key, value in feedback.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned; anything missing restarts."""
        self._wait()
        state = {key: value.to(self._device) for key, value in state.items()}
        self._in_flight = state.get("in_flight")
        for hop, feedback in self._feedback.items():
            format = error_format(feedback.config, self.format.parameters, self.format.block_size)
            self._feedback[hop] = feedback.loaded(below(state, f"{hop}."), format)
