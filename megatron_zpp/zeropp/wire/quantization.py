"""Block quantization and bit packing, in plain torch: the definition of the arithmetic of a block.

A block of B values shares one scale s. A ``Code`` says what s is, and which levels its b bits stand for:

    absmax   s = largest |x| / qmax with qmax = 2^(b-1) - 1. Levels are c s, c from -qmax to qmax, so that both extremes
             are kept.
    mean     s = step * mean |x|. Levels are (c + 1/2) s, c from -2^(b-1) to 2^(b-1) - 1; what is beyond takes the outer
             ones. But zeros must stay zeros in a block in which a quarter or more of the values are 0. There,
             s = step * mean |x| of the others, levels are c s as above, and -s is sent to tell that from the rest.
    largest  of 1 bit: the B // 5 largest |x| become -s or s, with s = their mean |x|, and all others 0. Of equal |x|
             the first are taken. A fifth is what fits into B bits ("pack_largest").

With absmax and mean a value takes the nearest level; at ties the even code with absmax, the upper one with mean.
Stochastic rounding takes one of the two nearest levels, so that the expected one is the value, if that lies between the
outer levels.

A block of zeros has scale 0. A block that holds a NaN or an Inf, or whose scale would be Inf, has scale NaN and
dequantizes to NaN, so that overflow checks still see it. With mean, a block of nothing above 2^-85 counts as zeros:
squares of such values are 0 in fp32. Scales may be short, in bf16: rounded up with absmax, so that nothing is clipped,
to nearest with mean. Arithmetic is fp32; the sum in a mean is one of integers, which does not depend on the order.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

SCALINGS = ("absmax", "mean")  # for 2 bits and more
# The step of code "mean" over mean |x|, by bits: where zeros are rare, and where they are many. At 2 bits by loss: less
# cuts early gradients off. No border between levels may be at 1, where all of a block's |x| can be.
STEPS = {2: (1.25, 1.5), 3: (0.75, 0.8125), 4: (0.4375, 0.4375)}
LARGEST = 5  # code "largest" takes one of 5 values
# A scale that is kept from step to step stays while the block's largest value is between KEPT_FROM and 1 times what its
# codes can say. A new one puts the largest value at FRESH.
KEPT_FROM, FRESH = 0.6, 0.9
# A scale of an element is 2^(-e / STEPS_PER_OCTAVE), e a byte (scales.py).
STEPS_PER_OCTAVE, QUIETEST = 16, 255
# |x| is counted in units of 2^-22 of the power of two in the block's largest, or of 2^-63 if that is smaller.
_FIXED_POINT, _SMALLEST_EXPONENT = 22, -63


@dataclass(frozen=True)
class Code:
    """How blocks become integers and scales. Raises ValueError for what cannot be.

    ``scaling`` None = by bits: "largest" for 1, "mean" for 2 and 3, where it loses less than "absmax".
    """

    bits: int
    scaling: str | None = None
    scale_dtype: torch.dtype = torch.float32  # or bfloat16

    def __post_init__(self) -> None:
        if self.scaling is None:
            object.__setattr__(self, "scaling", {1: "largest", 2: "mean", 3: "mean"}.get(self.bits, "absmax"))
        if (self.bits == 1) != (self.scaling == "largest"):
            raise ValueError(f"1 bit is a code of gradients that takes no scaling {self.scaling}")
        if self.is_mean and self.bits not in STEPS:
            raise ValueError(f"scaling mean is for {min(STEPS)} to {max(STEPS)} bits, not {self.bits}: use absmax")

    @property
    def is_mean(self) -> bool:
        return self.scaling == "mean"

    @property
    def qmax(self) -> int:
        return max(1, 2 ** (self.bits - 1) - 1)

    @property
    def mean_square(self) -> float:
        """The mean of squared levels in a normally distributed block, about."""
        if self.bits == 1:
            return 1 / LARGEST
        return math.pi / 2 / STEPS[self.bits][0] ** 2 if self.is_mean else (self.qmax / 3) ** 2


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
    if code.bits == 1:
        return _quantize_largest(values, absmax, code)
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
    has_zeros = 4 * (size - nonzeros) >= size
    total, unit = _sum_magnitudes(values, absmax)
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


def _quantize_largest(values: Tensor, absmax: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    magnitudes = values.abs().nan_to_num(0.0, 0.0)
    count = values.shape[-1] // LARGEST
    least = magnitudes.topk(count, dim=-1).values[..., -1:]
    # Among equal minima, take the first that fits.
    equal = magnitudes == least
    room = count - (magnitudes > least).sum(dim=-1, keepdim=True)
    taken = ((magnitudes > least) | (equal & (equal.cumsum(dim=-1) <= room))) & (magnitudes > 0)
    total, unit = _sum_magnitudes(values * taken, absmax)
    scales = total.float() / taken.sum(dim=-1).clamp(min=1).float() * unit
    scales = scales.to(code.scale_dtype).float()
    scales = torch.where(absmax.isfinite() & scales.isfinite(), scales, torch.nan)
    codes = values.sign().nan_to_num_(0.0).mul_(taken & (scales > 0).unsqueeze(-1))
    return codes.to(torch.int8), as_sent(scales, code)


def _sum_magnitudes(values: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of |x| of blocks [..., B] as integers [...], and their units, which absmax [...] decides."""
    exponent_bits = absmax.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=(127 + _SMALLEST_EXPONENT) << 23)
    unit = (exponent_bits - (_FIXED_POINT << 23)).view(torch.float32)
    per_unit = (((127 + _FIXED_POINT + 127) << 23) - exponent_bits).view(torch.float32)
    return (values.abs() * per_unit.unsqueeze(-1)).long().sum(dim=-1), unit


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


