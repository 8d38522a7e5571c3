"""Encoding and decoding of wire buffers in plain torch: what the operators of csrc/ must equal, to the bit.

It composes over wire buffers the arithmetic of a block that quantization.py defines; tests/zeropp/oracle.py, which has
no wire, checks both. It also runs where the operators are not built, and for types and bits that they don't have.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from . import nf4
from .layout import Compensation, Segment, WireLayout
from .quantization import (
    QUIETEST,
    STEPS_PER_OCTAVE,
    counter_uniform,
    dequantize_blocks,
    hadamard,
    pack_codes,
    quantize_blocks,
    unpack_codes,
)


def encode(
    format: WireLayout,
    values: Tensor,
    wire: Tensor,
    addend: Tensor | None,
    compensation: Compensation | None,
    noise_seed: int | None,
    keeps_scales: bool = False,
    kept: Tensor | None = None,
    exponents: Tensor | None = None,
) -> None:
    """Fill ``wire`` uint8 [..., nbytes] from values [..., L]; see WireFormat.encode."""
    if addend is not None:
        values = values.float() + addend.float()
    scales = None
    if exponents is not None:
        values, scales = values.float(), element_scales(exponents)
    compensated = values
    if compensation is not None:
        error = torch.zeros(values.shape, device=values.device)
        if compensation.error is not None:
            decode(compensation.format, compensation.error.unsqueeze(0), error, accumulate=False)
        compensated = values + error  # fp32
    coded = compensated if scales is None else compensated / scales
    if compensation is not None and scales is not None:
        # An element without a gradient, as in a row of embeddings that no token met, is sent as 0 and its error waits:
        # otherwise scales would follow errors, and errors scales.
        waits = torch.zeros_like(values, dtype=torch.bool)
        for segment in format.quantized:
            at = slice(segment.start, segment.stop)
            waits[..., at] = values[..., at] == 0
        coded = torch.where(waits, 0.0, coded)
    _write(format, coded, wire, noise_seed, keeps_scales, kept)
    if compensation is not None and compensation.new_error is not None:
        sent = torch.empty_like(error)
        decode(format, wire.unsqueeze(0), sent, accumulate=False)
        if scales is not None:
            sent *= scales
        _write(compensation.format, compensation.updated_error(error, compensated, sent), compensation.new_error)


def decode(format: WireLayout, peers: Tensor, out: Tensor, accumulate: bool, exponents: Tensor | None = None) -> None:
    """Add up the buffers uint8 [G, ..., nbytes] of G peers, in order and in fp32, into or onto ``out`` [..., L]."""
    if exponents is not None:
        total = torch.zeros_like(out)
        for peer, of_peer in zip(peers, exponents, strict=True):
            total += _read(format, peer, torch.empty_like(out)).mul_(element_scales(of_peer))
        out.copy_(total.add_(out) if accumulate else total)
        return
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
    counts = torch.zeros(3, device=wire.device)
    for segment in format.quantized:
        codes, scales = codes_and_scales(format, segment, wire)
        qmax, has_half_steps = format.code.qmax, (scales > 0) & format.code.is_mean
        lowest = torch.where(has_half_steps, -qmax - 1, -qmax).unsqueeze(-1)
        total = (scales.abs() > 0).sum() * segment.block_size
        counts += torch.stack([((codes == qmax) | (codes == lowest)).sum(), total, scales.isnan().sum()])
    return counts


def element_scales(exponents: Tensor) -> Tensor:
    """Return the scales 2^(-e / 16), fp32, of exponents e uint8 of any shape."""
    every = torch.arange(QUIETEST + 1, dtype=torch.float64, device=exponents.device)
    table = every.div_(-STEPS_PER_OCTAVE).exp2_().float()
    return table.index_select(0, exponents.reshape(-1).to(torch.int32)).view(exponents.shape)


def move_exponents(format: WireLayout, exponents: Tensor | None, wires: Tensor, moves: list[int], out: Tensor) -> None:
    """Fill ``out`` uint8 [..., L]; see WireFormat.move_exponents."""
    out.zero_() if exponents is None else out.copy_(exponents)
    for segment in format.quantized:
        codes, scales = codes_and_scales(format, segment, wires)  # [..., blocks, B], [..., blocks]
        halves = (scales > 0) & format.code.is_mean  # levels are c + 1/2 there, elsewhere c
        doubled = codes.to(torch.int16).mul_(2).add_(halves.unsqueeze(-1)).abs_()  # twice the size of levels
        louder = torch.full_like(doubled, moves[0])
        for size, (less, more) in enumerate(itertools.pairwise(moves), start=1):
            if less != more:
                louder.add_(doubled >= size, alpha=more - less)
        louder.mul_((scales.abs() > 0).unsqueeze(-1))  # blocks of zeros or NaN tell nothing
        blocks = louder.neg_().add_(block_values(segment, out, padding=QUIETEST))  # padding is as quiet as can be
        blocks = blocks.sub_(blocks.amin(dim=-1, keepdim=True)).clamp_(max=QUIETEST).to(torch.uint8)
        out[..., segment.start : segment.stop] = blocks.flatten(-2)[..., : segment.stop - segment.start]


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
    keeps_scales: bool = False,
    kept: Tensor | None = None,
) -> None:
    wire.zero_()  # the gaps of the alignment must not carry old memory
    noise = None
    if noise_seed is not None:
        noise = counter_uniform(values.numel(), noise_seed, values.device).view(values.shape)
    for segment in format.quantized:
        uniform = None if noise is None else block_values(segment, noise, padding=0.5)
        sizes = torch.full((segment.num_blocks,), segment.block_size, device=values.device)
        sizes[-1] -= segment.padding
        old = kept[..., segment.scales].view(format.code.scale_dtype) if kept is not None else None
        blocks = block_values(segment, values)
        codes, scales = quantize_blocks(blocks, format.code, uniform, sizes, keeps_scales, old)
        wire[..., segment.codes] = pack_codes(codes, format.code).flatten(-2)
        wire[..., segment.scales] = scales.view(torch.uint8)
    for segment in format.unquantized:
        plain = values[..., segment.start : segment.stop].to(format.dtype)
        wire[..., segment.codes] = plain.contiguous().view(torch.uint8)
    for segment in format.nf4:
        packed, wire[..., segment.scales] = nf4.encode_blocks(block_values(segment, values))
        wire[..., segment.codes] = packed.flatten(-2)


def _read(format: WireLayout, wire: Tensor, out: Tensor) -> Tensor:
    for segment in format.quantized:
        values = dequantize_blocks(*codes_and_scales(format, segment, wire), format.code).flatten(-2)
        out[..., segment.start : segment.stop] = values[..., : segment.stop - segment.start]
    for segment in format.unquantized:
        out[..., segment.start : segment.stop] = wire[..., segment.codes].view(format.dtype)
    for segment in format.nf4:
        packed = wire[..., segment.codes].unflatten(-1, (segment.num_blocks, -1))
        values = nf4.decode_blocks(packed, wire[..., segment.scales]).flatten(-2)
        out[..., segment.start : segment.stop] = values[..., : segment.stop - segment.start]
    return out


def codes_and_scales(format: WireLayout, segment: Segment, wire: Tensor) -> tuple[Tensor, Tensor]:
    """Read a segment's codes int8 [..., num_blocks, block_size] and scales [..., num_blocks] in [..., nbytes]."""
    packed = wire[..., segment.codes].unflatten(-1, (segment.num_blocks, -1))
    return unpack_codes(packed, format.code), wire[..., segment.scales].view(format.code.scale_dtype)


def block_values(segment: Segment, values: Tensor, padding: float = 0) -> Tensor:
    """Cut a segment of values [..., L] into blocks [..., num_blocks, block_size], the last one padded."""
    padded = F.pad(values[..., segment.start : segment.stop], (0, segment.padding), value=padding)
    return padded.unflatten(-1, (segment.num_blocks, segment.block_size))
