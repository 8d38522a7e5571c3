"""LoCo's error feedback (arXiv 2407.04480): a moving average of what quantization lost is added to later gradients."""

import torch
from torch import Tensor

from ..config import LoCoConfig
from ..wire.format import WireFormat, wire_format
from ..wire.layout import Compensation, ParameterShard
from .gradient_sum import GradientSum

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
        self._format: WireFormat | None = None  # of ``error``; None: not known yet
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

    def encode(
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
        wire = gradients.encode(hop, noise_seed, compensation, exponents)
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
