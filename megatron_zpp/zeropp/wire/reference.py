"""Encoding and decoding of wire buffers in plain torch: what the operators of csrc/ must equal, to the bit.

It composes over wire buffers the arithmetic of a block that quantization.py defines; tests/zeropp/oracle.py, which has
no wire, checks both. It also runs where the operators are not built, and for types and bits that they don't have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import Compensation, KeptScales, Segment, WireLayout
from .quantization import (
    count_largest,
    counter_uniform,
    dequantize_blocks,
    hadamard,
    pack_bits,
    quantize_blocks,
    unpack_bits,
)


def encode(
    format: WireLayout,
    values: Tensor,
    wire: Tensor,
    addend: Tensor | None,
    compensation: Compensation | None,
    noise_seed: int | None,
    kept: KeptScales | None = None,
) -> None:
    """Fill ``wire`` uint8 [..., nbytes] from values [..., L]; see WireFormat.encode."""
    if addend is not None:
        values = values.float() + addend.float()
    if compensation is None:
        _write(format, values, wire, noise_seed, kept)
        return
    error = torch.zeros(values.shape, device=values.device)
    if compensation.error is not None:
        decode(compensation.format, compensation.error.unsqueeze(0), error, accumulate=False)
    compensated = values + error  # fp32
    _write(format, compensated, wire, noise_seed, kept)
    if compensation.new_error is not None:
        sent = torch.empty_like(error)
        decode(format, wire.unsqueeze(0), sent, accumulate=False)
        _write(compensation.format, compensation.moved(error, compensated, sent), compensation.new_error)


def decode(format: WireLayout, peers: Tensor, out: Tensor, accumulate: bool) -> None:
    """Add up the buffers uint8 [G, ..., nbytes] of G peers, in order and in fp32, into or onto ``out`` [..., L]."""
    if len(peers) == 1 and not accumulate:
        _read(format, peers[0], out)
        return
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    addend = torch.empty_like(total)
    _read(format, peers[0], total)
    for peer in peers[1:]:
        total += _read(format, peer, addend)
    out.copy_(total.add_(out) if accumulate else total)


def count_codes(format: WireLayout, wire: Tensor) -> Tensor:
    """Count in buffers uint8 [..., nbytes]: fp32 [3] outermost codes, codes in blocks that are not 0, NaN blocks."""
    assert format.code is not None
    counts = torch.zeros(3, device=wire.device)
    for segment in format.quantized:
        codes, scales = codes_and_scales(format, segment, wire)
        total = (scales.abs() > 0).sum() * segment.block_size
        counts += torch.stack([count_largest(codes, scales, format.code), total, scales.isnan().sum()])
    return counts


def rotate(format: WireLayout, values: Tensor, out: Tensor) -> None:
    """Fill ``out`` fp32 [..., L] with values whose quantized parameters are Hadamard-rotated in groups of 32."""
    out.copy_(values)
    for segment in format.quantized:
        whole = segment.start + (segment.stop - segment.start) // 32 * 32
        groups = out[..., segment.start : whole].unflatten(-1, (-1, 32))
        out[..., segment.start : whole] = hadamard(groups).flatten(-2)


def _write(
    format: WireLayout,
    values: Tensor,
    wire: Tensor,
    noise_seed: int | None = None,
    keeps: KeptScales | None = None,
) -> None:
    wire.zero_()  # the gaps of the alignment must not carry old memory
    noise = None
    if noise_seed is not None:
        noise = counter_uniform(values.numel(), noise_seed, values.device).view(values.shape)
    for segment in format.quantized:
        assert format.code is not None
        uniform = None if noise is None else block_values(segment, noise, padding=0.5)
        sizes = torch.full((segment.num_blocks,), segment.block_size, device=values.device)
        sizes[-1] -= segment.padding
        kept = None
        if keeps is not None and keeps.wire is not None:
            kept = keeps.wire[..., segment.scales].view(format.code.scale_dtype)
        blocks = block_values(segment, values)
        codes, scales = quantize_blocks(blocks, format.code, uniform, sizes, keeps is not None, kept)
        wire[..., segment.codes] = pack_bits(codes, format.code.bits).flatten(-2)
        wire[..., segment.scales] = scales.view(torch.uint8)
    for segment in format.unquantized:
        plain = values[..., segment.start : segment.stop].to(format.dtype)
        wire[..., segment.codes] = plain.contiguous().view(torch.uint8)


def _read(format: WireLayout, wire: Tensor, out: Tensor) -> Tensor:
    for segment in format.quantized:
        assert format.code is not None
        values = dequantize_blocks(*codes_and_scales(format, segment, wire), format.code).flatten(-2)
        out[..., segment.start : segment.stop] = values[..., : segment.stop - segment.start]
    for segment in format.unquantized:
        out[..., segment.start : segment.stop] = wire[..., segment.codes].view(format.dtype)
    return out


def codes_and_scales(format: WireLayout, segment: Segment, wire: Tensor) -> tuple[Tensor, Tensor]:
    """Read a segment's codes int8 [..., num_blocks, block_size] and scales [..., num_blocks] in [..., nbytes]."""
    assert format.code is not None
    packed = wire[..., segment.codes].unflatten(-1, (segment.num_blocks, -1))
    return unpack_bits(packed, format.code.bits), wire[..., segment.scales].view(format.code.scale_dtype)


def block_values(segment: Segment, values: Tensor, padding: float = 0) -> Tensor:
    """Cut a segment of values [..., L] into blocks [..., num_blocks, block_size], the last one padded."""
    padded = F.pad(values[..., segment.start : segment.stop], (0, segment.padding), value=padding)
    return padded.unflatten(-1, (segment.num_blocks, segment.block_size))
