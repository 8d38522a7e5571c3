"""NF4 against its definition, against the published levels, and in wire buffers beside other codes."""

import math

import pytest
import torch

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.wire import nf4
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import ParameterShard

# bitsandbytes 0.50.2, functional.py, get_4bit_type("nf4"), rounded to 8 digits.
PUBLISHED = "-1 -.69619280 -.52507305 -.39491749 -.28444138 -.18477343 -.09105004 0 .07958030 .16093020 .24611230 "
PUBLISHED += ".33791524 .44070983 .56261700 .72295684 1"


def oracle(values):
    """Return what arrives of one parameter's fp32 values [n], value by value; scales are rounded as on the wire."""
    levels = [float(level) for level in PUBLISHED.split()]
    blocks = list(values.split(nf4.BLOCK))
    arrived = []
    for first in range(0, len(blocks), nf4.GROUP):
        group = blocks[first : first + nf4.GROUP]
        step = max(block.abs().max() for block in group) / torch.tensor(255.0)
        for block in group:
            count = min(255, math.ceil((block.abs().max() / step).item())) if step > 0 else 0
            scale = (count * step).item()
            nearest = [min(levels, key=lambda level, x=x: abs(x - level * scale)) for x in block.tolist()]
            arrived += [level * scale for level in nearest]
    return torch.tensor(arrived)


def transmitted(values, dtype=torch.float32):
    """Return what arrives of values [..., n] of one parameter in NF4."""
    format = WireFormat([ParameterShard("weight", values.shape[-1], True, is_nf4=True)], 8, 256, dtype)
    return format.decode(format.encode(values.to(dtype)), torch.empty(values.shape))


def test_levels_are_quantiles_of_a_normal_distribution_and_those_of_bitsandbytes():
    # QLoRA, section 3: half of the levels for each sign, from the quantile that 15 and 16 equal parts leave outside.
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    positive = torch.special.ndtri(torch.linspace(outermost, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1])
    quantiles = torch.cat([positive, negative, torch.zeros(1, dtype=torch.float64)]).sort().values
    assert pytest.approx((quantiles / quantiles.max()).tolist(), abs=1e-6) == nf4.LEVELS
    assert pytest.approx([float(level) for level in PUBLISHED.split()], abs=5e-9) == nf4.LEVELS


@pytest.mark.parametrize("numel", [40, 64, 1000, 2 * 64 * 256 + 77])
def test_every_value_takes_the_nearest_level_of_its_block(numel):
    torch.manual_seed(0)
    values = torch.randn(numel) * torch.logspace(-3, 1, numel)
    values[: numel // 5] = 0  # whole blocks of zeros among them
    torch.testing.assert_close(transmitted(values), oracle(values), rtol=1e-6, atol=0)


def test_zeros_stay_zeros_tiny_values_are_no_nan_and_what_is_not_finite_is_seen():
    values = torch.zeros(3 * nf4.GROUP * nf4.BLOCK)
    values[0], values[1], values[nf4.GROUP * nf4.BLOCK + 5] = 1e-45, 3e38, torch.inf
    first, poisoned, zeros = transmitted(values).view(3, -1)
    assert first[1] == pytest.approx(3e38, rel=1e-6) and first.count_nonzero() == 1
    assert poisoned.isnan().all() and zeros.count_nonzero() == 0
    assert transmitted(torch.full((64,), 1e-45)).isfinite().all()


def test_a_wire_has_nf4_beside_other_codes_and_4_127_bits_for_each_element():
    parameters = [ParameterShard("base", 1000, True, True), ParameterShard("adapter", 320, True)]
    parameters += [ParameterShard("norm", 5, False), ParameterShard("few", 9, True, True)]
    values = torch.randn(2, 1334)
    for bits in (None, 8):
        mixed, plain = (WireFormat(some, bits, 64, torch.float32) for some in (parameters, parameters[1:3]))
        arrived = mixed.decode(mixed.encode(values), torch.empty(values.shape))
        assert arrived[:, :1000].equal(transmitted(values[:, :1000]))
        own = plain.decode(plain.encode(values[:, 1000:1325]), torch.empty(2, 325))
        assert arrived[:, 1000:1325].equal(own) and arrived[:, 1325:].equal(values[:, 1325:])
    large = WireFormat([ParameterShard("weight", 2**22, True, True)], 8, 256, torch.bfloat16)
    assert 8 * large.nbytes / 2**22 == 4 + 8 / 64 + 32 / (64 * 256)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(frozen_dtype="fp4"), "frozen_dtype must be one of nf4"),
        (dict(hpz_partition_size=1), "frozen_dtype requires hpz_partition_size"),
        (dict(weight_rounding="stochastic"), "leave weight_rounding and weight_intra_bits out"),
        (dict(weight_intra_bits=8), "leave weight_rounding and weight_intra_bits out"),
        (dict(frozen_dtype=None, nf4_skip=()), "nf4_skip requires frozen_dtype"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ZeroPPConfig(**dict(quantized_weights=True, hpz_partition_size=2, frozen_dtype="nf4") | options)
