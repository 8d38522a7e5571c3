"""Moved codes arrive as they were, however they moved, in about as many bits as their entropy."""

import math

import pytest
import torch

from megatron_zpp.zeropp.wire import kernels, moves
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import ParameterShard
from tests.gpu import on_devices
from tests.zeropp.oracle import Hop

PARAMETERS = (
    ParameterShard("a", 5000, True),
    ParameterShard("norm", 37, False),
    ParameterShard("b", 40_003, True),
    ParameterShard("few", 9, True),
    ParameterShard("none", 0, True),
    ParameterShard("bias", 64, False),
)
NUMEL = sum(parameter.numel for parameter in PARAMETERS)
WAYS = [
    pytest.param(
        True, marks=pytest.mark.skipif(kernels.why_not_loaded is not None, reason="the kernels are not built")
    ),
    False,
]


@pytest.fixture(params=WAYS, ids=["kernels", "torch"])
def way(request, monkeypatch):
    if not request.param:
        in_plain_torch(monkeypatch)


def in_plain_torch(monkeypatch):
    monkeypatch.setattr(moves, "_has_kernels", lambda format, tensor: False)
    monkeypatch.setattr(WireFormat, "_has_kernels", lambda *args: False)


def requantize(format, values, old):
    return format.encode(values, keeps_scales=True, kept=old)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_block_keeps_its_scale_while_its_largest_value_is_in_reach(way, bits):
    parameters, values = [ParameterShard("a", 1000, True)], torch.randn(1000)
    format, hop = WireFormat(parameters, bits, 64, torch.float32), Hop(parameters, bits, 64, torch.float32)
    values[64:128] = 0
    scales, wire = {}, None
    for factor in (1, 1.05, 1.1, 1.12, 0.7, 0.59, 3):
        scaled = values * factor
        wire = requantize(format, scaled, wire)
        (expected,) = hop.transmit_kept(scaled.unsqueeze(0), scales)
        assert format.decode(wire, torch.empty(1000)).equal(expected)
        assert torch.equal(requantize(format, scaled, wire), wire)  # idempotent


@pytest.mark.parametrize(
    "dtype, scale_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
@pytest.mark.parametrize("bits", [None, 4, 6, 8])
def test_moves_lead_from_any_buffer_to_any_other(way, bits, dtype, scale_dtype):
    format = WireFormat(PARAMETERS, bits, 256, dtype, scale_dtype=scale_dtype)
    torch.manual_seed(0)
    values = torch.randn(NUMEL, dtype=dtype)
    spoiled = values.clone()
    spoiled[::500], spoiled[7], spoiled[5003] = torch.nan, torch.inf, -0.0
    steps = [values, values, values * 1.001, values + 1e-3 * torch.randn(NUMEL).to(dtype), -values, values * 1000]
    steps += [torch.zeros_like(values), values, spoiled, values * 1e-3, torch.randn(NUMEL).to(dtype)]
    old = requantize(format, torch.zeros_like(values), None)
    for step in steps:
        new = requantize(format, step, old)
        measured = moves.measure_moves(format, old, new)
        sent = measured.write(int(measured.num_bytes))
        longer = measured.write(len(sent) + 13)  # as long as another rank's
        padded = torch.cat([sent, torch.full((13,), 255, dtype=torch.uint8)])
        arrived = moves.apply_moves(format, torch.stack([old, old]), torch.stack([longer, padded]))
        assert torch.equal(arrived[0], new) and torch.equal(arrived[1], new)
        old = new


@pytest.mark.skipif(kernels.why_not_loaded is not None, reason="the kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [None, 4, 6, 8])
@on_devices
def test_the_kernels_write_the_same_bytes_and_apply_them_small(device, bits, dtype, monkeypatch):
    format = WireFormat(PARAMETERS, bits, 256, dtype, scale_dtype=torch.bfloat16)
    values = torch.randn(2, NUMEL).to(dtype)
    after = values + 0.01 * torch.randn(2, NUMEL).to(dtype)
    after[0, ::700], after[1, 9000:9600], after[0, 45_050] = torch.nan, 0, 1e5

    def bytes_of(values, after):
        old = requantize(format, values, None)
        new = requantize(format, after, old)
        return [old, new, *(moves.encode_moves(format, a, b) for a, b in zip(old, new, strict=True))]

    old, new, *sent = compiled = bytes_of(values.to(device), after.to(device))
    for row, moved in enumerate(sent):
        arrived = moves.apply_moves(format, old[row : row + 1].clone(), moved.unsqueeze(0))
        assert torch.equal(arrived, new[row : row + 1])
    in_plain_torch(monkeypatch)
    for ours, reference in zip(compiled, bytes_of(values, after), strict=True):
        assert torch.equal(ours.cpu(), reference)


@pytest.mark.parametrize("moved", [0.003, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5])
def test_moves_take_about_their_entropy(moved):
    n = 2**18
    format = WireFormat([ParameterShard("a", n, True)], 8, 256, torch.bfloat16)
    torch.manual_seed(0)
    old = requantize(format, torch.randn(n), None)
    new = old.clone()
    new[:n][torch.rand(n) < moved] += 1  # a code of 8 bits is a byte
    entropy = -moved * math.log2(moved) - (1 - moved) * math.log2(1 - moved) + moved  # with signs
    assert 8 * len(moves.encode_moves(format, old, new)) / n < 1.05 * entropy + 0.015


@pytest.mark.skipif(kernels.why_not_loaded is not None, reason="the kernels are not built")
@on_devices
def test_damaged_moves_change_no_bytes_around_the_wires_and_too_few_are_refused_small(device):
    format = WireFormat(PARAMETERS, 8, 256, torch.bfloat16)
    torch.manual_seed(0)
    wires = torch.stack([requantize(format, torch.randn(NUMEL), None)] * 3).to(device)
    before = wires.clone()
    sent = moves.encode_moves(format, before[0], requantize(format, torch.randn(NUMEL).to(device), before[0]))
    heads = len(sent) - 3000  # flags, scales and headers stay, most of the bodies do not
    for damaged in (sent[:heads].cpu(), torch.randint(256, (len(sent),), dtype=torch.uint8)):
        damaged = torch.cat([damaged, torch.randint(256, (len(sent) - len(damaged),), dtype=torch.uint8)])
        try:
            moves.apply_moves(format, wires[1:2], damaged.unsqueeze(0).to(device))
        except ValueError as error:
            assert "ends too early" in str(error)
        assert torch.equal(wires[::2], before[::2])
    with pytest.raises(ValueError, match="ends too early"):
        moves.apply_moves(format, wires[1:2], sent[:10].unsqueeze(0))


@pytest.mark.skipif(kernels.why_not_loaded is not None, reason="the kernels are not built")
def test_a_table_of_another_format_is_refused():
    """A kernel would write where it says."""
    formats = [WireFormat([ParameterShard(str(i), 64, True) for i in range(n)], 8, 32, torch.bfloat16) for n in (1, 2)]
    wires = torch.zeros(formats[0].nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="table of another format"):
        table = formats[1].moves_table(wires.device)
        torch.ops.megatron_zpp.measure_moves(wires, wires, formats[0].table, table)


def test_scales_are_kept_with_the_code_absmax_alone():
    values, format = torch.randn(64), WireFormat([ParameterShard("a", 64, True)], 2, 32, torch.float32, "mean")
    with pytest.raises(ValueError, match="absmax alone"):
        requantize(format, values, None)
