"""State that a rank keeps between reductions of a unit's gradients: LoCo's error, and the node's sum.

LoCo (arXiv 2407.04480): a moving average of what quantization lost is added to later gradients.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..config import LoCoConfig
from ..fsdp.formats import Formats, UnitPart
from ..fsdp.fsdp_unit import FSDPUnit
from ..fsdp.shared import Shared, below
from ..wire.format import GradientSum, WireFormat, wire_format
from ..wire.layout import Compensation, ParameterShard, encoded_addend
from ..wire.quantization import counter_uniform, mix_seed
from ..wire.scales import ElementScales

ERROR_FORMATS = {"int8": (8, torch.float32), "bf16": (None, torch.bfloat16), "fp32": (None, torch.float32)}


class ErrorFeedback:
    """The compression error e of one hop of one unit, and the encoder that uses it.

    With gradients g [..., L] and the hop's quantizer Q:

        h = g + e,  q = Q(h) is sent,  d = h - deq(q),  e <- beta * e + (1 - beta) * d

    e starts at zero and is kept in a wire buffer. The hop between nodes runs once per optimizer step, that within a
    node once per micro-batch.
    """

    def __init__(self, config: LoCoConfig) -> None:
        self.config = config
        self.error: Tensor | None = None  # uint8 [..., nbytes]; None = zero
        self.steps = 0  # optimizer steps since the last reset
        self._format: WireFormat | None = None  # format of ``error``; None: not known yet
        self._before_step: tuple[Tensor | None, int, WireFormat | None] = (None, 0, None)

    def format(self, parameters: tuple[ParameterShard, ...], block_size: int | None) -> WireFormat:
        """Return the format in which the error of these gradients is kept."""
        bits, dtype = ERROR_FORMATS[self.config.error_dtype]
        return wire_format(parameters, bits, block_size, dtype)

    def begin_step(self) -> None:
        """Begin another optimizer step, to which ``undo_step`` returns.

        Without ``exact_undo`` it cannot once an encoding has changed the error, and sets it to zero instead. The
        changed error would be worse than none: gradients of a step that overflowed can be as large as numbers go.
        """
        self._before_step = self.error, self.steps, self._format

    def compensate(
        self,
        gradients: GradientSum,
        hop: WireFormat,
        noise_seed: int | None = None,
        is_last: bool = True,
        exponents: Tensor | None = None,
    ) -> Tensor:
        """Compensate and encode gradients [..., L] into uint8 [..., nbytes], and update the error.

        is_last: whether this is the last encoding of an optimizer step.
        exponents: uint8 [..., L], of the scales that elements are divided by (scales.py).
        """
        config, interval = self.config, self.config.reset_interval
        format = self.format(hop.parameters, hop.block_size)
        is_other = self._format is not None and self._format.parameters != format.parameters
        if is_other or (self.error is not None and self.error.shape[-1] != format.nbytes):
            self.error = None  # parameters were frozen or unfrozen
        elif self._before_step[0] is self.error:  # a loaded error's format is known only now
            self._before_step = *self._before_step[:2], format
        self._format = format
        self.steps += is_last
        decay, new_error = 1.0, None
        if is_last and config.reset == "hard" and interval is not None and self.steps >= interval:
            self.steps = 0
        else:
            # Not in place: CUDA kernels for large or odd blocks read the old error again after they wrote the new one.
            new_error = torch.empty(*gradients.rows, self._format.nbytes, dtype=torch.uint8, device=gradients.device)
        if is_last and config.reset == "decay" and interval is not None:
            decay = 1 - 1 / interval
        compensation = Compensation(self._format, self.error, new_error, config.beta, decay)
        wire = gradients.to_wire(hop, noise_seed, compensation, exponents)
        self.error = new_error
        if not config.exact_undo:
            self._before_step = None, 0, None
        return wire

    def undo_step(self) -> None:
        """Restore the error at ``begin_step``, or set it to zero: gradients since then were dropped."""
        self.error, self.steps, self._format = self._before_step

    def rescale(self, factor: float) -> None:
        """Multiply the error by ``factor``, by which the loss scale, and so every later gradient, changed."""
        if self.error is not None and self._format is not None:
            self.error = self._format.encode(self.decode(self.error).mul_(factor))

    def decode(self, error: Tensor) -> Tensor:
        """Decode an error to fp32 [..., L]; something must have been encoded before."""
        assert self._format is not None
        out = torch.empty(*error.shape[:-1], self._format.numel, device=error.device)
        return self._format.decode(error, out)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"steps": torch.tensor(self.steps)}
        if self.error is not None:
            state["error"] = self.error
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what ``state_dict`` returned. Zeros, or no state, mean no error."""
        self.steps, error = int(state.get("steps", 0)), state.get("error")
        self.error = error if error is not None and error.any() else None
        self._format = None
        self._before_step = self.error, self.steps, None


