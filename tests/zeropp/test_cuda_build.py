"""What the CUDA build of csrc/ shows where there is no GPU: it has the kernels, and looks at arguments before a launch.

`make test-cuda-build` makes such a build, against torch for CUDA, in an environment of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from glob import glob
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import cpp_extension

from megatron_zpp.zeropp.wire import kernels
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import Compensation, ParameterShard
from tests.zeropp.test_kernels import Operators

CUDA = torch.device("cuda:0")
# Of the toolkit, or else what comes with torch.
FOLDERS = [
    os.environ["PATH"],
    f"{cpp_extension.CUDA_HOME}/bin",
    *glob(f"{site.getsitepackages()[0]}/triton/backends/*/bin"),
]
CUOBJDUMP = shutil.which("cuobjdump", path=os.pathsep.join(FOLDERS))
NOWHERE = 4096  # an address; a null pointer would be a tensor without memory
pytestmark = pytest.mark.skipif(not kernels.has_cuda, reason=f"no CUDA build: {kernels.why_not_on(CUDA)}")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU: test_kernels.py runs the kernels on it")

PARAMETERS = [ParameterShard("weight", 4096, True), ParameterShard("bias", 37, False)]
FORMAT = WireFormat(PARAMETERS, 4, 128, torch.bfloat16)
ERROR = WireFormat(PARAMETERS, 8, 128, torch.float32)  # LoCo's


@pytest.mark.parametrize("operator", kernels.OPERATORS)
def test_every_operator_has_a_kernel_for_cuda(operator):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"megatron_zpp::{operator}", "CUDA") and has_kernel(f"megatron_zpp::{operator}", "CPU")
    assert not has_kernel(f"megatron_zpp::{operator}", "XPU")


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump, of the CUDA toolkit or triton")
def test_it_holds_code_for_the_cards_that_the_documentation_names():
    def listed(what: str) -> list[str]:
        text = subprocess.run([CUOBJDUMP, what, str(kernels.LIBRARY)], capture_output=True, text=True, check=True)
        return re.findall(r"\.(sm_\d+)\.", text.stdout)

    assert {"sm_80", "sm_90"} <= set(listed("--list-elf"))
    assert set(listed("--list-ptx")) == {"sm_90"}  # what newer cards translate for themselves


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump, of the CUDA toolkit or triton")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_all_values_stay_in_registers(architecture):
    command = [CUOBJDUMP, "--dump-resource-usage", "-arch", architecture, str(kernels.LIBRARY)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert len(used) == text.count("REG:") > 0
    for name, stack, local in used:
        assert (stack, local) == ("0", "0"), f"{name} uses local memory"


# What nvcc made of the kernels, for sm_90
KERNELS = (
    "encode_tiles|encode_blocks|decode_tiles|decode_sums|decode_scaled|move_tiles|move_exponents_of_tiles|"
    "move_exponents_of_blocks|rotate_tiles|find_new_scales|encode_chunks|write_heads|locate|rescale|move_chunks"
)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[str]]:
    """The instructions of each kernel in their order, without operands, by its name and mangled template arguments."""
    if CUOBJDUMP is None:
        pytest.skip("needs cuobjdump, of the CUDA toolkit or triton")
    command = [CUOBJDUMP, "-sass", "-arch", "sm_90", str(kernels.LIBRARY)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = {}
    for function in text.split("Function : ")[1:]:
        name = re.search(rf"({KERNELS})\w*", function.split()[0])
        instruction = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9._]+)"
        assert name is not None
        functions[name.group()] = re.findall(instruction, function, re.MULTILINE)
    return functions


def places(instructions: list[str], *beginnings: str) -> list[int]:
    return [place for place, name in enumerate(instructions) if name.startswith(beginnings)]


def test_all_loads_come_before_the_first_store(compiled):
    """And values stay in registers. Kernels for blocks that a warp does not hold read them once more for each pass."""
    checked = {name: code for name, code in compiled.items() if name.startswith(("encode_tiles", "decode"))}
    assert len(checked) == 32 + 16 + 24 + 2  # encoding, with scales of elements; decoding, with scales of elements
    for name, code in checked.items():
        assert places(code, "LDG")[-1] < places(code, "STG")[0], name
        assert not places(code, "LDL", "STL"), name


def test_what_16_peers_sent_is_loaded_before_the_first_is_added(compiled):
    """8 peers with int8, whose codes take two registers."""
    loads_of_codes = {2: ("LDG.E.U16", 16), 4: ("LDG.E", 16), 8: ("LDG.E.64", 8)}
    for bits, (load, peers) in loads_of_codes.items():
        names = [name for name in compiled if name.startswith(f"decode_sumsILi{bits}E")]
        assert len(names) == 3
        for name in names:
            code = compiled[name]
            sums = places(code, "FADD")
            before = Counter(code[: sums[0]])
            # A scale is in fp32 or in bf16: one load for each.
            scales = Counter({"LDG.E": peers, "LDG.E.U16": peers})
            assert before[load] >= peers + scales[load], name
            assert all(before[kind] >= count for kind, count in scales.items()), name


def test_values_are_read_in_vectors_wherever_they_begin(compiled):
    """Nothing but codes and scales is read in less than 16 bytes: there is no path for what is not aligned."""
    in_flight = 2
    for name, code in compiled.items():
        if not name.startswith(("encode_tiles", "decode_tiles")) or "ILi4E" not in name or "SourceE3" in name:
            continue
        loads = Counter(instruction for instruction in code if instruction.startswith("LDG"))
        vectors = loads.pop("LDG.E.128")
        assert vectors >= 2 * in_flight, name  # a group of 16 bytes may lie in two vectors
        if name.startswith("decode_tiles"):
            assert loads == {"LDG.E": 2 * in_flight, "LDG.E.U16": in_flight}, name  # codes and scales
        elif "SourceE2" not in name:  # peers' codes have loads, too
            errors = "ELb1E" in name
            kept = {"LDG.E": in_flight, "LDG.E.U16": in_flight}  # scales of moved codes, which go without errors
            assert loads == ({"LDG.E.64": 1, "LDG.E": 1, "LDG.E.U16": 1} if errors else kept), name


def test_values_of_large_blocks_are_read_in_vectors(compiled):
    """Kernels for blocks take those of more than 256 elements; kernels for tiles take the rest."""
    checked = {
        name: code for name, code in compiled.items() if re.match("encode_blocksI.*SourceE[01]ELb[01]ELi0", name)
    }
    assert len(checked) == 4
    for name, code in checked.items():
        loads = {instruction for instruction in code if instruction.startswith("LDG")}
        scales = {"LDG.E", "LDG.E.U16"}  # of errors, or those that are kept
        assert loads == {"LDG.E.128"} | scales | ({"LDG.E.64"} if "ELb1E" in name else set()), name  # errors' codes


# Arguments


def on_a_gpu_that_is_not_there(tensor: Tensor) -> Tensor:
    """A CUDA tensor with the sizes, strides and type of ``tensor``, whose memory nothing may touch."""
    nbytes = tensor.untyped_storage().nbytes()
    storage = torch._C._construct_storage_from_data_pointer(NOWHERE, CUDA, nbytes)
    metadata = dict(
        storage_offset=0, size=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype, device=CUDA,
        data_ptr=NOWHERE, nbytes=nbytes,
    )  # fmt: skip
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)


def arguments() -> dict[str, dict[str, Any]]:
    """Right ones of each operator, as keywords, with tensors on the CPU."""
    values = torch.zeros(2, FORMAT.numel)
    wire = torch.zeros(2, FORMAT.nbytes, dtype=torch.uint8)
    peers = torch.zeros(3, 2, FORMAT.nbytes, dtype=torch.uint8)
    error = torch.zeros(2, ERROR.nbytes, dtype=torch.uint8)
    exponents = torch.zeros(2, FORMAT.numel, dtype=torch.uint8)
    table = FORMAT.table
    return {
        "encode": dict(
            values=values, peers=None, peers_format=[], addend=values.clone(), wire=wire,
            format=table, error=error, new_error=error.clone(), error_format=ERROR.table, beta=0.8, decay=1.0,
            noise_seed=None, exponents=exponents,
        ),
        "decode": dict(peers=peers, format=table, out=values, accumulate=False),
        "rotate": dict(values=values, format=table, out=values.clone()),
        "move_exponents": dict(
            exponents=exponents, wire=wire, format=table, moves=list(range(17)), out=exponents.clone()
        ),
    }  # fmt: skip


def call(operator: str, change: dict[str, Callable[[Any], Any]], stays: str | None = None) -> None:
    """Call it with tensors on a GPU that is not there; ``stays``: the argument that is left on the CPU."""
    changed = {name: change[name](value) if name in change else value for name, value in arguments()[operator].items()}
    moved = {
        name: on_a_gpu_that_is_not_there(value) if isinstance(value, Tensor) and name != stays else value
        for name, value in changed.items()
    }
    getattr(torch.ops.megatron_zpp, operator)(**moved)


def shorter(tensor: Tensor) -> Tensor:
    return tensor[..., :-1].contiguous()


def more_rows(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], dim=-2)


def strided(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def mistakes() -> Iterator[Any]:
    floats = {"encode": ["values", "addend"], "decode": ["out"], "rotate": ["values", "out"], "move_exponents": []}
    wires = {"encode": ["wire", "error", "new_error", "exponents"], "decode": ["peers"], "rotate": []}
    wires["move_exponents"] = ["exponents", "wire", "out"]
    for operator in kernels.OPERATORS:
        for name in floats[operator] + wires[operator]:
            wrong_type = torch.Tensor.double if name in floats[operator] else torch.Tensor.int
            for change, error in ((wrong_type, TypeError), (shorter, ValueError), (strided, ValueError)):
                yield pytest.param(operator, {name: change}, None, error, id=f"{operator}-{name}-{change.__name__}")
            if name not in ("wire", "out"):  # whose rows are what the others must have
                yield pytest.param(operator, {name: more_rows}, None, ValueError, id=f"{operator}-{name}-more_rows")
            yield pytest.param(operator, {}, name, ValueError, id=f"{operator}-{name}-on the CPU")
    yield pytest.param("encode", {"values": lambda _: None}, None, ValueError, id="encode-nothing")
    yield pytest.param("decode", {"format": lambda table: table[:-1]}, None, ValueError, id="decode-half a table")


@without_gpu
@pytest.mark.parametrize("operator, change, stays, error", list(mistakes()))
def test_wrong_arguments_are_refused_before_a_launch(operator, change, stays, error):
    with pytest.raises(error):
        call(operator, change, stays)


@without_gpu
@pytest.mark.parametrize("operator", kernels.OPERATORS)
def test_right_arguments_come_as_far_as_the_driver_that_is_missing(operator):
    with pytest.raises(RuntimeError, match=r"(?i)cuda.*driver|driver.*cuda|no CUDA-capable device"):
        call(operator, {})


# Tracing


def test_each_step_is_one_launch_on_a_traced_gpu():
    """Allocations aside; and results are where, and as large as, what follows expects."""
    plain = WireFormat(FORMAT.parameters, None, 128, torch.bfloat16)
    error_format = WireFormat(FORMAT.parameters, 8, 128, torch.bfloat16)
    with FakeTensorMode(), Operators() as operators:
        values = torch.empty(2, FORMAT.numel, device=CUDA, dtype=torch.bfloat16)
        errors = [torch.empty(2, error_format.nbytes, device=CUDA, dtype=torch.uint8) for _ in range(2)]
        wire = FORMAT.encode(values, compensation=Compensation(error_format, *errors, 0.8, 1.0))
        assert (wire.device, wire.dtype, wire.shape) == (CUDA, torch.uint8, (2, FORMAT.nbytes))
        assert FORMAT.decode(wire, torch.empty_like(values)).device == CUDA
        rotated = FORMAT.rotate(values)
        assert (rotated.device, rotated.dtype, rotated.shape) == (CUDA, torch.float32, values.shape)
        for source in (FORMAT, plain):
            peers = torch.empty(3, 2, source.nbytes, device=CUDA, dtype=torch.uint8)
            assert FORMAT.encode_sum(peers, source, plus=values).shape == wire.shape
    assert operators.names == ["encode", "decode", "rotate", "encode", "encode"]
