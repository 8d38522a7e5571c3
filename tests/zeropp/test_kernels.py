"""The compiled operators equal plain torch to the bit on a CPU, and a GPU's equal the CPU's.

So a GPU's tests launch little but the kernels themselves, which compute-sanitizer then checks in a minute.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.zeropp.wire import kernels, reference
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import Compensation, ParameterShard
from tests.gpu import on_devices

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Bits and scaling of every code, and no code.
CODES = [(1, None), (2, "mean"), (2, "absmax"), (3, "mean"), (3, "absmax"), (4, "mean")]
CODES += [(4, "absmax"), (6, "absmax"), (8, "absmax"), (None, None)]
over_codes = pytest.mark.parametrize("bits, scaling", CODES, ids=lambda c: str(c))
# A matrix, a bias, a matrix with a remainder, one smaller than a block, one too small for any: every kind of segment.
PARAMETERS = [
    ParameterShard("weight", 2048, True),
    ParameterShard("bias", 37, False),
    ParameterShard("odd", 1999, True),
    ParameterShard("small", 45, True),
    ParameterShard("tiny", 7, True),
]
NUMEL = sum(parameter.numel for parameter in PARAMETERS)


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    """Numbers of very different sizes, with some zeros, ties and blocks of nothing else."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[-1])
    values[..., ::17] = 0.5 * torch.randint(-6, 7, values[..., ::17].shape, generator=generator)
    values[..., 128:384] = 0
    values[..., 400:470] = 0  # in blocks that go on
    values[..., 2085:3101:2] = 0
    values[..., 5] = 7
    return values.to(dtype).to(device)


def identical(a, b):
    """Equal to the bit, but that one NaN is as good as another."""
    same_number = a.eq(b) & a.signbit().eq(b.signbit())
    return bool((same_number | (a.isnan() & b.isnan())).all())


def on_cpu(tensor):
    return tensor if tensor is None else tensor.cpu()


def assert_encoded(wire, format, values, noise_seed=None, addend=None, compensation=None, exponents=None):
    """Assert that a wire, and LoCo's new error if any, are those that plain torch writes."""
    compared = compensation
    if compensation is not None:
        new_error = torch.empty_like(compensation.new_error, device="cpu")
        compared = replace(compensation, error=on_cpu(compensation.error), new_error=new_error)
    if wire.is_cuda:
        options = dict(plus=on_cpu(addend), compensation=compared, exponents=on_cpu(exponents))
        expected = format.encode(values.cpu(), noise_seed, **options)
    else:
        expected = torch.zeros_like(wire)
        reference.encode(format, values, expected, addend, compared, noise_seed, exponents=exponents)
    assert wire.cpu().equal(expected)
    assert compensation is None or compensation.new_error.cpu().equal(compared.new_error)


def decode(format, wires, out, accumulate=False, exponents=None):
    """Decode wires [G, ..., nbytes] into ``out``, and assert that this is what plain torch makes of them."""
    expected = out.cpu().clone()
    if wires.is_cuda:
        format.decode_sum(wires.cpu(), expected, accumulate, on_cpu(exponents))
    else:
        reference.decode(format, wires, expected, accumulate, exponents)
    arrived = format.decode_sum(wires, out, accumulate, exponents)
    assert identical(arrived.cpu(), expected), (out.dtype, accumulate)
    return out


def test_the_operators_are_built():
    assert kernels.why_not_loaded is None


@on_devices
@over_codes
@pytest.mark.parametrize("block_size, dtype", zip([32, 256, 2048, None], [*DTYPES, torch.float32], strict=True))
def test_encode_and_decode_small(bits, scaling, block_size, dtype, device):
    scale_dtype = torch.bfloat16 if dtype == torch.float16 else torch.float32
    format = WireFormat(PARAMETERS, bits, block_size, dtype, scaling, scale_dtype)
    values = random(3, 2, NUMEL, dtype=dtype, device=device).transpose(0, 1)  # qgZ's permutation is a stride
    for noise_seed in (12345, None):
        wire = format.encode(values, noise_seed)
        assert_encoded(wire, format, values, noise_seed)
    for out_dtype, accumulate in itertools.product(DTYPES, [False, True]):
        out = random(2, 3, NUMEL, dtype=out_dtype, device=device, seed=1)
        decode(format, torch.stack([wire, wire.roll(1, 0), wire]), out, accumulate)


