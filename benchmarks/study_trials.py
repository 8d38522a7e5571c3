"""The trainer with formats between nodes that were tried and are not in the package; the study runs it.

python benchmarks/study_trials.py --trial outliers ...  # the rest are flags of pretrain_gpt.py
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.zeropp.fsdp.unit import UnitPart
from megatron_zpp.zeropp.reduce.gradient_hops import GradientHop, GradientHops
from megatron_zpp.zeropp.reduce.loco import ErrorFeedback
from megatron_zpp.zeropp.wire import reference
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import Compensation, Segment
from megatron_zpp.zeropp.wire.quantization import STEPS, counter_uniform
from megatron_zpp.zeropp.wire.scales import ElementScales, ScaledFormat


@dataclasses.dataclass(frozen=True)
class Trial(ScaledFormat):
    """A format like the package's, with LoCo around it; a class of its own says what travels and what arrives."""

    seed: int  # both ends know it; another one in each step

    def wires_of(self, values: Tensor) -> Tensor:
        """Of values fp32 [N, L]: uint8 [N, nbytes]."""
        raise NotImplementedError

    def decode(self, wires: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError

    def encode_sum(
        self,
        peers: Tensor,
        source: WireFormat,
        noise_seed: int | None,
        *,
        plus: Tensor | None = None,
        compensation: Compensation | None = None,
    ) -> Tensor:
        total = source.decode_sum(peers, torch.empty(*peers.shape[1:-1], self.numel, device=peers.device))
        return self.encode(total, noise_seed, plus=plus, compensation=compensation)

    def encode(
        self,
        values: Tensor,
        noise_seed: int | None,
        *,
        plus: Tensor | None = None,
        compensation: Compensation | None = None,
    ) -> Tensor:
        values = values.float() if plus is None else values.float() + plus
        if compensation is None:
            return self.wires_of(values)
        assert isinstance(compensation.format, WireFormat)
        error = torch.zeros_like(values)
        if compensation.error is not None:
            compensation.format.decode(compensation.error, out=error)
        compensated = values + error
        wires = self.wires_of(compensated)
        if compensation.new_error is not None:
            moved = compensation.moved(error, compensated, self.decode(wires, torch.empty_like(values)))
            compensation.format.encode(moved, out=compensation.new_error)
        return wires

    def decode_sum(self, peers: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
        total = torch.zeros_like(out)
        for peer in peers:
            total += self.decode(peer, torch.empty_like(out))
        return out.copy_(total.add_(out) if accumulate else total)


class Dither(Trial):
    """Subtractive dither: both ends draw the same noise, as wide as a step, added before coding and taken off after."""

    def wires_of(self, values: Tensor) -> Tensor:
        steps = self._steps(self.format.encode(values))
        return self.format.encode(values + self._noise(values) * steps)

    def decode(self, wires: Tensor, out: Tensor) -> Tensor:
        return self.format.decode(wires, out).sub_(self._noise(out) * self._steps(wires))

    def _noise(self, values: Tensor) -> Tensor:
        return counter_uniform(values.size(-1), self.seed, values.device) - 0.5

    def _steps(self, wires: Tensor) -> Tensor:
        """Each element's step, fp32 [..., L]; 0 where values travel as they are."""
        steps = torch.zeros(*wires.shape[:-1], self.format.numel)
        for segment in self.format.quantized:
            _, scales = reference.codes_and_scales(self.format, segment, wires)
            elements = scales.abs().float().repeat_interleave(segment.block_size, dim=-1)
            steps[..., segment.start : segment.stop] = elements[..., : segment.stop - segment.start]
        return steps


class Outliers(Trial):
    """The largest elements of each block travel in bf16 with their places in a byte, and the rest as always."""

    count = 1

    def wires_of(self, values: Tensor) -> Tensor:
        rest, largest = values.clone(), []
        for segment, _ in self._outliers():
            blocks = _blocks(segment, values)
            places = blocks.abs().topk(self.count, dim=-1).indices
            largest += [blocks.gather(-1, places).bfloat16().flatten(-2).view(torch.uint8), places.byte().flatten(-2)]
            without = blocks.scatter(-1, places, 0).flatten(-2)
            rest[..., segment.start : segment.stop] = without[..., : segment.stop - segment.start]
        return torch.cat([self.format.encode(rest), *largest], dim=-1)

    def decode(self, wires: Tensor, out: Tensor) -> Tensor:
        self.format.decode(wires[..., : self.format.nbytes].contiguous(), out)
        for segment, at in self._outliers():
            number = segment.num_blocks * self.count
            of_blocks = (segment.num_blocks, self.count)
            values = wires[..., at : at + 2 * number].contiguous().view(torch.bfloat16).unflatten(-1, of_blocks)
            places = wires[..., at + 2 * number : at + 3 * number].unflatten(-1, of_blocks).long()
            blocks = _blocks(segment, out).scatter(-1, places, values.float()).flatten(-2)
            out[..., segment.start : segment.stop] = blocks[..., : segment.stop - segment.start]
        return out

    def _outliers(self) -> Iterator[tuple[Segment, int]]:
        """Quantized segments, and where in the wire their outliers begin."""
        at = self.format.nbytes
        for segment in self.format.quantized:
            yield segment, at
            at += 3 * segment.num_blocks * self.count


class FourOutliers(Outliers):
    count = 4


def _blocks(segment: Segment, values: Tensor) -> Tensor:
    padded = F.pad(values[..., segment.start : segment.stop], (0, segment.padding))
    return padded.unflatten(-1, (segment.num_blocks, segment.block_size))


class Fixed(ElementScales):
    """Stands where scales of elements would, and gives the same format every time."""

    def __init__(self, format: Trial) -> None:
        super().__init__()
        self.format = format

    def to_send(self, _: WireFormat) -> Trial:
        return self.format

    def to_receive(self, _: WireFormat) -> Trial:
        return self.format


def with_format(trial: type[Trial]) -> None:
    """Train with what ``trial`` makes of the hop between nodes, once its bits no longer warm up."""

    def tried(hop: GradientHop, original: Callable[..., object], *arguments: object) -> object:
        format, config = hop.format, hop.config
        if hop.name == "intra" or not isinstance(format, WireFormat) or format.code is None:
            return original(hop, *arguments)
        if format.code.bits != config.gradient_bits:
            return original(hop, *arguments)
        hop.element_scales = Fixed(trial(format, torch.empty(0), hop.shared.micro_batch.optimizer_steps))
        try:
            return original(hop, *arguments)
        finally:
            hop.element_scales = None

    send, receive = GradientHop.send, GradientHop.receive
    with (
        patch.object(GradientHop, "send", lambda hop, gradients: tried(hop, send, gradients)),
        patch.object(GradientHop, "receive", lambda hop, wires: tried(hop, receive, wires)),
    ):
        main(GPT)


def with_bits_by_layer() -> None:
    """Train with 4 bits for the embeddings' gradients between nodes, and --zero-gradient-bits for the blocks'."""
    begin = GradientHops.begin

    def begin_with_bits(hops: GradientHops, part: UnitPart, gradients: Tensor) -> object:
        begun = begin(hops, part, gradients)
        hop = hops.between_nodes
        if hop is not None and hop.format is not None and any("embeddings" in p.name for p in part.parameters):
            old = hop.format
            hop.format = part.format(4, hops.config.gradient_block_size, old.dtype)
        return begun

    with patch.object(GradientHops, "begin", begin_with_bits):
        main(GPT)


def with_rising_beta() -> None:
    """Train with LoCo's beta rising from 0: 0.5 after 40 steps, 0.8 after 160, 0.95 after 800."""
    encode = ErrorFeedback.encode

    def encode_with_beta(feedback: ErrorFeedback, *arguments: Any, **named: Any) -> Tensor:
        feedback.config = dataclasses.replace(feedback.config, beta=1 - 1 / (1 + feedback.steps / 40))
        return encode(feedback, *arguments, **named)

    with patch.object(ErrorFeedback, "encode", encode_with_beta):
        main(GPT)


def with_limited_elements(keeps_rest: bool) -> None:
    """Train with gradients that are not rounded, but limited where 2 bits with scales of elements would limit them.

    Divided by sqrt(v), an element is at most 1.5 steps, of 1.25 times the mean of its block of 128. v <- 0.98 v +
    0.02 limited^2. What is cut off comes in a later step, or never.
    """
    state: dict[Tensor, tuple[int, Tensor, Tensor]] = {}  # steps so far, v and what was cut off, both like the gradient

    def limited(wanted: Tensor, v: Tensor) -> Tensor:
        scales = v.clamp(min=1e-3 * v.mean() + 1e-30).sqrt()
        sizes = (wanted / scales).abs().flatten()
        blocks = F.pad(sizes, (0, -len(sizes) % 128)).unflatten(0, (-1, 128))
        reach = 1.5 * STEPS[2][0] * blocks.mean(dim=1).repeat_interleave(128)[: len(sizes)].view_as(scales) * scales
        return torch.clamp(wanted, -reach, reach)

    def limit(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                steps, v, rest = state.get(parameter, (0, torch.zeros_like(gradient), torch.zeros_like(gradient)))
                wanted = gradient + rest
                gradient.copy_(limited(wanted, v) if steps else wanted)
                v = torch.lerp(v, gradient.square(), max(0.02, 1 / (steps + 1)))
                state[parameter] = steps + 1, v, wanted - gradient if keeps_rest else rest

    handle = register_optimizer_step_pre_hook(limit)
    main(GPT)
    handle.remove()


TRIALS = {
    "dither": lambda: with_format(Dither),
    "outliers": lambda: with_format(Outliers),
    "four-outliers": lambda: with_format(FourOutliers),
    "bits-by-layer": with_bits_by_layer,
    "rising-beta": with_rising_beta,
    "limited-elements": lambda: with_limited_elements(keeps_rest=False),
    "limited-elements-with-rest": lambda: with_limited_elements(keeps_rest=True),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--trial", choices=TRIALS, required=True)
    arguments, sys.argv[1:] = parser.parse_known_args()
    TRIALS[arguments.trial]()
