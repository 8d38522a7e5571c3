"""The block quantizer and the bit packing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.zeropp.config import SUPPORTED_BITS
from megatron_zpp.zeropp.wire.quantization import (
    Code,
    counter_uniform,
    dequantize_blocks,
    pack_bits,
    quantize_blocks,
    unpack_bits,
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


@over([code for code in ABSMAX if code.scale_dtype == torch.float32])
def test_both_extremes_are_kept(code):
    """DeepSpeed's int4 loses 12.5 % at the positive extreme."""
    block = torch.tensor([[3.7, -3.7, 0.0, 0.1]])
    torch.testing.assert_close(restored(block, code)[0, :3], block[0, :3], rtol=2e-7, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_a_short_scale_is_the_next_above_so_that_nothing_is_clipped(bits):
    blocks = normal(1000, 8, seed=bits)
    _, exact = quantize_blocks(blocks, Code(bits, "absmax"))
    codes, short = quantize_blocks(blocks, Code(bits, "absmax", torch.bfloat16))
    below = short.nextafter(torch.zeros_like(short)).float()
    assert short.dtype == torch.bfloat16 and (short.float() >= exact).all() and (below < exact).all()
    assert (blocks.abs().amax(-1) <= codes.abs().amax(-1) * short.float() + short.float() / 2).all()


def test_ties_round_to_even():
    block = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5]])  # scale 1 at 4 bits
    codes, _ = quantize_blocks(block, Code(4))
    assert codes.tolist() == [[7, 0, 2, 2, 0, -2]]


@over(ABSMAX + MEAN)
def test_zeros_stay_zeros(code):
    codes, scales = quantize_blocks(torch.zeros(3, 8), code)
    assert scales.tolist() == [0, 0, 0] and codes.eq(0).all()
    assert not scales.signbit().any()
    assert dequantize_blocks(codes, scales, code).eq(0).all()


@over(ABSMAX + MEAN)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("uniform", [None, torch.full((3, 16), 0.25)], ids=["nearest", "stochastic"])
def test_a_block_with_nan_or_inf_becomes_nan_and_no_other_does(code, poison, uniform):
    blocks = torch.randn(3, 16)
    blocks[1, 5] = poison
    arrived = restored(blocks, code, uniform)
    assert arrived[1].isnan().all()
    assert arrived[[0, 2]].isfinite().all()


@over(ABSMAX + MEAN)
def test_denormal_blocks_stay_finite_and_small(code):
    arrived = restored(torch.full((1, 8), 1e-45), code)
    assert arrived.isfinite().all() and arrived.abs().max() <= (1e-44 if code.scale_dtype.itemsize == 4 else 1e-40)


# ---- Code "mean".


def test_mean_is_for_few_bits_and_the_default_there():
    assert [Code(bits).scaling for bits in (1, 2, 3, 4, 6, 8)] == ["mean"] * 3 + ["absmax"] * 3
    with pytest.raises(ValueError, match="scaling mean is for 1 to 4 bits, not 6: use absmax"):
        Code(6, "mean")
    with pytest.raises(ValueError, match="use mean"):
        Code(1, "absmax")


@over(MEAN)
def test_levels_stand_half_a_step_off_zero_and_outer_ones_take_the_rest(code):
    """Values by hand, and 500 that make their mean magnitude 1."""
    step = {1: 2, 2: 1.25, 3: 0.75, 4: 0.4375}[code.bits]
    own = torch.tensor([0.0, 0.25, -0.25, step - 0.01, step + 0.01, 0.01 - step, -step - 0.01, 9, -9, 3, -3, -0.0])
    rest = torch.full((500,), (512 - own.abs().sum().item()) / 500)
    codes, scale = quantize_blocks(torch.cat([own, rest]).unsqueeze(0), code)
    assert scale.item() == pytest.approx(step, rel=1e-5 if code.scale_dtype == torch.float32 else 4e-3)
    lowest, highest = -(2 ** (code.bits - 1)), 2 ** (code.bits - 1) - 1
    by_hand = [math.floor(value / step) for value in own.tolist()]
    assert codes[0, :12].tolist() == [min(max(level, lowest), highest) for level in by_hand]
    assert dequantize_blocks(codes, scale, code).equal((codes + 0.5) * scale.float())


@over(MEAN)
@pytest.mark.parametrize("magnitude", [1.0, 0.3, 1e-20])
def test_values_of_one_magnitude_arrive_with_one_magnitude(code, magnitude):
    """Where all |x| are their mean, no border between levels is."""
    signs = normal(4, 64).sign()
    arrived = restored(signs * magnitude, code)
    assert (arrived * signs).unique().numel() == 1
    assert (arrived * signs / magnitude)[0, 0] == pytest.approx(1, abs=0.4)


