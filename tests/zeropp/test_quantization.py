"""The block quantizer and the bit packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.zeropp.quantization import dequantize_blocks, pack_bits, quantize_blocks, unpack_bits

ALL_BITS = pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])


@ALL_BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step(bits, dtype):
    blocks = torch.randn(100, 64, generator=torch.Generator().manual_seed(bits)).to(dtype)
    codes, scales = quantize_blocks(blocks, bits)
    error = (dequantize_blocks(codes, scales) - blocks.float()).abs()
    assert (error <= scales.unsqueeze(-1) * 0.50002).all()  # a tie may round either way in fp32


@ALL_BITS
def test_both_extremes_are_kept(bits):
    """DeepSpeed's int4 loses 12.5 % at the positive extreme."""
    block = torch.tensor([[3.7, -3.7, 0.0, 0.1]])
    restored = dequantize_blocks(*quantize_blocks(block, bits))
    torch.testing.assert_close(restored[0, :3], block[0, :3], rtol=2e-7, atol=0)


def test_ties_round_to_even():
    block = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5]])  # scale 1 at 4 bits
    codes, _ = quantize_blocks(block, 4)
    assert codes.tolist() == [[7, 0, 2, 2, 0, -2]]


@ALL_BITS
def test_zeros_stay_zeros(bits):
    codes, scales = quantize_blocks(torch.zeros(3, 8), bits)
    assert scales.tolist() == [0, 0, 0]
    assert dequantize_blocks(codes, scales).eq(0).all()


@ALL_BITS
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_nan_or_inf_becomes_nan_and_no_other_does(bits, poison):
    blocks = torch.randn(3, 16)
    blocks[1, 5] = poison
    restored = dequantize_blocks(*quantize_blocks(blocks, bits))
    assert restored[1].isnan().all()
    assert restored[[0, 2]].isfinite().all()


@ALL_BITS
def test_denormal_blocks_stay_finite_and_small(bits):
    restored = dequantize_blocks(*quantize_blocks(torch.full((1, 8), 1e-45), bits))
    assert restored.isfinite().all() and restored.abs().max() <= 1e-44


@ALL_BITS
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
