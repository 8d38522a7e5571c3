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
of less than one are up to a dither that all elements share.

As only ratios count, the loss scale does not matter.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .format import WireFormat
from .layout import Compensation, ParameterShard, Segment
from .quantization import STEPS, Code

STEPS_PER_OCTAVE = 16
QUIETEST = 255
WEIGHT = 0.02  # w; larger at first, so that v is the mean of what came


@dataclass(frozen=True)
class ScaledFormat:
    """A wire format for values that are divided by their elements' scales; encodes and decodes as WireFormat does."""

    format: WireFormat
    exponents: Tensor  # e, uint8 [N, L]: of N pieces to send, or of those that N peers sent

    @property
    def numel(self) -> int:
        return self.format.numel

    @property
    def parameters(self) -> tuple[ParameterShard, ...]:
        return self.format.parameters

    @property
    def block_size(self) -> int | None:
        return self.format.block_size

    def encode(self, values: Tensor, noise_seed: int | None, compensation: Compensation | None = None) -> Tensor:
        """Encode values [N, L] of any float type into uint8 [N, nbytes]."""
        values = values.float()
        scales = _scales(self.exponents, _table(values.device))
        if compensation is None:
            return self.format.encode(values / scales, noise_seed)
        assert isinstance(compensation.format, WireFormat)
        error = torch.zeros_like(values)
        if compensation.error is not None:
            compensation.format.decode(compensation.error, out=error)
        compensated = values + error
        wires = self.format.encode(compensated / scales, noise_seed)
        if compensation.new_error is not None:
            sent = self.format.decode(wires, out=torch.empty_like(values)).mul_(scales)
            compensation.format.encode(compensation.moved(error, compensated, sent), out=compensation.new_error)
        return wires

    def decode(self, wires: Tensor, out: Tensor) -> Tensor:
        """Decode wire buffers uint8 [N, nbytes] into ``out`` fp32 [N, L]; returns ``out``."""
        return self.format.decode(wires, out).mul_(_scales(self.exponents, _table(out.device)))

    def decode_sum(self, peers: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
        """Decode the buffers uint8 [N, nbytes] of N peers, and add them in order, into or onto ``out`` fp32 [L]."""
        total, addend, table = torch.zeros_like(out), torch.empty_like(out), _table(out.device)
        for peer, exponents in zip(peers, self.exponents, strict=True):
            total += self.format.decode(peer, addend).mul_(_scales(exponents, table))
        return out.copy_(total.add_(out) if accumulate else total)


class ElementScales:
    """The scales of one hop of one unit: of pieces [N, L] that are sent to N ranks, and of those that N ranks send.

    They move when the next step begins, so that a step which is undone before that leaves no trace. Until then what
    was sent is kept, as bytes. A reduction whose gradients did not arrive counts at neither end.
    """

    def __init__(self) -> None:
        self.exponents: Tensor | None = None  # e, uint8 [2, N, L]: of what is sent, and of what comes; None = all 0
        self.steps = 0  # reductions that moved them
        self.sent_wires: list[tuple[WireFormat, Tensor]] = []  # since the step began, each uint8 [2, N, nbytes]

    def to_send(self, format: WireFormat) -> WireFormat | ScaledFormat:
        if self.exponents is not None and self.exponents.shape[-1] != format.numel:
            self.exponents, self.steps = None, 0  # parameters were frozen or unfrozen
        return format if self.exponents is None else ScaledFormat(format, self.exponents[0])

    def to_receive(self, format: WireFormat) -> WireFormat | ScaledFormat:
        return format if self.exponents is None else ScaledFormat(format, self.exponents[1])

    def arrived(self, format: WireFormat, sent: Tensor, received: Tensor) -> None:
        """Say that these wire buffers, uint8 [N, nbytes], were sent and have arrived."""
        self.sent_wires.append((format, torch.stack([sent, received])))

    def begin_step(self) -> None:
        """Say that the gradients to come are another optimizer step's."""
        self.exponents, self.steps = self._moved()
        self.sent_wires = []

    def undo_step(self) -> None:
        """Say that the gradients since ``begin_step`` were thrown away."""
        self.sent_wires = []

    def state_dict(self) -> dict[str, Tensor]:
        exponents, steps = self._moved()
        state = {"steps": torch.tensor(steps)}
        return state if exponents is None else state | {"exponents": exponents}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave; before the first step, and without a state, there are no scales."""
        self.steps, self.sent_wires = int(state.get("steps", 0)), []
        self.exponents = state["exponents"] if self.steps > 0 else None

    def _moved(self) -> tuple[Tensor | None, int]:
        exponents, steps = self.exponents, self.steps
        for format, wires in self.sent_wires:
            exponents, steps = moved(exponents, format, wires, steps), steps + 1
        return exponents, steps


def moved(exponents: Tensor | None, format: WireFormat, wires: Tensor, steps: int) -> Tensor:
    """Exponents uint8 [..., L] after ``steps`` reductions and one more, whose wire buffers were uint8 [..., nbytes]."""
    assert format.code is not None
    if exponents is None:
        exponents = torch.zeros(*wires.shape[:-1], format.numel, dtype=torch.uint8, device=wires.device)
    moves = _moves(format.code, steps)
    if not any(moves):
        return exponents
    result = exponents.clone()
    for segment in format.quantized:
        codes, scales = reference.codes_and_scales(format, segment, wires)  # [..., blocks, B], [..., blocks]
        halves = (scales > 0) & format.code.is_mean  # levels are c + 1/2 there, elsewhere c
        doubled = codes.to(torch.int16).mul_(2).add_(halves.unsqueeze(-1)).abs_()  # twice the size of levels
        louder = torch.full_like(doubled, moves[0])
        for size, (less, more) in enumerate(itertools.pairwise(moves), start=1):
            if less != more:
                louder.add_(doubled >= size, alpha=more - less)
        louder.mul_((scales.abs() > 0).unsqueeze(-1))  # blocks of zeros or NaN tell nothing
        blocks = louder.neg_().add_(_blocks(segment, exponents))
        blocks = blocks.sub_(blocks.amin(dim=-1, keepdim=True)).clamp_(max=QUIETEST).to(torch.uint8)
        result[..., segment.start : segment.stop] = blocks.flatten(-2)[..., : segment.stop - segment.start]
    return result


def _blocks(segment: Segment, exponents: Tensor) -> Tensor:
    """Cut a segment of exponents [..., L] into blocks [..., blocks, B]; padding is as quiet as can be."""
    padded = F.pad(exponents[..., segment.start : segment.stop], (0, segment.padding), value=QUIETEST)
    return padded.unflatten(-1, (segment.num_blocks, segment.block_size))


@functools.lru_cache(maxsize=16)
def _moves(code: Code, steps: int) -> list[int]:
    """By how many steps a scale grows, by the element's level: 0, 1/2, 1 ... 2^(bits - 1)."""
    weight = max(WEIGHT, 1 / (steps + 2))
    dither = steps * (math.sqrt(5) - 1) / 2 % 1  # evenly spread over any stretch of steps
    # Of a normally distributed block, about: the rest is a factor of w.
    mean_square = math.pi / 2 / STEPS[code.bits][0] ** 2 if code.is_mean else (code.qmax / 3) ** 2
    levels = [size / 2 for size in range(2**code.bits + 1)]
    factors = [1 - weight + weight * level**2 / mean_square for level in levels]
    return [math.floor(STEPS_PER_OCTAVE / 2 * math.log2(factor) + dither) for factor in factors]


def _table(device: torch.device) -> Tensor:
    """s, fp32, of every exponent."""
    every = torch.arange(QUIETEST + 1, dtype=torch.float64, device=device)
    return every.div_(-STEPS_PER_OCTAVE).exp2_().float()


def _scales(exponents: Tensor, table: Tensor) -> Tensor:
    """s, fp32, of exponents uint8 of any shape."""
    return table.index_select(0, exponents.reshape(-1).to(torch.int32)).view(exponents.shape)