@on_devices
@pytest.mark.parametrize("source_bits, bits, block_size", [(8, 4, 128), (2, 4, 32), (None, 2, 128), (6, 3, None)])
@pytest.mark.parametrize("error_bits, error_dtype", [(8, torch.float32), (None, torch.bfloat16), (None, torch.float32)])
@pytest.mark.parametrize("decay", [1.0, 0.99])
def test_sum_compensate_encode_in_one_pass_small(source_bits, bits, block_size, error_bits, error_dtype, decay, device):
    source = WireFormat(PARAMETERS, source_bits, block_size, torch.bfloat16)
    format = WireFormat(PARAMETERS, bits, block_size, torch.bfloat16, scale_dtype=torch.bfloat16)
    error_format = WireFormat(PARAMETERS, error_bits, block_size, error_dtype)
    error = None
    for step in range(3):
        peers = source.encode(random(4, 2, NUMEL, device=device, seed=step))  # [G, N, nbytes]
        node_sum = random(2, NUMEL, device=device, seed=step + 10) if step else None
        new = torch.empty(2, error_format.nbytes, dtype=torch.uint8, device=device)
        compensation = Compensation(error_format, error, new, beta=0.8, decay=decay)
        wire = format.encode_sum(peers, source, plus=node_sum, compensation=compensation)

        total = decode(source, peers, torch.empty(2, NUMEL, device=device))
        assert_encoded(wire, format, total, addend=node_sum, compensation=compensation)
        error = new


def exponents_like(values, format, seed=0):
    """Exponents of any size, uint8 [..., L], in rows that begin at any byte; 0 where nothing is quantized."""
    generator = torch.Generator().manual_seed(seed)
    rows, numel = values.numel() // values.shape[-1], values.shape[-1]
    # A GPU's kernels read aligned words of 8 bytes, as far as torch's allocations go: no shorter one here.
    memory = torch.randint(0, 256, (rows * (numel + 3) + 7,), generator=generator, dtype=torch.uint8)
    every = memory[:-7].view(rows, numel + 3)
    every[:, 200:600] = 0  # as before the first step
    for segment in format.unquantized:
        every[:, segment.start + 1 : segment.stop + 1] = 0
    return memory.to(values.device)[:-7].view(rows, numel + 3)[:, 1 : numel + 1].view(values.shape)


ERRORS = [("no LoCo", torch.float32), (8, torch.bfloat16), (8, torch.float32), (None, torch.float32)]
SCALED = [(2, "mean", 128), (2, "absmax", 40), (4, "absmax", 2048)]
SCALED += [(8, "absmax", None), (3, "mean", 32), (1, None, 256)]