@dataclass(frozen=True, eq=False)
class GradientHop:
    """One rank's part of a hop among G ranks: the P of its node, or the N with its local rank."""

    name: str  # "intra" or "inter" nodes
    rows: tuple[int, ...]  # shape on the wire without L: (P, N) or (N,)
    unit: FSDPUnit
    shared: Shared
    feedback: ErrorFeedback | None  # LoCo's
    element_scales: ElementScales | None

    def encode_pieces(self, gradients: GradientSum, format: WireFormat, draw: tuple[int, int]) -> Tensor:
        """Encode gradients [G, ..., L], a piece for each rank of the hop, with LoCo: uint8 [G, ..., nbytes].

        draw: the unit's reductions between nodes, and micro-batches of this step, before this one.
        """
        config, feedback = self.shared.config, self.feedback
        exponents = self.element_scales.of_sent(format) if self.element_scales is not None else None
        noise_seed = None
        if config.gradient_rounding == "stochastic":
            noise_seed = mix_seed(config.seed, "gradients", self.name, self.unit.name, self.unit.topology.rank, *draw)
        is_sampled = self.shared.monitor.is_due(draw[0])
        if is_sampled:
            gradients = gradients.computed()  # to compare with what arrives
        error = feedback.error if feedback is not None else None  # added to these gradients
        if feedback is not None:
            # The hop between nodes runs once per step, that within a node once per micro-batch.
            wires = feedback.compensate(gradients, format, noise_seed, self.shared.position.is_last, exponents)
        else:
            wires = gradients.to_wire(format, noise_seed, exponents=exponents)
        if is_sampled:
            self._sample(gradients.parts, format, wires, exponents, error)
        sent = wires.nbytes - wires[0].nbytes  # this rank keeps one piece
        is_inter = self.name == "inter"
        self.shared.traffic.add(intra_node=0 if is_inter else sent, inter_node=sent if is_inter else 0)
        return wires

    def sum_of(self, wires: Tensor, format: WireFormat) -> GradientSum:
        """Return the sum [..., L] of what the G ranks send here, uint8 [G, ..., nbytes], which may arrive later."""
        exponents = self.element_scales.of_received() if self.element_scales is not None else None
        return GradientSum(wires, format, exponents=exponents)

    def update_scales(self, format: WireFormat, sent: Tensor, received: GradientSum) -> None:
        """Let element scales learn from what arrived: ``sent`` by this rank, ``received`` from all."""
        if self.element_scales is not None:
            self.element_scales.observe(format, sent, received.parts)

    def begin_step(self, continues: bool) -> None:
        """Begin an optimizer step, to which ``undo_step`` returns; ``continues``: LoCo's began with other gradients."""
        if self.feedback is not None and not continues:
            self.feedback.begin_step()
        if self.element_scales is not None:
            self.element_scales.begin_step()

    def undo_step(self) -> None:
        """Restore what the gradients since ``begin_step`` changed."""
        for state in (self.feedback, self.element_scales):
            if state is not None:
                state.undo_step()

    def state_dict(self) -> dict[str, Tensor]:
        # The same keys and shapes from the start: what is not there yet is zeros.
        part, state = self.unit.trainable, dict[str, Tensor]()
        zeros = partial(torch.zeros, dtype=torch.uint8, device=self.unit.device)
        if self.feedback is not None:
            kept = self.feedback.state_dict()
            if "error" not in kept:
                format = self.feedback.format(part.parameters, self.shared.config.gradient_block_size)
                kept["error"] = zeros(*self.rows, format.nbytes)
            state |= {f"{self.name}.{key}": value for key, value in kept.items()}
        if self.element_scales is not None:
            kept = self.element_scales.state_dict()
            if "exponents" not in kept:
                kept["exponents"] = zeros(2, *self.rows, part.numel)
            state |= {f"element_scales.{key}": value for key, value in kept.items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for prefix, kept in ((f"{self.name}.", self.feedback), ("element_scales.", self.element_scales)):
            if kept is not None:
                kept.load_state_dict({k: value.to(self.unit.device) for k, value in below(state, prefix).items()})

    def _sample(
        self, pieces: Tensor, format: WireFormat, wires: Tensor, exponents: Tensor | None, error: Tensor | None
    ) -> None:
        scales = exponents.unsqueeze(0) if exponents is not None else None
        arrived = GradientSum(wires.unsqueeze(0), format, exponents=scales).compute()
        what, unit = f"gradients/{self.name}", self.unit.name
        self.shared.monitor.record(what, unit, pieces, arrived)
        self.shared.monitor.record_codes(what, unit, format, wires)
        if self.feedback is not None:
            old = self.feedback.decode(error) if error is not None else arrived.new_zeros(())
            self.shared.monitor.record_error_state(what, unit, pieces, old)


def make_hop(name: str, rows: tuple[int, ...], unit: FSDPUnit, shared: Shared) -> GradientHop:
    """Make a hop with what the settings let it keep."""
    config, loco, is_inter = shared.config, shared.config.loco, name == "inter"
    feedback = ErrorFeedback(loco) if loco is not None and (is_inter or loco.hops == "both") else None
    scales = ElementScales() if config.gradient_element_scales and is_inter else None
    return GradientHop(name, rows, unit, shared, feedback, scales)


class NodeSum:
    """One unit's sum [N, L] within a node over the micro-batches so far, kept as ``gradient_sum_dtype``.

    In bf16 and int8 it is rounded stochastically after every micro-batch but the last: rounding to nearest would lose
    every addend below half a step of a sum that has grown. Keeping what rounding lost would take a second buffer.

    With ``offload_gradient_sums`` it is kept in host memory. The copies run on the stream that reduces gradients.
    """

    def __init__(self, unit: FSDPUnit, formats: Formats) -> None:
        self.formats, self.config = formats, formats.config
        self.unit, self.part = unit, unit.whole  # the parameters that are added up
        self.kept: Tensor | None = None  # fp32 or bf16 [N, L]; int8: wire buffers uint8 [N, nbytes]

    @property
    def format(self) -> WireFormat:
        """The format of int8 sums."""
        return self.formats.node_sum(self.part)

    def set_part(self, part: UnitPart) -> None:
        """Add up gradients of ``part`` from now on. What is kept gets zeros for parameters unfrozen since."""
        if part != self.part and (kept := self._on_device()) is not None:
            assert set(self.part.indices) <= set(part.indices), "a parameter was frozen while its gradients were held"
            if self.config.gradient_sum_dtype == "int8":
                old, new, whole = (self.formats.node_sum(each) for each in (self.part, part, self.unit.whole))
                wires = kept.new_zeros(len(kept), whole.nbytes)  # which decode to zeros
                self._keep(part.select_wires(self.part.insert_wires(kept, wires, whole, old), whole, new))
            else:
                sums = kept.new_zeros(len(kept), self.unit.whole.numel)
                self._keep(part.select(self.part.insert(kept, sums)))
        self.part = part

    def plus(self, arrived: GradientSum) -> GradientSum:
        """Return the sum [N, L] of what arrived for this micro-batch and what was kept."""
        kept = self._on_device()
        if kept is None or kept.dtype == torch.float32:
            return replace(arrived, plus=kept)
        if kept.dtype == torch.bfloat16:
            return replace(arrived, plus=kept.float())
        out = torch.empty(*arrived.rows, self.format.numel, device=kept.device)
        return replace(arrived, plus=self.format.decode(kept, out))

    def add(self, arrived: GradientSum, noise_seed: int | None) -> None:
        """Keep the sum [N, L] of what arrived for this micro-batch and what was kept.

        noise_seed: of stochastic rounding; may be None for fp32 sums.
        """
        if self.config.gradient_sum_dtype == "int8":
            total = arrived.to_wire(self.format, noise_seed, encoded_addend(self.format, self._on_device()))
        else:
            total = self.plus(arrived).compute()
            if self.config.gradient_sum_dtype == "bf16":
                assert noise_seed is not None
                total = round_to_bf16(total, noise_seed)
        self._keep(total)

    def drop(self) -> None:
        self.kept = None

    def _keep(self, total: Tensor) -> None:
        self.kept = _in_host_memory(total) if self.config.offload_gradient_sums else total

    def _on_device(self) -> Tensor | None:
        return self.kept.to(self.unit.device, non_blocking=True) if self.kept is not None else None


def round_to_bf16(values: Tensor, noise_seed: int) -> Tensor:
    """Round fp32 values to bf16 stochastically, with the same noise as quantization; NaN and Inf stay."""
    # bf16 is the upper half of an fp32 number. Random bits that are added to the lower half carry into it with the
    # probability that the lower half asks for.
    noise = (counter_uniform(values.numel(), noise_seed, values.device) * 2**16).to(torch.int32).view(values.shape)
    upper = (values.view(torch.int32) + noise) & -(2**16)
    return torch.where(values.isfinite(), upper.view(torch.float32), values).to(torch.bfloat16)


def _in_host_memory(tensor: Tensor) -> Tensor:
    """Copy the tensor to host memory: pinned, so that the current stream does it and the host does not wait."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
