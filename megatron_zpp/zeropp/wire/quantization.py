"""Block quantization and bit packing, in plain torch: the definition of the arithmetic of a block.

reference.py composes it over wire buffers, csrc/ equals that, and tests/zeropp/oracle.py checks the collectives.

A block of B values shares one scale s. A ``Code`` says what s is, and which levels its b bits stand for:

    absmax   s = largest |x| / qmax with qmax = 2^(b-1) - 1. Levels are c s, c from -qmax to qmax, so that both extremes
             are kept.
    mean     s = step * mean |x|. Levels are (c + 1/2) s, c from -2^(b-1) to 2^(b-1) - 1; what is beyond takes the outer
             ones. But zeros must stay zeros in a block in which a quarter or more of the values are 0, if b > 1. There,
             s = step * mean |x| of the others, levels are c s as above, and -s is sent to tell that from the rest.

A value takes the nearest level; at ties the even code with absmax, the upper one with mean. Stochastic rounding takes
one of the two nearest levels, so that the expected one is the value, if that lies between the outer levels.

A block of zeros has scale 0. A block that holds a NaN or an Inf, or whose scale would be Inf, has scale NaN and
dequantizes to NaN, so that overflow checks still see it. With mean, a block of nothing above 2^-85 counts as zeros:
squares of such values are 0 in fp32. Scales may be short, in bf16: rounded up with absmax, so that nothing is clipped,
to nearest with mean. Arithmetic is fp32; the sum in a mean is one of integers, which does not depend on the order.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

SCALINGS = ("absmax", "mean")
# The step of code "mean" over mean |x|, by bits: where zeros are rare, and where they are many. At 2 bits by loss: less
# cuts early gradients off. No border between levels may be at 1, where all of a block's |x| can be.
STEPS = {1: (2.0, 2.0), 2: (1.25, 1.5), 3: (0.75, 0.8125), 4: (0.4375, 0.4375)}
# A scale that is kept from step to step stays while the block's largest value is between KEPT_FROM and 1 times what its
# codes can say. A new one puts the largest value at FRESH.
KEPT_FROM, FRESH = 0.6, 0.9
# A scale of an element is 2^(-e / STEPS_PER_OCTAVE), e a byte (scales.py).
STEPS_PER_OCTAVE, QUIETEST = 16, 255
# |x| is counted in units of 2^-22 of the power of two in the block's largest, or of 2^-63 if that is smaller.
_FIXED_POINT, _SMALLEST_EXPONENT = 22, -63


@dataclass(frozen=True)
class Code:
    """How blocks become integers and scales. ``scaling`` None = by bits: "mean" below 4, where it loses less.

    Raises ValueError for what cannot be.
    """

    bits: int
    scaling: str | None = None
    scale_dtype: torch.dtype = torch.float32  # or bfloat16

    def __post_init__(self) -> None:
        if self.scaling is None:
            object.__setattr__(self, "scaling", "mean" if self.bits < 4 else "absmax")
        if self.is_mean and self.bits not in STEPS:
            raise ValueError(f"scaling mean is for {min(STEPS)} to {max(STEPS)} bits, not {self.bits}: use absmax")
        if not self.is_mean and self.bits == 1:
            raise ValueError("1 bit has no code with scaling absmax: use mean")

    @property
    def is_mean(self) -> bool:
        return self.scaling == "mean"

    @property
    def qmax(self) -> int:
        return 2 ** (self.bits - 1) - 1


def quantize_blocks(
    blocks: Tensor,
    code: Code,
    uniform: Tensor | None = None,
    sizes: Tensor | None = None,
    keeps_scales: bool = False,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize blocks [..., B] of any float type to codes int8 [..., B] and scales of the code's type [...].

    uniform: numbers in [0, 1) [..., B] make the rounding stochastic. Zeros that are padding must have 1/2.
    sizes: elements of each block that are no padding, broadcast to [...]; None = all.
    keeps_scales: blocks keep their scales [...] in ``kept`` while they fit; None = none has one yet.
    """
    values = blocks.float()
    absmax = values.abs().amax(dim=-1)
    if code.is_mean:
        return _quantize_by_mean(values, absmax, code, uniform, sizes)
    level = FRESH * code.qmax if keeps_scales else code.qmax
    scales = absmax / absmax.new_full((), level)  # by a tensor: CUDA divides by a number through its reciprocal
    if code.scale_dtype == torch.bfloat16:  # up, so that no value is beyond the largest code
        scales = (scales.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    if kept is not None:
        reach = kept.float() * code.qmax
        scales = torch.where((absmax <= reach) & (absmax >= KEPT_FROM * reach), kept.float(), scales)
    # 0 / 0 and NaN become code 0; the scale tells the two apart. Denormal scales are inexact, hence the clamp.
    steps = values / scales.unsqueeze(-1)  # and in place from here on: fresh memory is what costs on a CPU
    steps = steps.round_() if uniform is None else steps.add_(uniform).floor_()
    return steps.nan_to_num_(0.0).clamp_(-code.qmax, code.qmax).to(torch.int8), as_sent(scales, code)


def _quantize_by_mean(
    values: Tensor, absmax: Tensor, code: Code, uniform: Tensor | None, sizes: Tensor | None
) -> tuple[Tensor, Tensor]:
    size = torch.as_tensor(values.shape[-1], device=values.device) if sizes is None else sizes
    nonzeros = (values != 0).sum(dim=-1)
    has_zeros = (4 * (size - nonzeros) >= size) & (code.bits > 1)
    exponent_bits = absmax.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=(127 + _SMALLEST_EXPONENT) << 23)
    unit = (exponent_bits - (_FIXED_POINT << 23)).view(torch.float32)
    per_unit = (((127 + _FIXED_POINT + 127) << 23) - exponent_bits).view(torch.float32)
    total = (values.abs() * per_unit.unsqueeze(-1)).long().sum(dim=-1)
    step, step_with_zeros = (total.new_full((), step, dtype=torch.float32) for step in STEPS[code.bits])
    count = torch.where(has_zeros, nonzeros, size).clamp(min=1)
    scales = torch.where(has_zeros, step_with_zeros, step) * total.float() / count.float() * unit
    scales = scales.to(code.scale_dtype).float()
    scales = torch.where(absmax.isfinite() & scales.isfinite(), scales, torch.nan)

    steps = values * (1 / scales).unsqueeze(-1)
    steps += (0.5 if uniform is None else uniform) - torch.where(has_zeros, 0.0, 0.5).unsqueeze(-1)
    lowest = torch.where(has_zeros, -code.qmax, -code.qmax - 1).unsqueeze(-1)
    steps = torch.where((scales > 0).unsqueeze(-1), steps.floor_().clamp_(max=code.qmax).maximum(lowest), 0.0)
    signed = torch.where(has_zeros & (scales > 0), -scales, scales)
    return steps.to(torch.int8), as_sent(signed, code)