def mix_seed(*parts: int | str) -> int:
    """Mix one 32-bit seed from whatever tells one draw from another."""
    return zlib.crc32(repr(parts).encode())


def counter_uniform(numel: int, seed: int, device: torch.device) -> Tensor:
    """Return fp32 numbers in [0, 1) [numel] that depend on ``seed`` and their index alone: Chris Wellons's hash."""
    word = 0xFFFFFFFF
    x = torch.arange(numel, dtype=torch.int64, device=device).add_(seed * 0x9E3779B9 & word).bitwise_and_(word)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & word
    x = ((x ^ (x >> 15)) * 0x846CA68B) & word
    x = x ^ (x >> 16)
    return (x >> 8).to(torch.float32) * 2.0**-24  # 24 bits: what fp32 holds exactly


def hadamard(values: Tensor) -> Tensor:
    """Rotate fp32 values [..., 32] by the orthonormal 32 x 32 Hadamard matrix, which is its own inverse.

    Five butterfly stages in a fixed order, then one multiplication, so that all implementations round equally.
    """
    for width in (1, 2, 4, 8, 16):
        pairs = values.unflatten(-1, (-1, 2, width))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        values = torch.stack([first + second, first - second], dim=-2).flatten(-3)
    return values * 32**-0.5


def pack_codes(codes: Tensor, code: Code) -> Tensor:
    """Pack blocks of codes int8 [..., B] into the bytes uint8 [..., B * bits / 8] that are sent."""
    return pack_largest(codes) if code.bits == 1 else pack_bits(codes, code.bits)


