"""One rank's part in the two hops of a gradient reduction, whoever carries what is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import ZeroPPConfig
from .loco import ErrorFeedback
from .monitor import ErrorMonitor
from .quantization import mix_seed
from .topology import RankLayout
from .unit import Unit
from .wire_format import WireFormat, wire_format


@dataclass
class MicroBatch:
    """Where the training loop is, shared by all units."""

    is_last: bool = True


class GradientHops:
    """What one rank sends of one unit's gradients over each hop, what it makes of what it receives, and LoCo's state.

    Each micro-batch: ``send_within_node``, the exchange, then ``keep``; or, with the step's last one,
    ``send_between_nodes``, the exchange, then ``total``. All sums are fp32. Where a hop has one rank, what would be
    sent are the values themselves.
    """

    def __init__(
        self, unit: Unit, place: RankLayout, config: ZeroPPConfig, monitor: ErrorMonitor, micro_batch: MicroBatch
    ) -> None:
        self.unit, self.place, self.config = unit, place, config
        self.monitor, self.micro_batch = monitor, micro_batch
        self.node_sum: Tensor | None = None  # fp32 [N, L], of the micro-batches so far
        self.begun_at = 0  # the unit's optimizer steps when this one's first micro-batch came
        self.steps = 0  # reductions between nodes so far
        self.micro_batches = 0  # of this step, so far
        self.feedback: dict[str, ErrorFeedback] = {}  # by hop
        if config.loco is not None and place.num_nodes > 1:
            self.feedback["inter"] = ErrorFeedback(config.loco)
        if config.loco is not None and config.loco.hops == "both" and place.ranks_per_node > 1:
            self.feedback["intra"] = ErrorFeedback(config.loco)
        self._intra = self._inter = wire_format((), None, None, torch.float32)  # until gradients come

    def send_within_node(self, gradients: Tensor) -> Tensor:
        """Encode gradients [N, P, L] for the P ranks of the node: uint8 [P, N, nbytes]; P = 1: [N, L]."""
        if self.node_sum is None:
            self.begun_at = self.unit.optimizer_steps
            for feedback in self.feedback.values():
                feedback.begin_step()
        elif self.begun_at != self.unit.optimizer_steps:
            raise RuntimeError(
                f"an optimizer step was taken while {self.unit.label} held gradients that had not crossed nodes: say "
                "set_is_last_micro_batch(True) before a step's last backward pass, or undo_step() to drop gradients"
            )
        parameters, block_size = self.unit.parameter_shards(trainable_only=True), self.config.gradient_block_size
        self._intra = wire_format(parameters, self.config.gradient_intra_bits, block_size, gradients.dtype)
        self._inter = wire_format(parameters, self.config.gradient_bits, block_size, gradients.dtype)
        if self.config.hadamard:
            # Sums of rotated gradients are rotated sums: rotate once before both hops and back once after them.
            gradients = self._rotation().rotate(gradients)
        if self.place.ranks_per_node == 1:
            return gradients.squeeze(1)
        # [P, N, L]: P pieces, one for each peer
        return self._encode("intra", gradients.transpose(0, 1), self._intra)

    def keep(self, received: Tensor) -> None:
        """Add what the P ranks sent here, uint8 [P, N, nbytes] (P = 1: [N, L]), to the node's sum."""
        self.node_sum = self._add_to_node_sum(received)
        self.micro_batches += 1

    def send_between_nodes(self, received: Tensor) -> Tensor:
        """What the N ranks with this place are sent of the node's sum: uint8 [N, nbytes]; N = 1: the sum, fp32 [1, L].

        received: as ``keep`` takes it.
        """
        source = self._intra if self.place.ranks_per_node > 1 else None
        # One pass adds up the node's gradients and encodes the sum, unless the sum itself is wanted.
        same_blocks = source is None or source.bits is None or self._inter.bits is not None
        if self.place.num_nodes > 1 and same_blocks and not self.monitor.is_due(self.steps):
            return self._encode("inter", received, self._inter, source=source, plus=self.node_sum)
        node_sum = self._add_to_node_sum(received)
        return node_sum if self.place.num_nodes == 1 else self._encode("inter", node_sum, self._inter)

    def total(self, received: Tensor) -> Tensor:
        """The sum over all ranks and micro-batches, fp32 [L], of what N nodes sent here, uint8 [N, nbytes]."""
        if self.place.num_nodes == 1:
            total = received.squeeze(0)
        else:
            total = self._inter.decode_sum(received, out=torch.empty(self._inter.numel, device=received.device))
        self.node_sum, self.micro_batches = None, 0
        self.steps += 1
        return self._rotation().rotate(total) if self.config.hadamard else total

    def _rotation(self) -> WireFormat:
        """The format whose quantized parameters are rotated."""
        return self._inter if self._inter.quantized else self._intra

    def _add_to_node_sum(self, received: Tensor) -> Tensor:
        """The node's sum of the micro-batches so far: fp32 [N, L]."""
        if self.place.ranks_per_node == 1:
            return received.to(torch.float32, copy=True) if self.node_sum is None else self.node_sum.add_(received)
        source = self._intra
        if self.node_sum is not None:
            return source.decode_sum(received, out=self.node_sum, accumulate=True)
        shape = (self.place.num_nodes, source.numel)
        return source.decode_sum(received, out=torch.empty(shape, device=received.device))

    def _encode(self, hop: str, pieces: Tensor, format: WireFormat, **source: Any) -> Tensor:
        """Encode what is sent over a hop, one piece for each of its G ranks, with LoCo: uint8 [G, ..., nbytes]."""
        noise_seed = None
        if self.config.gradient_rounding == "stochastic":
            place = (hop, self.unit.name, self.place.rank, self.steps, self.micro_batches)
            noise_seed = mix_seed(self.config.seed, "gradients", *place)
        feedback = self.feedback.get(hop)
        error = feedback.error if feedback is not None else None  # what is added to these gradients
        if feedback is not None:
            # The hop between nodes runs once per step, that within a node once per micro-batch.
            wires = feedback.encode(pieces, format, noise_seed, self.micro_batch.is_last, **source)
        else:
            wires = format.encode(pieces, noise_seed, **source)
        if self.monitor.is_due(self.steps):
            arrived = format.decode(wires, out=torch.empty_like(pieces, dtype=torch.float32))
            what, unit = f"gradients/{hop}", self.unit.name
            self.monitor.record(what, unit, pieces, arrived)
            self.monitor.record_codes(what, unit, format, wires)
            if feedback is not None:
                old = feedback.decode(error) if error is not None else arrived.new_zeros(())
                self.monitor.record_error_state(what, unit, pieces, old)
        return wires

    def undo_step(self) -> None:
        """The gradients since the last optimizer step are thrown away."""
        self.node_sum, self.micro_batches = None, 0
        if self.begun_at == self.unit.optimizer_steps:  # no optimizer has used what the errors went with
            for feedback in self.feedback.values():
                feedback.undo_step()

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"{hop}.{k}": v for hop, feedback in self.feedback.items() for k, v in feedback.state_dict().items()}
        if self.config.gradient_rounding == "stochastic":
            state["steps"] = torch.tensor(self.steps)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.node_sum, self.micro_batches = None, 0
        if "steps" in state:
            self.steps = int(state["steps"])
        for hop, feedback in self.feedback.items():
            prefix = f"{hop}."
            own = {k.removeprefix(prefix): v.to(self.unit.device) for k, v in state.items() if k.startswith(prefix)}
            feedback.load_state_dict(own)