@on_devices
@pytest.mark.parametrize("i, j", itertools.product(range(len(SCALED)), range(len(ERRORS))))
def test_scales_of_elements_small(i, j, device):
    """Values are divided by them, their sums multiplied, and LoCo's error is in the values' units.

    Any two of a code, an error and the bits of peers (None: values) meet in a case.
    """
    (bits, scaling, block_size), (error_bits, dtype), source_bits = SCALED[i], ERRORS[j], (None, 8, 4)[(i + j) % 3]
    scale_dtype, noise_seed = (torch.bfloat16, 77) if error_bits is None else (torch.float32, None)
    format = WireFormat(PARAMETERS, bits, block_size, torch.float32, scaling, scale_dtype)
    error_format = None if error_bits == "no LoCo" else WireFormat(PARAMETERS, error_bits, block_size, torch.float32)
    source = None if source_bits is None else WireFormat(PARAMETERS, source_bits, block_size, dtype)
    error = None
    for step in range(3):
        values = random(2, NUMEL, dtype=dtype, device=device, seed=step)
        exponents, plus = (
            exponents_like(values, format, step),
            random(2, NUMEL, device=device, seed=9) if step else None,
        )
        if step == 2:
            values[0, 700], values[1, 2500] = torch.nan, -torch.inf
        compensation = None
        if error_format is not None:
            new = torch.empty(2, error_format.nbytes, dtype=torch.uint8, device=device)
            compensation = Compensation(error_format, error, new, 0.8, 0.99)
            error = new
        if source is None:
            options = dict(plus=plus, compensation=compensation, exponents=exponents)
            wire = format.encode(values, noise_seed, **options)
        else:
            peers = source.encode(torch.stack([values, values.flip(0), values]))
            options = dict(plus=plus, compensation=compensation, exponents=exponents)
            wire = format.encode_sum(peers, source, noise_seed, **options)
            values = decode(source, peers, torch.empty(2, NUMEL, device=device))
        assert_encoded(wire, format, values, noise_seed, plus, compensation, exponents)
        for peers, accumulate in [(1, False), (19, True)]:  # and more than are read at once
            wires = torch.stack([wire.roll(peer, 0) for peer in range(peers)])
            scales = exponents_like(torch.empty(peers, 2, NUMEL, device=device), format, step)
            decode(format, wires, random(2, NUMEL, device=device, seed=8), accumulate, scales)


@on_devices
@pytest.mark.parametrize("bits, scaling", CODES[:-1])
@pytest.mark.parametrize("block_size, shift", [(8, 0), (40, 1), (128, 6), (2048, 0), (None, 1)])
def test_exponents_move_as_in_plain_torch(bits, scaling, block_size, shift, device):
    """Whatever was sent, NaN and zeros too; by no more than a table says, and by nothing where it says so."""
    parameters = [ParameterShard("norm", shift, False), *PARAMETERS]
    format = WireFormat(
        parameters, bits, block_size, torch.float32, scaling, torch.bfloat16 if shift else torch.float32
    )
    values = random(3, format.numel, device=device)
    values[0, 700] = torch.nan
    wires = format.encode(values)
    generator = torch.Generator().manual_seed(shift)
    steep = torch.randint(0, 40, (2**bits + 1,), generator=generator).eq(0).int().cumsum(0).sub(8).tolist()
    for exponents in (None, exponents_like(values, format)):
        for moves in (steep, [-1] * len(steep), list(range(len(steep)))[: 2**4 + 1] + [20] * (len(steep) - 17)):
            expected = torch.empty(values.shape, dtype=torch.uint8)
            reference.move_exponents(format, on_cpu(exponents), wires.cpu(), moves[: len(steep)], expected)
            assert format.move_exponents(exponents, wires, moves[: len(steep)]).cpu().equal(expected)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 40, 128])
def test_rotation_small(dtype, block_size, device):
    format = WireFormat(PARAMETERS, 4, block_size, dtype)
    values = random(2, 3, NUMEL, dtype=dtype, device=device)
    expected = torch.empty(values.shape)
    reference.rotate(format, values.cpu(), expected)
    assert identical(format.rotate(values).cpu(), expected)