def unpack_codes(packed: Tensor, code: Code) -> Tensor:
    """Unpack the bytes uint8 [..., B * bits / 8] of blocks into codes int8 [..., B]."""
    return unpack_largest(packed) if code.bits == 1 else unpack_bits(packed, code.bits)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes int8 [..., B] into bytes uint8 [..., B * bits / 8]; B is a multiple of 8.

    The bytes are a little-endian bit stream: code i occupies the bits [bits * i, bits * (i + 1)), in two's complement.
    """
    if bits == 8:
        return codes.view(torch.uint8)
    codes_per_word, bytes_per_word, dtype = _word(bits)
    unsigned = (codes.view(torch.uint8) & (2**bits - 1)).to(dtype).unflatten(-1, (-1, codes_per_word))
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
    codes_per_word, bytes_per_word, dtype = _word(bits)
    parts = packed.to(dtype).unflatten(-1, (-1, bytes_per_word))
    words = parts[..., 0].clone()
    for i in range(1, bytes_per_word):
        words |= parts[..., i] << (8 * i)
    fields = torch.stack([(words >> (bits * i)) & (2**bits - 1) for i in range(codes_per_word)], dim=-1)
    sign = 2 ** (bits - 1)
    return ((fields.to(torch.uint8) ^ sign) - sign).view(torch.int8).flatten(-2)  # wraps to the negative codes


def pack_largest(codes: Tensor) -> Tensor:
    """Pack codes -1, 0 and 1, int8 [..., B], at most B // 5 of them not 0, into bytes uint8 [..., B / 8].

    Each code that is not 0 is a Rice code (k = 2) of the number of zeros since the last one, and a bit for its sign:
    gap >> 2 zeros, a one, the low 2 bits of the gap, and a one if it is negative. Zeros fill the block's bits. That is
    4 bits for each code and at most one for every 4 zeros, which B bits always hold.
    """
    blocks = codes.reshape(-1, codes.shape[-1])
    rows, places = blocks.nonzero(as_tuple=True)
    first = torch.ones_like(rows, dtype=torch.bool)
    first[1:] = rows[1:] != rows[:-1]
    before = torch.where(first, -1, places.roll(1))
    gaps = places - before - 1
    lengths = (gaps >> 2) + 4
    ends = lengths.cumsum(0)
    begins = ends - lengths  # and less what earlier blocks take
    ones = begins - begins[first][first.cumsum(0) - 1] + (gaps >> 2) if len(rows) else begins
    bits = torch.zeros_like(blocks)
    bits[rows, ones] = 1
    bits[rows, ones + 1] = (gaps & 1).to(torch.int8)
    bits[rows, ones + 2] = (gaps >> 1 & 1).to(torch.int8)
    bits[rows, ones + 3] = (blocks[rows, places] < 0).to(torch.int8)
    return pack_bits(bits, 1).view(*codes.shape[:-1], -1)


def unpack_largest(packed: Tensor) -> Tensor:
    """Unpack bytes uint8 [..., B / 8] of ``pack_largest`` into codes int8 [..., B]."""
    bits = -unpack_bits(packed, 1).reshape(-1, 8 * packed.shape[-1]).long()
    num_blocks, size = bits.shape
    # Where the first one is, from each bit on; ``size`` = nowhere.
    places = torch.arange(size, device=packed.device)
    ones = torch.where(bits.bool(), places, size).flip(-1).cummin(dim=-1).values.flip(-1)
    ones, bits = torch.nn.functional.pad(ones, (0, 4), value=size), torch.nn.functional.pad(bits, (0, 4))
    codes = torch.zeros(num_blocks, size + 1, dtype=torch.int8, device=packed.device)  # the last for what is none
    at = torch.zeros(num_blocks, 1, dtype=torch.int64, device=packed.device)
    place = torch.full_like(at, -1)
    for _ in range(size // LARGEST):
        one = ones.gather(1, at)
        is_code = one < size
        one = one.clamp(max=size)
        gap = 4 * (one - at) + bits.gather(1, one + 1) + 2 * bits.gather(1, one + 2)
        place = torch.where(is_code, place + gap + 1, size).clamp_(max=size)
        codes.scatter_(1, place, (1 - 2 * bits.gather(1, one + 3)).to(torch.int8))
        at = torch.where(is_code, one + 4, at).clamp_(max=size)
    return codes[:, :size].reshape(*packed.shape[:-1], size)


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """Return the smallest run of whole bytes that holds whole codes: (codes, bytes, the type that holds it)."""
    num_bytes = math.lcm(bits, 8) // 8
    dtype = torch.uint8 if num_bytes == 1 else torch.int32 if num_bytes <= 3 else torch.int64
    return 8 * num_bytes // bits, num_bytes, dtype
