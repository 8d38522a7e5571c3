"""How one rank's shard of an FSDP unit travels: the one place that knows the bytes.

A shard of L elements is the concatenation of the unit's parameters' shards. Its wire buffer is

    | packed codes of each quantized parameter | fp32 scales of each | values of the unquantized parameters |

with every parameter's part of every section starting at a multiple of 16 bytes. Blocks never span two parameters: a
parameter's last block is padded with zeros, on the wire only. Parameters of one dimension (norms, biases) and those
with less than a block in a shard travel unquantized.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels, reference

_ALIGNMENT = 16  # bytes; what a vectorized load wants


@dataclass(frozen=True)
class ParameterShard:
    """One parameter's part of a rank's shard, padding of FSDP2 included."""

    name: str
    numel: int
    quantizable: bool  # has two dimensions or more


@dataclass(frozen=True)
class Segment:
    """A run of elements of the shard that travels alike: one quantized parameter, or unquantized ones side by side."""

    start: int  # elements [start, stop) of the shard
    stop: int
    block_size: int  # a multiple of 8; 0 = unquantized
    codes: slice  # bytes of the wire, of packed codes or of the values themselves
    scales: slice

    @property
    def num_blocks(self) -> int:
        return -(-(self.stop - self.start) // self.block_size) if self.block_size else 0


@dataclass
class Compensation:
    """LoCo's part of an encoding: the error e that is added to the values, and where the new one goes.

    e <- decay * (beta * e + (1 - beta) * (values + e - what was sent))
    """

    format: WireFormat  # of the errors
    error: Tensor | None  # uint8 [..., nbytes]; None = zero
    new_error: Tensor | None  # alike; None = it is not wanted
    beta: float
    decay: float


@functools.lru_cache(maxsize=4096)
def wire_format(
    parameters: tuple[ParameterShard, ...], bits: int | None, block_size: int | None, dtype: torch.dtype
) -> WireFormat:
    """The WireFormat of these arguments, made once."""
    return WireFormat(parameters, bits, block_size, dtype)


class WireFormat:
    """Encoder and decoder of shards with a fixed list of parameters.

    bits: 2, 3, 4, 6 or 8; None = nothing is quantized.
    block_size: elements per scale; None = one scale per parameter and shard.
    dtype: of the values that travel unquantized.
    """

    def __init__(
        self, parameters: Sequence[ParameterShard], bits: int | None, block_size: int | None, dtype: torch.dtype
    ) -> None:
        self.parameters, self.bits, self.block_size, self.dtype = tuple(parameters), bits, block_size, dtype
        self.numel = sum(parameter.numel for parameter in parameters)  # L
        self.quantized: list[Segment] = []
        self.unquantized: list[Segment] = []

        spans, rest, start = [], [], 0  # (start, stop, block size) and (start, stop)
        for parameter in parameters:
            stop = start + parameter.numel
            if bits is not None and parameter.quantizable and parameter.numel >= (block_size or 8):
                spans.append((start, stop, block_size or _round_up(parameter.numel, 8)))
            else:
                rest.append((start, stop))
            start = stop

        offset = 0

        def take(nbytes: int) -> slice:
            nonlocal offset
            place = slice(offset, offset + nbytes)
            offset = _round_up(place.stop, _ALIGNMENT)
            return place

        blocks = [-(-(stop - start) // size) for start, stop, size in spans]
        codes = [take(n * size * bits // 8) for n, (_, _, size) in zip(blocks, spans, strict=True)] if bits else []
        scales = [take(4 * n) for n in blocks]
        for (start, stop, size), code, scale in zip(spans, codes, scales, strict=True):
            self.quantized.append(Segment(start, stop, size, code, scale))
        for start, stop in _merge_adjacent(rest):
            self.unquantized.append(Segment(start, stop, 0, take((stop - start) * dtype.itemsize), slice(0)))
        self.nbytes = offset
        self.table = self._table()

    def _table(self) -> list[int]:
        """The format as the operators take it: bits, type, bytes of a wire, then five numbers for each segment."""
        table = [self.bits or 0, kernels.TYPES.get(self.dtype, 0), self.nbytes]
        for s in sorted(self.quantized + self.unquantized, key=lambda segment: segment.start):
            table += [s.start, s.stop, s.block_size, s.codes.start, s.scales.start or 0]
        return table

    def encode(
        self,
        values: Tensor,
        noise_seed: int | None = None,
        *,
        source: WireFormat | None = None,
        plus: Tensor | None = None,
        minus: Tensor | None = None,
        compensation: Compensation | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode values [..., L] of any float type into wire buffers uint8 [..., nbytes], in one pass.

        noise_seed: round stochastically, with noise that depends on the seed and an element's place alone.
        source: ``values`` are what G peers sent in this format, uint8 [G, ..., nbytes]; their sum is encoded. It has
            this format's parameters and blocks, or is unquantized.
        plus, minus: [..., L] to add or to subtract, in fp32.
        compensation: LoCo's error, added and replaced.
        out: the buffers to fill, if they are there already.
        """
        addend, sign = (plus, 1) if minus is None else (minus, -1)
        shape = values.shape[1:-1] if source is not None else values.shape[:-1]
        wire = torch.empty(*shape, self.nbytes, dtype=torch.uint8, device=values.device) if out is None else out
        if not self._has_kernels(values, addend, source):
            if source is not None:
                total = torch.empty(*shape, self.numel, device=values.device)
                reference.decode(source, values, total, accumulate=False)
                values = total
            reference.encode(self, values, wire, addend, sign, compensation, noise_seed)
            return wire
        torch.ops.megatron_zpp.encode(
            values if source is None else None,
            values if source is not None else None,
            source.table if source is not None else [],
            addend,
            sign,
            wire,
            self.table,
            compensation.error if compensation is not None else None,
            compensation.new_error if compensation is not None else None,
            compensation.format.table if compensation is not None else [],
            compensation.beta if compensation is not None else 0.0,
            compensation.decay if compensation is not None else 1.0,
            noise_seed,
        )
        return wire

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Decode wire buffers uint8 [..., nbytes] into ``out`` [..., L] of any float type; returns ``out``."""
        return self.decode_sum(wire.unsqueeze(0), out)

    def decode_sum(self, peers: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
        """Decode the buffers uint8 [G, ..., nbytes] of G peers and add them in fp32, in peer order.

        accumulate: onto ``out`` [..., L], not into it. Returns ``out``.
        """
        if self._has_kernels(out):
            torch.ops.megatron_zpp.decode(peers, self.table, out, accumulate)
        else:
            reference.decode(self, peers, out, accumulate)
        return out

    def rotate(self, values: Tensor) -> Tensor:
        """Hadamard-rotate the quantized parameters of values [..., L]: fp32 [..., L]. Its own inverse.

        In groups of 32 elements; the last elements of a parameter that make up no whole group stay as they are.
        """
        rotated = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        if self._has_kernels(values):
            torch.ops.megatron_zpp.rotate(values, self.table, rotated)
        else:
            reference.rotate(self, values, rotated)
        return rotated

    def _has_kernels(self, values: Tensor, addend: Tensor | None = None, source: WireFormat | None = None) -> bool:
        dtypes = [self.dtype, source.dtype if source is not None else values.dtype]
        dtypes += [addend.dtype] if addend is not None else []
        return kernels.why_not_on(values.device) is None and all(dtype in kernels.TYPES for dtype in dtypes)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _merge_adjacent(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that touch, so that a run of small parameters is one copy."""
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return merged