def as_sent(scales: Tensor, code: Code) -> Tensor:
    """Return scales in the type that the code sends them in, with one NaN."""
    sent = scales.to(code.scale_dtype)
    return torch.where(sent.isnan(), sent.new_full((), torch.nan), sent)  # torch has several NaNs in bf16


def dequantize_blocks(codes: Tensor, scales: Tensor, code: Code) -> Tensor:
    """Turn codes int8 [..., B] and scales [...] back into fp32 values [..., B]."""
    levels, scales = codes.float(), scales.float().unsqueeze(-1)
    if code.is_mean:
        levels += torch.where(scales < 0, 0.0, 0.5)
    return levels.mul_(scales.abs())


def count_largest(codes: Tensor, scales: Tensor, code: Code) -> Tensor:
    """Count the codes int8 [..., B] that stand for one of the two outermost levels of their block."""
    has_half_steps = scales > 0 if code.is_mean else torch.zeros_like(scales, dtype=torch.bool)
    lowest = torch.where(has_half_steps, -code.qmax - 1, -code.qmax)
    return ((codes == code.qmax) | (codes == lowest.unsqueeze(-1))).sum()


def mix_seed(*parts: int | str) -> int:
    """Mix one 32-bit seed from whatever tells one draw from another."""
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
    """Return the smallest run of whole bytes that holds whole codes: (codes, bytes)."""
    total = math.lcm(bits, 8)
    return total // bits, total // 8


@dataclass(frozen=True)
class BitsWarmup:
    """``bits`` during the first ``steps`` optimizer steps of a run."""

    steps: int
    bits: int

    @classmethod
    def parse(cls, text: str) -> BitsWarmup:
        """Read "STEPS:BITS". Raises ValueError for anything else."""
        match = re.fullmatch(r"([1-9]\d*):(\d+)", text, re.ASCII)
        if match is None:
            raise ValueError(f"must be STEPS:BITS, such as 500:4, got {text!r}")
        return cls(int(match[1]), int(match[2]))