def test_one_bit_sends_signs_and_the_mean_magnitude():
    block = torch.tensor([[4.0, -1, 0.5, -0.5, 0, 0, 0, 2]])
    assert restored(block, Code(1)).tolist() == [[1, -1, 1, -1, 1, 1, 1, 1]]


@pytest.mark.parametrize("bits, step", [(2, 1.5), (3, 0.8125), (4, 0.4375)])
def test_zeros_stay_zeros_where_a_quarter_of_the_block_is_zero(bits, step):
    code = Code(bits, "mean")
    block = torch.tensor(
        [0.0, 2, -2, 2, 0, -2, 2, -2, 2, -2, 2, 2, 0.25, 3.75, 0, 0]
    )  # 4 of 16 zero, the others' mean 2
    few = block.clone()
    few[15] = 2.0
    codes, scales = quantize_blocks(torch.stack([block, few]), code)
    assert scales[0].item() == pytest.approx(-2 * step) and scales[1] > 0
    arrived = dequantize_blocks(codes, scales, code)
    assert arrived[0][block == 0].eq(0).all() and arrived[1][few == 0].ne(0).all()
    qmax = 2 ** (bits - 1) - 1
    nearest = (block.double() / (2 * step) + 0.5).floor().clamp(-qmax, qmax)
    assert codes[0].equal(nearest.to(torch.int8)) and codes.min() >= -qmax - 1


def test_padding_does_not_count():
    values = normal(40).abs() + 0.1
    padded = torch.cat([values, torch.zeros(24)]).view(2, 32)
    codes, scales = quantize_blocks(padded, Code(2), sizes=torch.tensor([32, 8]))
    alone, scale = quantize_blocks(values[32:].unsqueeze(0), Code(2))
    assert scales[1] == scale[0] > 0 and codes[1, :8].equal(alone[0])
    _, counted = quantize_blocks(padded, Code(2))
    assert counted[1] < 0


@over(MEAN)
@settings(deadline=None)
@given(data=st.data())
def test_the_order_of_a_block_does_not_matter(code, data):
    floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
    block = torch.tensor([data.draw(st.lists(floats, min_size=24, max_size=24))])
    order = torch.tensor(data.draw(st.permutations(range(24))))
    codes, scales = quantize_blocks(block, code)
    turned, scales_turned = quantize_blocks(block[:, order], code)
    assert scales.equal(scales_turned) and codes[:, order].equal(turned)


@over(MEAN)
@pytest.mark.parametrize("exponent", [-62, -1, 60, 125])
def test_blocks_of_all_sizes_are_coded_alike(code, exponent):
    block = normal(4, 64).clamp_(-1.99, 1.99)
    block[:, 0] = 1.5  # the largest exponent
    codes, scales = quantize_blocks(block, code)
    scaled, scales_scaled = quantize_blocks(block * 2.0**exponent, code)
    assert scaled.equal(codes) and scales_scaled.float().equal(scales.float() * 2.0**exponent)


def test_a_scale_beyond_fp32_is_nan_and_smallest_values_are_nothing():
    _, scales = quantize_blocks(torch.full((1, 8), 3e38), Code(1))
    assert scales.isnan().all()
    assert restored(torch.full((1, 8), 2.0**-86), Code(2)).eq(0).all()
    assert restored(torch.full((1, 8), 2.0**-85), Code(2)).ne(0).all()


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


ALL_BITS = pytest.mark.parametrize("bits", SUPPORTED_BITS)


@ALL_BITS
@settings(deadline=None)
@given(data=st.data())
def test_packing_round_trips(bits, data):
    qmax = 2 ** (bits - 1) - 1
    words = data.draw(st.lists(st.lists(st.integers(-qmax - 1, qmax), min_size=8, max_size=8), min_size=1, max_size=5))
    codes = torch.tensor(words, dtype=torch.int8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (len(words), bits) and packed.dtype == torch.uint8
    assert unpack_bits(packed, bits).equal(codes)


@ALL_BITS
def test_packed_bytes_are_a_little_endian_bit_stream(bits):
    codes = torch.tensor([1, -1, 0, 1, -2, 1, 0, -1], dtype=torch.int8)
    stream = sum((code & (2**bits - 1)) << (bits * i) for i, code in enumerate(codes.tolist()))
    assert bytes(pack_bits(codes, bits).tolist()) == stream.to_bytes(bits, "little")
