"""Values that a rank keeps between reductions of a unit's gradients: LoCo's error, and the node's sum.

LoCo (arXiv 2407.04480): a moving average of what quantization lost is added to later gradients.

All are immutable: a reduction returns the values after it, and to undo a step is to go back to the values before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..config import LoCoConfig
from ..fsdp.formats import Formats, UnitPart
from ..fsdp.fsdp_unit import FSDPUnit
from ..fsdp.monitor import record_codes, record_error, record_error_state
from ..fsdp.shared import Shared, below
from ..fsdp.waits import current_stream, to_host
from ..wire.format import GradientSum, WireFormat, wire_format
from ..wire.layout import Compensation, ParameterShard
from ..wire.quantization import counter_uniform, mix_seed
from ..wire.scales import ElementScales

ERROR_FORMATS = {"int8": (8, torch.float32), "bf16": (None, torch.bfloat16), "fp32": (None, torch.float32)}


@dataclass(frozen=True, eq=False)
class ErrorFeedback:
    """The compression error e of one hop of one unit, and the encoder that uses it.

    With gradients g [..., L] and the hop's quantizer Q:

        h = g + e,  q = Q(h) is sent,  d = h - deq(q),  e <- beta * e + (1 - beta) * d

    e starts at zero and is kept in a wire buffer. The hop between nodes runs once per optimizer step, that within a
    node once per micro-batch.
    """

    config: LoCoConfig
    error: Tensor | None = None  # uint8 [..., nbytes]; None = zero
    format: WireFormat | None = None  # format of ``error``; None: nothing was encoded yet
    steps: int = 0  # optimizer steps since the last reset

    def compensate(
        self,
        gradients: GradientSum,
        hop: WireFormat,
        noise_seed: int | None = None,
        is_last: bool = True,
        exponents: Tensor | None = None,
    ) -> tuple[Tensor, ErrorFeedback]:
        """Compensate and encode gradients [..., L]: uint8 [..., nbytes], and the error after it.

        is_last: whether this is the last encoding of an optimizer step. exponents: as in ``WireFormat.encode``.
        """
        config, interval = self.config, self.config.reset_interval
        format, steps = error_format(config, hop.parameters, hop.block_size), self.steps + is_last
        # Parameters that were frozen or unfrozen since make it another unit's error.
        error = self.error if self.format is not None and self.format.parameters == format.parameters else None
        decay, new_error = 1.0, None
        if is_last and config.reset == "hard" and interval is not None and steps >= interval:
            steps = 0
        else:
            # Not in place: CUDA kernels for large or odd blocks read the old error again after they wrote the new one.
            new_error = torch.empty(*gradients.rows, format.nbytes, dtype=torch.uint8, device=gradients.device)
        if is_last and config.reset == "decay" and interval is not None:
            decay = 1 - 1 / interval
        wire = gradients.to_wire(hop, noise_seed, Compensation(format, error, new_error, config.beta, decay), exponents)
        return wire, replace(self, error=new_error, format=format, steps=steps)

    def rescaled(self, factor: float) -> ErrorFeedback:
        """Return the error times ``factor``, by which the loss scale, and so every later gradient, changed."""
        if self.error is None or self.format is None:
            return self
        return replace(self, error=self.format.encode(self.decoded().mul_(factor)))

    def decoded(self) -> Tensor:
        """Return the error as numbers, fp32 [..., L]; something must have been encoded before."""
        assert self.error is not None and self.format is not None
        shape = *self.error.shape[:-1], self.format.numel
        return self.format.decode(self.error, torch.empty(shape, device=self.error.device))

    def state_dict(self) -> dict[str, Tensor]:
        state = {"steps": torch.tensor(self.steps)}
        return state if self.error is None else state | {"error": self.error}

    def loaded(self, state: dict[str, Tensor], format: WireFormat) -> ErrorFeedback:
        """Return what ``state_dict`` saved of an error in ``format``. Zeros, or no state, mean no error."""
        error = state.get("error")
        has_error = error is not None and error.shape[-1] == format.nbytes and bool(error.any())
        return ErrorFeedback(self.config, error if has_error else None, format, int(state.get("steps", 0)))


def error_format(config: LoCoConfig, parameters: tuple[ParameterShard, ...], block_size: int | None) -> WireFormat:
    """Return the format in which the error of gradients of ``parameters`` is kept."""
    bits, dtype = ERROR_FORMATS[config.error_dtype]
    return wire_format(parameters, bits, block_size, dtype)


@dataclass(frozen=True, eq=False)
class GradientHop:
    """One rank's part of a hop among G ranks: the P of its node, or the N with its local rank."""

    name: str  # "intra" or "inter" nodes
    rows: tuple[int, ...]  # shape on the wire without L: (P, N) or (N,)
    unit: FSDPUnit
    shared: Shared
    feedback: ErrorFeedback | None  # LoCo's; None without it
    scales: ElementScales | None

    def encode_pieces(
        self, gradients: GradientSum, format: WireFormat, draw: tuple[int, int]
    ) -> tuple[Tensor, GradientHop]:
        """Encode gradients [G, ..., L], a piece for each rank of the hop: uint8 [G, ..., nbytes], and the hop after it.

        draw: the unit's reductions between nodes, and micro-batches of this step, before this one.
        """
        config, feedback = self.shared.config, self._feedback_on_device()
        scales = self.scales.for_format(format) if self.scales is not None else None
        exponents = scales.sent if scales is not None else None
        for read in (feedback.error if feedback is not None else None, exponents):
            if read is not None and read.is_cuda:  # allocated on another stream, if it was loaded or rescaled
                read.record_stream(current_stream(read.device))  # type: ignore[arg-type]
        noise_seed = None
        if config.gradient_rounding == "stochastic":
            noise_seed = mix_seed(config.seed, "gradients", self.name, self.unit.name, self.unit.topology.rank, *draw)
        is_sampled = self.shared.position.is_sampled(draw[0])
        if is_sampled:
            gradients = GradientSum(gradients.compute())  # to compare with what arrives
        if feedback is not None:
            is_last = self.shared.position.is_last
            wires, feedback = feedback.compensate(gradients, format, noise_seed, is_last, exponents)
        else:
            wires = gradients.to_wire(format, noise_seed, exponents=exponents)
        if is_sampled:
            self._sample(gradients.parts, format, wires, exponents)
        sent = wires.nbytes - wires[0].nbytes  # this rank keeps one piece
        is_inter = self.name == "inter"
        self.shared.traffic.add(intra_node=0 if is_inter else sent, inter_node=sent if is_inter else 0)
        return wires, replace(self, feedback=self._to_keep(feedback), scales=scales)

    def rescaled(self, factor: float) -> GradientHop:
        """Return the hop with LoCo's error times ``factor``."""
        feedback = self._feedback_on_device()
        return replace(self, feedback=self._to_keep(feedback and feedback.rescaled(factor)))

    def _feedback_on_device(self) -> ErrorFeedback | None:
        if self.feedback is None or self.feedback.error is None:
            return self.feedback
        return replace(self.feedback, error=self.feedback.error.to(self.unit.device, non_blocking=True))

    def _to_keep(self, feedback: ErrorFeedback | None) -> ErrorFeedback | None:
        if feedback is None or feedback.error is None or not self.shared.config.offloads("errors"):
            return feedback
        return replace(feedback, error=to_host(feedback.error))

    def state_dict(self) -> dict[str, Tensor]:
        # The same keys and shapes from the start: what is not there yet is zeros.
        state, zeros = dict[str, Tensor](), partial(torch.zeros, dtype=torch.uint8, device=self.unit.device)
        if self.feedback is not None:
            kept = self.feedback.state_dict()
            if "error" not in kept:
                kept["error"] = zeros(*self.rows, self._error_format().nbytes)
            if self.shared.config.offloads("errors"):
                kept["error"] = kept["error"].cpu()
                torch.get_device_module(self.unit.device).synchronize()  # the copy to host memory may still be queued
            state |= {f"{self.name}.{key}": value for key, value in kept.items()}
        if self.scales is not None:
            kept = self.scales.state_dict()
            if "exponents" not in kept:
                kept["exponents"] = zeros(2, *self.rows, self.unit.trainable.numel)
            state |= {f"element_scales.{key}": value for key, value in kept.items()}
        return state

    def loaded(self, state: dict[str, Tensor]) -> GradientHop:
        """Return the hop with what ``state_dict`` returned."""
        state = {key: value.to(self.unit.device) for key, value in state.items()}
        feedback, scales = self.feedback, self.scales
        if feedback is not None:
            feedback = feedback.loaded(below(state, f"{self.name}."), self._error_format())
        if scales is not None:
            scales = ElementScales.loaded(below(state, "element_scales."), self.unit.trainable.parameters)
        return replace(self, feedback=self._to_keep(feedback), scales=scales)

    def _error_format(self) -> WireFormat:
        assert self.feedback is not None
        parameters = self.unit.trainable.parameters
        return error_format(self.feedback.config, parameters, self.shared.config.gradient_block_size)

    def _sample(self, pieces: Tensor, format: WireFormat, wires: Tensor, exponents: Tensor | None) -> None:
        scales = exponents.unsqueeze(0) if exponents is not None else None
        arrived = GradientSum(wires.unsqueeze(0), format, exponents=scales).compute()
        what = f"gradients/{self.name}"
        record_error(self.unit, what, pieces, arrived)
        record_codes(self.unit, what, format, wires)
        if (feedback := self._feedback_on_device()) is not None:
            old = feedback.decoded() if feedback.error is not None else arrived.new_zeros(())
            record_error_state(self.unit, what, pieces, old)