@on_devices
@pytest.mark.parametrize("dtype, error_bits", [(torch.float32, 8), (torch.bfloat16, None), (torch.float16, 8)])
@pytest.mark.parametrize("shift", range(1, 9))
def test_parameters_that_begin_anywhere(shift, error_bits, dtype, device):
    """One-dimensional parameters shift those behind them: by a multiple of 16 bytes, or not."""
    norm, rows = ParameterShard("norm", shift, False), 2
    parameters = [norm, ParameterShard("weight", 777, True), norm, ParameterShard("small", 301, True)]
    parameters.append(ParameterShard("bias", 600 + shift, False))
    format, plain = (WireFormat(parameters, bits, 128, dtype) for bits in (4, None))
    error_format = WireFormat(parameters, error_bits, 128, dtype)
    values, addend, error = (random(rows, format.numel, dtype=dtype, device=device, seed=seed) for seed in range(3))
    error = error_format.encode(error)
    for source in (None, plain):
        wire = torch.zeros(rows, format.nbytes, dtype=torch.uint8, device=device)
        compensation = Compensation(error_format, error, torch.empty_like(error), 0.8, 0.99)
        if source is None:
            format.encode(values, plus=addend, compensation=compensation, out=wire)
        else:
            peers = source.encode(values).unsqueeze(0)
            format.encode_sum(peers, source, plus=addend, compensation=compensation, out=wire)
        assert_encoded(wire, format, values, addend=addend, compensation=compensation)
    for peers, accumulate in itertools.product([1, 19], [False, True]):  # and more than are read at once
        wires = torch.stack([format.encode(values.roll(peer, 0)) for peer in range(peers)])
        decode(format, wires, addend.clone(), accumulate)


@pytest.fixture
def eight_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("eight_threads")
@pytest.mark.parametrize(
    "bits, block_size, error_bits", [(4, 128, 8), (3, 40, None), (2, 128, 8), (8, 2048, 8), (None, 128, None)]
)
def test_eight_threads_work_on_every_tile_once(bits, block_size, error_bits):
    """Shares that begin and end within rows and parameters. What a second visit would change is done in place."""
    parameters = [ParameterShard("weight", 70001, True), ParameterShard("bias", 5003, False)]
    parameters.append(ParameterShard("odd", 31999, True))
    format = WireFormat(parameters, bits, block_size, torch.bfloat16)
    error_format = WireFormat(parameters, error_bits, block_size, torch.float32)
    values, addend = random(3, format.numel), random(3, format.numel, seed=1)

    def guarded(like):
        """A copy of [3, ...] between two rows that nobody may write to."""
        memory = torch.full((5, like.shape[1]), 85, dtype=like.dtype)
        memory[1:4] = like
        return memory, memory[1:4]

    (wires, wire), (errors, error) = guarded(format.encode(values)), guarded(error_format.encode(addend))
    expected, expected_error = torch.empty_like(wire), torch.empty_like(error)
    compensation = Compensation(error_format, error.clone(), expected_error, 0.8, 0.99)
    reference.encode(format, values, expected, addend, compensation, 7)
    compensation = Compensation(error_format, error, error, 0.8, 0.99)
    format.encode(values, 7, plus=addend, compensation=compensation, out=wire)
    assert wire.equal(expected) and error.equal(expected_error)

    peers = torch.stack([wire, wire.roll(1, 0)])
    sums, total = guarded(values)
    decode(format, peers, total, accumulate=True)

    (rotations, rotated), expected = guarded(values), torch.empty_like(values)
    reference.rotate(format, values, expected)
    torch.ops.megatron_zpp.rotate(rotated, format.table, rotated)  # which is its own inverse
    assert identical(rotated, expected)
    for memory in (wires, errors, sums, rotations):
        assert (memory[[0, -1]] == 85).all()


@on_devices
@pytest.mark.parametrize("bits, scaling", [(2, "absmax"), (4, "absmax"), (8, "absmax"), (1, None), (2, "mean")])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_the_ends_of_fp32(bits, scaling, scale_dtype, device):
    """Denormal and huge scales have no useful reciprocal; the code "mean" takes the smallest values for zero."""
    exponents = torch.tensor([-149, -140, -127, -110, -101, -100, -99, -86, -63, 0, 99, 100, 101, 120, 127])
    format = WireFormat([ParameterShard("weight", 512, True)], bits, 128, torch.float32, scaling, scale_dtype)
    values = random(512).div(7).clamp(-1, 1).double().mul(2.0 ** exponents.double().unsqueeze(1)).float().to(device)
    assert_encoded(format.encode(values), format, values)  # [15, 512], a row for each exponent


