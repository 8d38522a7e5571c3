"""What the definition of codes promises. test_wire_format shows that all implementations have this definition."""

import math
import zlib

import pytest
import torch

from megatron_zpp.zeropp.config import SUPPORTED_BITS
from megatron_zpp.zeropp.wire.quantization import Code, counter_uniform, dequantize_blocks, pack_bits, quantize_blocks


def restored(blocks, code, *args):
    return dequantize_blocks(*quantize_blocks(blocks, code, *args), code)


def test_mean_is_for_few_bits_and_the_default_there():
    assert [Code(bits).scaling for bits in (1, 2, 3, 4, 6, 8)] == ["largest"] + ["mean"] * 2 + ["absmax"] * 3
    with pytest.raises(ValueError, match="scaling mean is for 2 to 4 bits, not 6: use absmax"):
        Code(6, "mean")
    with pytest.raises(ValueError, match="takes no scaling absmax"):
        Code(1, "absmax")


@pytest.mark.parametrize("fraction", [0.125, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased_and_no_two_draws_are_alike(fraction):
    """The mean of n roundings is the value, off by sqrt(f (1 - f) / n).

    Each wire has a seed of its own, the CRC-32 of its kind, hop, unit, rank, step and micro-batch: see oracle.py.
    """
    draws, numel, block = 160, 4032, 64
    values = torch.full((numel // (block - 1), block), fraction)
    values[:, 0] = 7.0  # the largest code of 4 bits: the others lie between 0 and 1
    seeds = [zlib.crc32(str(("weights", "inter", "layers.0", 0, draw)).encode()) for draw in range(draws)]
    uniform = [counter_uniform(values.numel(), seed, torch.device("cpu")).view_as(values) for seed in seeds]
    rounded = torch.stack([restored(values, Code(4, "absmax"), noise)[:, 1:].flatten() for noise in uniform])
    assert ((rounded == 0) | (rounded == 1)).all()
    spread = math.sqrt(fraction * (1 - fraction))
    for n in (1, 4, 16):
        error = rounded.unflatten(0, (-1, n)).mean(1) - fraction
        assert error.square().mean().sqrt().item() == pytest.approx(spread / math.sqrt(n), rel=0.03), n
        assert abs(error.mean().item()) < 5 * spread / math.sqrt(rounded.numel())
    deviations = (rounded - fraction) / spread
    lags = (0, 1, 2, 3, 8, numel // 2) if fraction == 0.5 else ()  # or chance would have longer tails
    for lag in lags:  # an element and those after it, of the same draw and of others
        correlation = deviations @ deviations.roll(lag, 1).T / numel
        if lag == 0:
            correlation.fill_diagonal_(0)
        assert correlation.abs().max() < 5.5 / math.sqrt(numel), lag


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_packed_bytes_are_a_little_endian_bit_stream(bits):
    codes = torch.tensor([1, -1, 0, 1, -2, 1, 0, -1], dtype=torch.int8)
    stream = sum((code & (2**bits - 1)) << (bits * i) for i, code in enumerate(codes.tolist()))
    assert bytes(pack_bits(codes, bits).tolist()) == stream.to_bytes(bits, "little")


def test_a_scale_beyond_fp32_is_nan():
    _, scales = quantize_blocks(torch.full((1, 8), 3e38), Code(2))
    assert scales.isnan().all()