@dataclass(frozen=True, eq=False)
class NodeSum:
    """One unit's sum [N, L] within a node over the micro-batches so far, kept as ``gradient_sum_dtype``.

    In bf16 and int8 it is rounded stochastically after every micro-batch but the last: rounding to nearest would lose
    every addend below half a step of a sum that has grown. With ``offload`` it is kept in host memory, and the stream
    that reduces gradients copies it.
    """

    unit: FSDPUnit
    formats: Formats
    part: UnitPart  # the parameters that are added up
    kept: Tensor | None = None  # fp32 or bf16 [N, L]; int8: wire buffers uint8 [N, nbytes]
    micro_batches: int = 0  # in ``kept``

    def for_part(self, part: UnitPart) -> NodeSum:
        """Return the sum of the gradients of ``part``: parameters unfrozen since the first micro-batch have zeros."""
        if part == self.part or (kept := self._on_device()) is None:
            return replace(self, part=part)
        assert set(self.part.indices) <= set(part.indices), "a parameter was frozen while its gradients were held"
        numel, old, new = self.unit.whole.numel, None, None
        if self.formats.config.gradient_sum_dtype == "int8":
            whole, before, after = (self.formats.node_sum(each) for each in (self.unit.whole, self.part, part))
            numel, old, new = whole.nbytes, (whole, before), (whole, after)
        zeros = kept.new_zeros(len(kept), numel)  # wire buffers of zeros decode to zeros
        total = part.select(self.part.insert(kept, zeros, old), new)
        return replace(self, part=part, kept=self._to_keep(total))

    def plus(self, arrived: GradientSum) -> GradientSum:
        """Return the sum [N, L] of what arrived for this micro-batch and what was kept."""
        kept = self._on_device()
        if kept is not None and kept.dtype == torch.uint8:
            format = self.formats.node_sum(self.part)
            kept = format.decode(kept, torch.empty(*arrived.rows, format.numel, device=kept.device))
        return replace(arrived, plus=kept.float() if kept is not None else None)

    def with_added(self, arrived: GradientSum, noise_seed: int | None) -> NodeSum:
        """Return the sum [N, L] with what arrived for this micro-batch, in the memory of the old one if it is fp32."""
        dtype, format = self.formats.config.gradient_sum_dtype, self.formats.node_sum(self.part)
        if dtype == "int8":
            # The encoder's one pass adds it as it adds LoCo's error, which is left as it is here.
            kept = Compensation(format, self._on_device(), new_error=None, beta=0.0, decay=1.0)
            total = arrived.to_wire(format, noise_seed, kept)
        else:
            total = self.plus(arrived).compute()
            if dtype == "bf16":
                assert noise_seed is not None
                total = round_to_bf16(total, noise_seed)
        return replace(self, kept=self._to_keep(total), micro_batches=self.micro_batches + 1)

    def _to_keep(self, total: Tensor) -> Tensor:
        return to_host(total) if self.formats.config.offloads("sums") else total

    def _on_device(self) -> Tensor | None:
        return self.kept.to(self.unit.device, non_blocking=True) if self.kept is not None else None


def round_to_bf16(values: Tensor, noise_seed: int) -> Tensor:
    """Round fp32 values to bf16 stochastically, with the same noise as quantization; NaN and Inf stay."""
    # bf16 is the upper half of an fp32 number. Random bits that are added to the lower half carry into it with the
    # probability that the lower half asks for.
    noise = (counter_uniform(values.numel(), noise_seed, values.device) * 2**16).to(torch.int32).view(values.shape)
    upper = (values.view(torch.int32) + noise) & -(2**16)
    return torch.where(values.isfinite(), upper.view(torch.float32), values).to(torch.bfloat16)