@on_devices
@settings(deadline=None, max_examples=100)
@given(bits=st.sampled_from([2, 3, 4, 6, 8]), dtype=st.sampled_from(DTYPES), data=st.data())
def test_ties_and_their_neighbours(bits, dtype, device, data):
    """The product with the reciprocal must never round otherwise than the quotient."""
    qmax = 2 ** (bits - 1) - 1
    largest = torch.tensor(data.draw(st.floats(2**-10, 2**10, width=32)))
    scale = largest / torch.tensor(float(qmax))
    ties = (torch.arange(2 * qmax).float() + 0.5 - qmax) * scale
    inf = torch.tensor(torch.inf)
    values = torch.cat([ties, ties.nextafter(inf), ties.nextafter(-inf), ties.nextafter(inf).nextafter(inf)])
    values = torch.cat([values, largest.view(1), torch.zeros(-(len(values) + 1) % 8)]).to(dtype).to(device)
    format = WireFormat([ParameterShard("weight", len(values), True)], bits, None, dtype, "absmax")
    assert_encoded(format.encode(values), format, values)


@on_devices
@settings(deadline=None, max_examples=100)
@given(bits=st.integers(1, 4), size=st.floats(2**-10, 2**10, width=32), data=st.data())
def test_values_about_whole_steps_of_the_mean(bits, size, device, data):
    """Multiples of one number lie on the borders between codes where the mean is one, too."""
    multiples = torch.tensor(data.draw(st.lists(st.integers(-4, 4), min_size=32, max_size=32))).float()
    values = (multiples * torch.tensor(size)).to(device)
    direction = torch.tensor(data.draw(st.sampled_from([-torch.inf, torch.inf])))
    values[::5] = values[::5].nextafter(direction.to(device))
    format = WireFormat([ParameterShard("weight", 32, True)], bits, 32, torch.float32, "mean" if bits > 1 else None)
    assert_encoded(format.encode(values), format, values)


