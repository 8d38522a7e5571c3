"""The wire buffer: what arrives equals the oracle, whatever the shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.zeropp.wire import reference
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import ParameterShard
from tests.zeropp.oracle import Hop

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODES = [(bits, scaling) for bits in (2, 3, 4) for scaling in ("absmax", "mean")]
CODES += [(1, None), (6, None), (8, None), (None, None)]


def shards_like(parameters, num_shards, dtype, seed=0):
    numel = sum(parameter.numel for parameter in parameters)
    return torch.randn(num_shards, numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None, max_examples=200)
@given(
    numels=st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=6),
    code=st.sampled_from(CODES),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_size=st.sampled_from([8, 32, 128, 256, None]),
    dtype=st.sampled_from(DTYPES),
    num_shards=st.integers(1, 3),
    share_of_zeros=st.sampled_from([0, 0.25, 0.6, 1]),
    exponent=st.sampled_from([0, 0, 0, -149, -126, -100, -86, -85, -84, -62, -1, 60, 125]),
    poison=st.sampled_from([None, None, torch.nan, torch.inf, -torch.inf]),
    noise_seed=st.sampled_from([None, 5]),
)
def test_decoding_gives_what_the_oracle_says_arrives(
    numels, code, scale_dtype, block_size, dtype, num_shards, share_of_zeros, exponent, poison, noise_seed
):
    """By the compiled operators and by plain torch, of numbers of all sizes, zeros, NaN and Inf among them."""
    parameters = [ParameterShard(f"p{i}", numel, quantizable) for i, (numel, quantizable) in enumerate(numels)]
    shards = shards_like(parameters, num_shards, torch.float64).mul(2.0**exponent).to(dtype)
    shards[torch.rand(shards.shape, generator=torch.Generator().manual_seed(1)) < share_of_zeros] = 0
    if poison is not None and shards.numel() > 0:
        shards[0, shards.shape[1] // 2] = poison
    wire_format = WireFormat(parameters, code[0], block_size, dtype, code[1], scale_dtype)
    expected = Hop(parameters, code[0], block_size, dtype, code[1], scale_dtype).transmit_all(shards, noise_seed)
    wire = wire_format.encode(shards, noise_seed)
    assert wire.shape == (num_shards, wire_format.nbytes)
    arrived = wire_format.decode(wire, out=torch.full(shards.shape, -1.0))
    torch.testing.assert_close(arrived, expected, rtol=0, atol=0, equal_nan=True)

    in_plain_torch = torch.zeros_like(wire)
    reference.encode(wire_format, shards, in_plain_torch, None, None, noise_seed)
    assert wire.equal(in_plain_torch)
    reference.decode(wire_format, wire.unsqueeze(0), arrived.fill_(-1.0), accumulate=False)
    torch.testing.assert_close(arrived, expected, rtol=0, atol=0, equal_nan=True)


def test_every_part_of_a_wire_begins_at_16_bytes_and_small_neighbours_are_one_part():
    parameters = [
        ParameterShard("first", 131, True),
        ParameterShard("bias", 3, False),
        ParameterShard("norm", 5, False),
        ParameterShard("none", 0, False),
        ParameterShard("second", 77, True),
        ParameterShard("last", 1, False),
        ParameterShard("nothing", 0, False),
    ]
    layout = WireFormat(parameters, 3, 32, torch.bfloat16)
    assert [(s.start, s.stop, s.num_blocks) for s in layout.quantized] == [(0, 131, 5), (139, 216, 3)]
    assert [(s.start, s.stop, s.num_blocks) for s in layout.unquantized] == [(131, 139, 0), (216, 217, 0)]
    # Codes 5 x 32 x 3 / 8 and 3 x 32 x 3 / 8 bytes, scales 5 x 4 and 3 x 4, values 8 x 2 and 1 x 2.
    spans = [s.codes for s in layout.quantized] + [s.scales for s in layout.quantized]
    spans += [s.codes for s in layout.unquantized]
    assert [(s.start, s.stop) for s in spans] == [(0, 60), (64, 100), (112, 132), (144, 156), (160, 176), (176, 178)]
    assert (layout.numel, layout.nbytes) == (217, 192)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_shard_costs_more_with_fewer_bits_or_larger_blocks(dtype):
    """4-bit weight differences in blocks of 2048 beside int8 weights in blocks of 256, and both beside none."""
    for numel in [*range(0, 600), *range(600, 9000, 7)]:
        nbytes = [
            WireFormat([ParameterShard("weight", numel, True)], bits, block_size, dtype).nbytes
            for bits, block_size in [(4, 2048), (8, 256), (None, None)]
        ]
        assert nbytes == sorted(nbytes), numel
        assert nbytes[0] < nbytes[2] or numel < 32, numel
