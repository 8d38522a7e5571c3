"""Scales of their own for elements: gradients are divided by them before they are coded, and multiplied afterwards.

Elements of a block differ by orders of magnitude, and Adam divides each by its own history. Noise that is small beside
the block is large beside a quiet element. So each element has a scale s, which follows the root of its mean square:

    v <- (1 - w) v + w decoded^2,  s = sqrt(v),  decoded = level * step * s

``step`` is the scale of the element's block, which is sent with the codes. It adapts to whatever all elements of the
block have in common, so v needs only to be right within a block, and decoded may be counted in steps:

    v <- v (1 - w + w level^2 / m),  m = the mean square of levels, about

So a scale moves by a factor that its code alone decides, as in Jayant's adaptive quantizers ("Adaptive Quantization
with a One-Word Memory", 1973). Sender and receiver have the codes; neither tells the other anything. They count in
integers, so that they cannot come apart: s = 2^(-e / 16), with e a byte, 0 for the loudest element of each block. Moves
of less than one are up to a dither that all elements share. As only ratios count, the loss scale does not matter.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .format import WireFormat
from .layout import ParameterShard
from .quantization import STEPS_PER_OCTAVE, Code

WEIGHT = 0.02  # w; larger at first, so that v is the mean of what came


@dataclass(frozen=True, eq=False)
class ElementScales:
    """The scales of one hop of one unit: of pieces [N, L] that are sent to N ranks, and of those that N ranks send.

    They move when the next step begins, so that a step which is undone before that leaves no trace. Until then what
    was sent is kept, as bytes. A reduction whose gradients did not arrive counts at neither end.
    """

    exponents: Tensor | None = None  # e, uint8 [2, N, L]: of what is sent, and of what comes; None = all 0
    steps: int = 0  # reductions that updated them
    wires: tuple[tuple[WireFormat, Tensor], ...] = ()  # sent since the step began, and arrived: uint8 [2, N, nbytes]
    parameters: tuple[ParameterShard, ...] | None = None  # whose elements have them; None: nothing was encoded yet

    @property
    def sent(self) -> Tensor | None:
        """The exponents of pieces to send, uint8 [N, L]; None = all 0."""
        return self.exponents[0] if self.exponents is not None else None

    @property
    def received(self) -> Tensor | None:
        """The exponents of the pieces that N ranks send, uint8 [N, L]; None = all 0."""
        return self.exponents[1] if self.exponents is not None else None

    def for_format(self, format: WireFormat) -> ElementScales:
        """Return the scales of gradients in ``format``: none, if parameters were frozen or unfrozen since."""
        is_same = self.parameters == format.parameters
        return self if is_same else ElementScales(wires=self.wires, parameters=format.parameters)

    def observed(self, format: WireFormat, sent: Tensor, received: Tensor) -> ElementScales:
        """Return the scales after these wire buffers, uint8 [N, nbytes], were sent and have arrived."""
        return replace(self, wires=(*self.wires, (format, torch.stack([sent, received]))))

    def moved(self) -> ElementScales:
        """Return the scales of the next step: moved by what was sent."""
        exponents, steps = self.exponents, self.steps
        for format, wires in self.wires:
            moves = _moves(format.code, steps)
            if exponents is None or any(moves):
                exponents = format.move_exponents(exponents, wires, moves)
            steps += 1
        return replace(self, exponents=exponents, steps=steps, wires=())

    def state_dict(self) -> dict[str, Tensor]:
        moved = self.moved()
        state = {"steps": torch.tensor(moved.steps)}
        return state if moved.exponents is None else state | {"exponents": moved.exponents}

    @staticmethod
    def loaded(state: dict[str, Tensor], parameters: tuple[ParameterShard, ...]) -> ElementScales:
        """Return what ``state_dict`` saved; before the first step, and without a state, there are no scales."""
        steps = int(state.get("steps", 0))
        if steps == 0 or state["exponents"].shape[-1] != sum(parameter.numel for parameter in parameters):
            return ElementScales(parameters=parameters)
        return ElementScales(state["exponents"], steps, parameters=parameters)


@functools.lru_cache(maxsize=16)
def _moves(code: Code, steps: int) -> list[int]:
    """By how many steps a scale grows, by the element's level: 0, 1/2, 1 ... 2^(bits - 1)."""
    weight = max(WEIGHT, 1 / (steps + 2))
    dither = steps * (math.sqrt(5) - 1) / 2 % 1  # evenly spread over any stretch of steps
    levels = [size / 2 for size in range(2**code.bits + 1)]
    factors = [1 - weight + weight * level**2 / code.mean_square for level in levels]  # the rest is a factor of w
    return [math.floor(STEPS_PER_OCTAVE / 2 * math.log2(factor) + dither) for factor in factors]
