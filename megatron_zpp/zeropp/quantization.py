"""Symmetric block quantization and bit packing, in plain torch: the definition of the arithmetic of a block.

reference.py composes it over wire buffers, csrc/ equals that, and tests/zeropp/oracle.py checks the collectives.

A block of B values shares one fp32 scale: scale = absmax / qmax with qmax = 2^(bits-1) - 1, and
code = round_half_even(value / scale), so that both extremes are representable. A block of zeros has scale 0.
A block that holds a NaN or an Inf has scale NaN and dequantizes to NaN, so that overflow checks still see it.
All arithmetic is fp32.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor


def quantize_blocks(blocks: Tensor, bits: int, uniform: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize blocks [..., B] of any float type to codes int8 [..., B] and scales fp32 [...].

    uniform: numbers in [0, 1) [..., B] make the rounding stochastic: code = floor(value / scale + uniform).
    """
    qmax = 2 ** (bits - 1) - 1
    values = blocks.float()
    absmax = values.abs().amax(dim=-1)
    scales = absmax / absmax.new_full((), qmax)  # by a tensor: CUDA divides by a number through its reciprocal
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    # 0 / 0 and NaN become code 0; the scale tells the two apart. Denormal scales are inexact, hence the clamp.
    steps = values / scales.unsqueeze(-1)  # and in place from here on: fresh memory is what costs on a CPU
    steps = steps.round_() if uniform is None else steps.add_(uniform).floor_()
    return steps.nan_to_num_(0.0).clamp_(-qmax, qmax).to(torch.int8), scales


def dequantize_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Turn codes int8 [..., B] and scales fp32 [...] back into fp32 values [..., B]."""
    return codes.float().mul_(scales.unsqueeze(-1))


def mix_seed(*parts: int | str) -> int:
    """One 32-bit seed from whatever tells one draw from another."""
    return zlib.crc32(repr(parts).encode())


def counter_uniform(numel: int, seed: int, device: torch.device) -> Tensor:
    """``numel`` fp32 numbers in [0, 1) that depend on ``seed`` and their index alone, on every device alike.

    The low bias 32-bit integer hash of Chris Wellons, of index and seed.
    """
    word = 0xFFFFFFFF
    x = torch.arange(numel, dtype=torch.int64, device=device).add_(seed * 0x9E3779B9 & word).bitwise_and_(word)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & word
    x = ((x ^ (x >> 15)) * 0x846CA68B) & word
    x = x ^ (x >> 16)
    return (x >> 8).to(torch.float32) * 2.0**-24  # 24 bits: what fp32 holds exactly


def hadamard(values: Tensor) -> Tensor:
    """Rotate fp32 values [..., 32] by the orthonormal 32 x 32 Hadamard matrix, which is its own inverse.

    Five butterfly stages in a fixed order, then one multiplication, so that every implementation rounds alike.
    """
    for width in (1, 2, 4, 8, 16):
        pairs = values.unflatten(-1, (-1, 2, width))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        values = torch.stack([first + second, first - second], dim=-2).flatten(-3)
    return values * 32**-0.5


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes int8 [..., B] into bytes uint8 [..., B * bits / 8]; B is a multiple of 8.

    The bytes are a little-endian bit stream: code i occupies the bits [bits * i, bits * (i + 1)), in two's complement.
    """
    if bits == 8:
        return codes.view(torch.uint8)
    codes_per_word, bytes_per_word = _word(bits)
    unsigned = _as_words(codes.view(torch.uint8) & (2**bits - 1), bits).unflatten(-1, (-1, codes_per_word))
    words = unsigned[..., 0].clone()  # [..., B / codes_per_word]
    for i in range(1, codes_per_word):
        words |= unsigned[..., i] << (bits * i)
    if bytes_per_word == 1:
        return words
    return torch.stack([(words >> (8 * i)) & 255 for i in range(bytes_per_word)], dim=-1).to(torch.uint8).flatten(-2)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes uint8 [..., B * bits / 8] into signed codes int8 [..., B]."""
    if bits == 8:
        return packed.view(torch.int8)
    codes_per_word, bytes_per_word = _word(bits)
    parts = _as_words(packed, bits).unflatten(-1, (-1, bytes_per_word))
    words = parts[..., 0].clone()
    for i in range(1, bytes_per_word):
        words |= parts[..., i] << (8 * i)
    fields = torch.stack([(words >> (bits * i)) & (2**bits - 1) for i in range(codes_per_word)], dim=-1)
    sign = 2 ** (bits - 1)
    return ((fields.to(torch.uint8) ^ sign) - sign).view(torch.int8).flatten(-2)  # wraps to the negative codes


def _as_words(values: Tensor, bits: int) -> Tensor:
    """uint8 in the type in which words are put together."""
    _, bytes_per_word = _word(bits)
    return values if bytes_per_word == 1 else values.int() if bytes_per_word <= 3 else values.long()


def _word(bits: int) -> tuple[int, int]:
    """The smallest run of whole bytes that holds whole codes: (codes, bytes)."""
    total = math.lcm(bits, 8)
    return total // bits, total // 8
