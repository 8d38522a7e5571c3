"""LoCo's error feedback (arXiv 2407.04480): what quantization lost returns, averaged, with the next gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import LoCoConfig
from .wire_format import ParameterShard, WireFormat

_ERROR_BITS = 8


class ErrorFeedback:
    """The compression error e of one hop of one unit, and the encoder that uses it.

    Per optimizer step, with gradients g [S, L] and the hop's quantizer Q:

        h = g + e,  q = Q(h) is sent,  d = h - deq(q),  e <- beta * e + (1 - beta) * d

    e starts at zero and is kept as 8-bit blocks in a wire buffer of its own.
    """

    def __init__(self, config: LoCoConfig) -> None:
        self.config = config
        self.error: Tensor | None = None  # uint8 [S, nbytes]; None = zero
        self.steps = 0  # since the last reset
        self._before_step: tuple[Tensor | None, int] = (None, 0)
        self._format: WireFormat | None = None  # of ``error``

    def encode(
        self, gradients: Tensor, wire_format: WireFormat, parameters: Sequence[ParameterShard], block_size: int | None
    ) -> Tensor:
        """Compensate and encode fp32 gradients [S, L] into uint8 [S, nbytes], and update the error."""
        self._before_step = (self.error, self.steps)
        self._format = errors = WireFormat(parameters, _ERROR_BITS, block_size, torch.float32)
        if self.error is None:
            error = torch.zeros_like(gradients)
        else:
            error = errors.decode(self.error, out=torch.empty_like(gradients))
        compensated = gradients + error
        wire = wire_format.encode(compensated)
        lost = compensated - wire_format.decode(wire, out=torch.empty_like(gradients))
        self.steps += 1
        if self.config.reset_interval is not None and self.steps >= self.config.reset_interval:
            self.error, self.steps = None, 0
        else:
            self.error = errors.encode(self.config.beta * error + (1 - self.config.beta) * lost)
        return wire

    def undo_step(self) -> None:
        """Take the error back to what it was before the last step: that step's gradients were thrown away."""
        self.error, self.steps = self._before_step

    def rescale(self, factor: float) -> None:
        """Multiply the error: the loss scale, and with it every gradient to come, changed by ``factor``."""
        if self.error is not None and self._format is not None:
            values = torch.empty(*self.error.shape[:-1], self._format.numel, device=self.error.device)
            self.error = self._format.encode(self._format.decode(self.error, out=values).mul_(factor))
