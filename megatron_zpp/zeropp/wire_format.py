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
import torch.nn.functional as F
from torch import Tensor

from .quantization import counter_uniform, dequantize_blocks, hadamard, pack_bits, quantize_blocks, unpack_bits

_ALIGNMENT = 16  # bytes; what a vectorized load wants


@dataclass(frozen=True)
class ParameterShard:
    """One parameter's part of a rank's shard, padding of FSDP2 included."""

    name: str
    numel: int
    quantizable: bool  # has two dimensions or more


@dataclass(frozen=True)
class _QuantizedSegment:
    start: int  # elements [start, stop) of the shard
    stop: int
    num_blocks: int
    block_size: int  # a multiple of 8
    codes: slice  # bytes of the wire
    scales: slice

    def blocks_of(self, shards: Tensor) -> Tensor:
        """This segment of shards [..., L] as blocks [..., num_blocks, block_size], the last one padded with zeros."""
        padding = self.num_blocks * self.block_size - (self.stop - self.start)
        values = F.pad(shards[..., self.start : self.stop], (0, padding))
        return values.unflatten(-1, (self.num_blocks, self.block_size))


@dataclass(frozen=True)
class _UnquantizedSegment:
    start: int
    stop: int
    values: slice  # bytes of the wire


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
        self.quantized: list[_QuantizedSegment] = []
        self.unquantized: list[_UnquantizedSegment] = []

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
        for (start, stop, size), n, code, scale in zip(spans, blocks, codes, scales, strict=True):
            self.quantized.append(_QuantizedSegment(start, stop, n, size, code, scale))
        for start, stop in _merge_adjacent(rest):
            self.unquantized.append(_UnquantizedSegment(start, stop, take((stop - start) * dtype.itemsize)))
        self.nbytes = offset

    def encode(self, shards: Tensor, noise_seed: int | None = None) -> Tensor:
        """Encode shards [..., L] of any float type and strides into wire buffers uint8 [..., nbytes].

        noise_seed: round stochastically, with noise that depends on the seed and an element's place alone.
        """
        # Zeros, because the gaps of the alignment must not carry old memory.
        wire = torch.zeros(*shards.shape[:-1], self.nbytes, dtype=torch.uint8, device=shards.device)
        noise = None
        if noise_seed is not None:
            noise = counter_uniform(shards.numel(), noise_seed, shards.device).view(shards.shape)
        for segment in self.quantized:
            assert self.bits is not None
            uniform = None if noise is None else segment.blocks_of(noise)
            codes, scales = quantize_blocks(segment.blocks_of(shards), self.bits, uniform)
            wire[..., segment.codes] = pack_bits(codes, self.bits).flatten(-2)
            wire[..., segment.scales] = scales.view(torch.uint8)
        for plain in self.unquantized:
            values = shards[..., plain.start : plain.stop].to(self.dtype)
            wire[..., plain.values] = values.contiguous().view(torch.uint8)
        return wire

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Decode wire buffers uint8 [..., nbytes] into ``out`` [..., L] of any float type; returns ``out``."""
        for segment in self.quantized:
            assert self.bits is not None
            packed = wire[..., segment.codes].unflatten(-1, (segment.num_blocks, -1))
            scales = wire[..., segment.scales].view(torch.float32)
            values = dequantize_blocks(unpack_bits(packed, self.bits), scales).flatten(-2)
            out[..., segment.start : segment.stop] = values[..., : segment.stop - segment.start]
        for plain in self.unquantized:
            out[..., plain.start : plain.stop] = wire[..., plain.values].view(self.dtype)
        return out

    def rotate(self, shards: Tensor) -> Tensor:
        """Hadamard-rotate the quantized parameters of shards [..., L]: fp32 [..., L]. Its own inverse.

        In groups of 32 elements; the last elements of a parameter that make up no whole group stay as they are.
        """
        rotated = shards.to(torch.float32, copy=True)
        for segment in self.quantized:
            whole = segment.start + (segment.stop - segment.start) // 32 * 32
            groups = rotated[..., segment.start : whole].unflatten(-1, (-1, 32))
            rotated[..., segment.start : whole] = hadamard(groups).flatten(-2)
        return rotated

    def decode_sum(self, wires: Tensor) -> Tensor:
        """Decode the buffers uint8 [G, S, nbytes] of G peers and add them in fp32, in peer order: fp32 [S, L]."""
        total = torch.empty(wires.size(1), self.numel, dtype=torch.float32, device=wires.device)
        self.decode(wires[0], out=total)
        addend = torch.empty_like(total)
        for peer in wires[1:]:
            total += self.decode(peer, out=addend)
        return total


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
