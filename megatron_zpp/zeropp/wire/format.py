"""Encode and decode wire buffers, with the operators of csrc/ or in plain torch. layout.py defines the bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import kernels, reference
from .layout import Compensation, WireLayout


class WireFormat(WireLayout):
    """Encoder and decoder of shards with a fixed list of parameters."""

    def encode(
        self,
        values: Tensor,
        noise_seed: int | None = None,
        *,
        plus: Tensor | None = None,
        compensation: Compensation | None = None,
        keeps_scales: bool = False,
        kept: Tensor | None = None,
        exponents: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode values [..., L] of any float type into wire buffers uint8 [..., nbytes], in one pass.

        noise_seed: round stochastically, with noise that depends on the seed and an element's index alone.
        plus: [..., L] to add, in fp32.
        compensation: LoCo's error, added and replaced.
        keeps_scales: blocks keep the scales that they have in the buffers ``kept``, uint8 [..., nbytes], while they
            fit (moves.py); with code absmax. None: none has one yet.
        exponents: uint8 [..., L] of the scales that elements are divided by (scales.py); 0 where nothing is quantized.
        out: the buffers to fill, if they are there already.
        """
        wire = out
        if wire is None:
            wire = torch.empty(*values.shape[:-1], self.nbytes, dtype=torch.uint8, device=values.device)
        if self._has_kernels(values.device, values.dtype, plus):
            torch.ops.megatron_zpp.encode(
                *(values, None, [], plus, wire, self.table, *_arguments(compensation)),
                *(noise_seed, keeps_scales, kept, exponents),
            )
        else:
            reference.encode(self, values, wire, plus, compensation, noise_seed, keeps_scales, kept, exponents)
        return wire

    def encode_sum(
        self,
        peers: Tensor,
        source: WireFormat,
        noise_seed: int | None = None,
        *,
        plus: Tensor | None = None,
        compensation: Compensation | None = None,
        exponents: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode the sum of what G peers sent in the format ``source``, uint8 [G, ..., nbytes]: uint8 [..., nbytes].

        One pass if ``source`` is unquantized or both quantize; they are of the same parameters and blocks. The rest as
        in ``encode``.
        """
        wire = out
        if wire is None:
            wire = torch.empty(*peers.shape[1:-1], self.nbytes, dtype=torch.uint8, device=peers.device)
        one_pass = source.is_compiled and (source.bits is None or self.bits is not None)
        if not one_pass or not self._has_kernels(peers.device, source.dtype, plus):
            total = source.decode_sum(peers, out=torch.empty(*wire.shape[:-1], self.numel, device=peers.device))
            return self.encode(total, noise_seed, plus=plus, compensation=compensation, exponents=exponents, out=wire)
        torch.ops.megatron_zpp.encode(
            *(None, peers, source.table, plus, wire, self.table, *_arguments(compensation)),
            *(noise_seed, False, None, exponents),
        )
        return wire

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Decode wire buffers uint8 [..., nbytes] into ``out`` [..., L] of any float type; returns ``out``."""
        return self.decode_sum(wire.unsqueeze(0), out)

    def decode_sum(
        self, peers: Tensor, out: Tensor, accumulate: bool = False, exponents: Tensor | None = None
    ) -> Tensor:
        """Decode the buffers uint8 [G, ..., nbytes] of G peers and add them in fp32, in peer order.

        accumulate: onto ``out`` [..., L], not into it. Returns ``out``.
        exponents: uint8 [G, ..., L] of the elements' scales, which multiply what each peer sent; ``out`` is fp32 then.
        """
        if self._has_kernels(out.device, out.dtype):
            torch.ops.megatron_zpp.decode(peers, self.table, out, accumulate, exponents)
        else:
            reference.decode(self, peers, out, accumulate, exponents)
        return out

    def move_exponents(self, exponents: Tensor | None, wires: Tensor, moves: list[int]) -> Tensor:
        """Return exponents uint8 [..., L] (None = 0) moved by the codes of wire buffers uint8 [..., nbytes].

        moves: how far an exponent falls, by twice the size of its code's level: 0 to 2^bits.
        """
        out = torch.empty(*wires.shape[:-1], self.numel, dtype=torch.uint8, device=wires.device)
        if self.has_operators_on(wires.device):
            rows = None if exponents is None else exponents.reshape(-1, self.numel)
            torch.ops.megatron_zpp.move_exponents(
                rows, wires.reshape(-1, self.nbytes), self.table, moves, out.view(-1, self.numel)
            )
        else:
            reference.move_exponents(self, exponents, wires, moves, out)
        return out

    def rotate(self, values: Tensor) -> Tensor:
        """Hadamard-rotate the quantized parameters of values [..., L]: fp32 [..., L]. Its own inverse.

        In groups of 32 elements; the last elements of a parameter that make up no whole group stay as they are.
        """
        rotated = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        if self._has_kernels(values.device, values.dtype):
            torch.ops.megatron_zpp.rotate(values, self.table, rotated)
        else:
            reference.rotate(self, values, rotated)
        return rotated

    def _has_kernels(self, device: torch.device, dtype: torch.dtype, addend: Tensor | None = None) -> bool:
        """Return whether the operators take wires of this format together with numbers in ``dtype`` and an addend."""
        types, has_operators = kernels.TYPES, self.is_compiled and kernels.why_not_on(device) is None
        return has_operators and dtype in types and (addend is None or addend.dtype in types)


wire_format = functools.lru_cache(maxsize=4096)(WireFormat)  # each format once; its parameters are a tuple


@dataclass(frozen=True)
class GradientSum:
    """Gradients [..., L] of one rank, or the sum of what G ranks sent; ``plus`` is added where it is given.

    parts: [..., L] of any float type; with a ``format`` uint8 [G, ..., nbytes] in it.
    """

    parts: Tensor
    format: WireFormat | None = None
    plus: Tensor | None = None  # fp32 [..., L]
    exponents: Tensor | None = None  # uint8 [G, ..., L], of the scales that multiply what each rank sent (scales.py)

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @property
    def rows(self) -> torch.Size:
        """The shape without L."""
        return self.parts.shape[:-1] if self.format is None else self.parts.shape[1:-1]

    def only_piece(self) -> GradientSum:
        """Return [..., L] of [1, ..., L]."""
        assert self.exponents is None  # one piece is not sent, and has no scales
        parts = self.parts[0] if self.format is None else self.parts[:, 0]
        return replace(self, parts=parts, plus=self.plus[0] if self.plus is not None else None)

    def compute(self) -> Tensor:
        """Add up in fp32, in rank order: [..., L], in the memory of ``plus`` if there is any."""
        if self.format is None:
            return self.parts.to(torch.float32, copy=True) if self.plus is None else self.plus.add_(self.parts)
        out = self.plus
        if out is None:
            out = torch.empty(*self.parts.shape[1:-1], self.format.numel, device=self.parts.device)
        return self.format.decode_sum(self.parts, out, accumulate=self.plus is not None, exponents=self.exponents)

    def to_wire(
        self,
        format: WireFormat,
        noise_seed: int | None,
        compensation: Compensation | None = None,
        exponents: Tensor | None = None,
    ) -> Tensor:
        """Add up and encode: uint8 [..., nbytes]. exponents: uint8 [..., L], of the scales that divide the sum."""
        plus = self.plus
        if self.format is None:
            return format.encode(self.parts, noise_seed, plus=plus, compensation=compensation, exponents=exponents)
        assert self.exponents is None  # scaled gradients are decoded, not sent again
        return format.encode_sum(
            self.parts, self.format, noise_seed, plus=plus, compensation=compensation, exponents=exponents
        )


def _arguments(c: Compensation | None) -> tuple[Tensor | None, Tensor | None, list[int], float, float]:
    """Return a compensation as the operator takes it."""
    return (c.error, c.new_error, c.format.table, c.beta, c.decay) if c is not None else (None, None, [], 0.0, 1.0)
