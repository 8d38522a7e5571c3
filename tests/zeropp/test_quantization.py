"""What the definition of codes promises. test_wire_format shows that all implementations have this definition."""

import pytest
import torch

from megatron_zpp.zeropp.config import SUPPORTED_BITS
from megatron_zpp.zeropp.wire.quantization import (
    Code,
    counter_uniform,
    dequantize_blocks,
    pack_bits,
    quantize_blocks,
)

SCALE_DTYPES = [torch.float32, torch.bfloat16]
ABSMAX = [Code(bits, "absmax", dtype) for bits in (2, 3, 4, 6, 8) for dtype in SCALE_DTYPES]
MEAN = [Code(bits, "mean", dtype) for bits in (1, 2, 3, 4) for dtype in SCALE_DTYPES]


def over(codes):
    return pytest.mark.parametrize("code", codes, ids=lambda c: f"{c.scaling}-{c.bits}-{c.scale_dtype.itemsize}")


def restored(blocks, code, *args):
    return dequantize_blocks(*quantize_blocks(blocks, code, *args), code)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@over(ABSMAX)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step(code, dtype):
    blocks = normal(100, 64, seed=code.bits).to(dtype)
    codes, scales = quantize_blocks(blocks, code)
    error = (dequantize_blocks(codes, scales, code) - blocks.float()).abs()
    assert (error <= scales.float().unsqueeze(-1) * 0.50002).all()  # a tie may round either way in fp32


def test_mean_is_for_few_bits_and_the_default_there():
    assert [Code(bits).scaling for bits in (1, 2, 3, 4, 6, 8)] == ["mean"] * 3 + ["absmax"] * 3
    with pytest.raises(ValueError, match="scaling mean is for 1 to 4 bits, not 6: use absmax"):
        Code(6, "mean")
    with pytest.raises(ValueError, match="use mean"):
        Code(1, "absmax")


@over(MEAN)
@pytest.mark.parametrize("magnitude", [1.0, 0.3, 1e-20])
def test_values_of_one_magnitude_arrive_with_one_magnitude(code, magnitude):
    """Where all |x| are their mean, no border between levels is."""
    signs = normal(4, 64).sign()
    arrived = restored(signs * magnitude, code)
    assert (arrived * signs).unique().numel() == 1
    assert (arrived * signs / magnitude)[0, 0] == pytest.approx(1, abs=0.4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("zeros", [0, 32])
def test_stochastic_rounding_is_unbiased_between_the_outer_levels(bits, zeros):
    code, block, draws = Code(bits, "mean"), normal(64, seed=bits), 4000
    block[:zeros] = 0
    uniform = counter_uniform(draws * 64, 3, torch.device("cpu")).view(draws, 64)
    codes, scales = quantize_blocks(block.expand(draws, 64), code, uniform)
    whole_steps = zeros > 0 and bits > 1
    outer = scales[0].abs() * (2 ** (bits - 1) - (1 if whole_steps else 0.5))
    inside = block.abs() < outer
    arrived = dequantize_blocks(codes, scales, code)
    deviation = (arrived.mean(0) - block)[inside].abs() / (scales[0].abs() / draws**0.5)
    assert inside.sum() > 20 and deviation.max() < 2.5  # the spread is at most half a step
    assert (arrived.abs() <= outer).all()
    if whole_steps:
        assert arrived[:, :zeros].eq(0).all()


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_packed_bytes_are_a_little_endian_bit_stream(bits):
    codes = torch.tensor([1, -1, 0, 1, -2, 1, 0, -1], dtype=torch.int8)
    stream = sum((code & (2**bits - 1)) << (bits * i) for i, code in enumerate(codes.tolist()))
    assert bytes(pack_bits(codes, bits).tolist()) == stream.to_bytes(bits, "little")


def test_a_scale_beyond_fp32_is_nan():
    _, scales = quantize_blocks(torch.full((1, 8), 3e38), Code(1))
    assert scales.isnan().all()