def test_conversions_of_every_16_bit_number_and_between():
    """fp32 to bf16 and fp16 and back, through the unquantized part of a wire."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        exact = every.view(dtype).float()
        finite = exact[exact.isfinite()]
        halfway = (finite.double() + finite.double().roll(1)).div(2).float()
        inf = torch.tensor(torch.inf)
        values = torch.cat([exact, halfway, halfway.nextafter(inf), halfway.nextafter(-inf), torch.tensor([3.4e38])])
        format = WireFormat([ParameterShard("norm", len(values), False)], None, None, dtype)
        arrived = format.decode(format.encode(values), torch.empty_like(values))
        assert identical(arrived, values.to(dtype).float())


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("shift", [0, 3])
def test_what_is_not_quantized_arrives_bit_by_bit(shift, bits, dtype, device):
    """Codes that are packed into such elements look like NaNs with payloads, too; also in plain torch."""
    every = torch.arange(2**16, dtype=torch.int32)
    number = torch.int32 if dtype == torch.float32 else torch.int16
    packed = (every * 65_537).view(number) if dtype == torch.float32 else every.to(number)
    parameters = [ParameterShard("weight", 64, True), ParameterShard("bias", shift, False)]
    format = WireFormat([*parameters, ParameterShard("packed", 2**16, False)], bits, 32, dtype)
    values = torch.cat([torch.ones(64 + shift, dtype=dtype), packed.view(dtype)]).expand(2, -1).contiguous().to(device)
    wire, out = format.encode(values), torch.empty_like(values)
    assert format.decode(wire, out).view(number).equal(values.view(number))
    assert_encoded(wire, format, values)
    reference.decode(format, wire.unsqueeze(0), out.zero_(), accumulate=False)
    assert out.view(number).equal(values.view(number))


@on_devices
def test_torch_can_trace_every_operator(device):
    format = WireFormat(PARAMETERS, 4, 128, torch.bfloat16)
    values = random(2, NUMEL, device=device)
    wire, out = format.encode(values), torch.empty(2, NUMEL, device=device)
    error_format = WireFormat(PARAMETERS, 8, 128, torch.float32)
    error = error_format.encode(values)
    ops, table = torch.ops.megatron_zpp, format.table
    torch.library.opcheck(
        ops.encode, (values, None, [], out, wire, table, error, error.clone(), error_format.table, 0.8, 1.0, None)
    )
    torch.library.opcheck(ops.decode, (wire.unsqueeze(0), table, out, True))
    torch.library.opcheck(ops.rotate, (values, table, out))
    exponents = exponents_like(values, format)
    torch.library.opcheck(
        ops.encode, (values, None, [], out, wire, table, None, None, [], 0.0, 1.0, None), dict(exponents=exponents)
    )
    torch.library.opcheck(ops.decode, (wire.unsqueeze(0), table, out, True, exponents.unsqueeze(0)))
    torch.library.opcheck(ops.move_exponents, (exponents, wire, table, list(range(17)), exponents.clone()))


def arguments(operator):
    """Right ones, as keywords."""
    format, error_format = (WireFormat(PARAMETERS, bits, 128, torch.float32) for bits in (4, 8))
    values, wire, error = (torch.zeros(2, n) for n in (NUMEL, format.nbytes, error_format.nbytes))
    wire, error = wire.byte(), error.byte()
    return {
        "encode": dict(
            values=values, peers=None, peers_format=[], addend=values.clone(), wire=wire, format=format.table,
            error=error, new_error=error.clone(), error_format=error_format.table, beta=0.8, decay=1.0, noise_seed=None,
        ),
        "decode": dict(peers=torch.stack([wire] * 3), format=format.table, out=values, accumulate=False),
        "rotate": dict(values=values, format=format.table, out=values.clone()),
    }[operator]  # fmt: skip


TENSORS = {"encode": ["values", "addend", "wire", "error", "new_error"], "decode": ["peers", "out"]}
TENSORS["rotate"] = ["values", "out"]
MISTAKES = {
    "another type": lambda tensor: tensor.int() if tensor.dtype == torch.uint8 else tensor.double(),
    "shorter": lambda tensor: tensor[..., :-1].contiguous(),
    "strided": lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2],
    "more rows": lambda tensor: torch.cat([tensor, tensor], dim=-2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("operator, name", [(operator, name) for operator in TENSORS for name in TENSORS[operator]])
def test_wrong_arguments_are_refused(operator, name, mistake):
    given, call = arguments(operator), getattr(torch.ops.megatron_zpp, operator)
    call(**given)
    with pytest.raises((ValueError, TypeError)):
        call(**given | {name: MISTAKES[mistake](given[name])})


@pytest.mark.parametrize(
    "operator, change, message",
    [("encode", dict(values=None), "either values or peers"), ("decode", dict(format=[1, 2]), "has 5 \\+ 5 n numbers")],
)
def test_half_an_argument_is_refused(operator, change, message):
    with pytest.raises(ValueError, match=message):
        getattr(torch.ops.megatron_zpp, operator)(**arguments(operator) | change)


@pytest.mark.parametrize("shift, columns", [(8, 0), (0, 8)])
def test_wires_that_are_not_aligned_are_refused(shift, columns):
    """A GPU reads and writes codes as vectors, and its context does not survive one at another address."""
    format = WireFormat(PARAMETERS, 8, 128, torch.bfloat16)
    wire = torch.empty(2 * (format.nbytes + columns) + shift, dtype=torch.uint8)[shift:].view(2, -1)[:, : format.nbytes]
    arguments = (None, [], None, wire, format.table, None, None, [], 0.0, 1.0, None)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        torch.ops.megatron_zpp.encode(torch.zeros(2, NUMEL), *arguments)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        torch.ops.megatron_zpp.decode(wire.unsqueeze(0), format.table, torch.zeros(2, NUMEL), False)


def test_an_error_that_the_kernels_do_not_keep_is_refused():
    format, error_format = (WireFormat(PARAMETERS, bits, 128, torch.float32) for bits in (4, 2))
    values, error = torch.zeros(2, NUMEL), torch.zeros(2, error_format.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="errors are kept in 8 bits"):
        format.encode(values, compensation=Compensation(error_format, error, error, 0.8, 1.0))
