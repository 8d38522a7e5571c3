"""What the CUDA build of csrc/ shows where there is no GPU: which kernels it has, and what nvcc made of them.

`make test-cuda-build` makes such a build, against torch for CUDA, in an environment of its own.
"""

import os
import re
import shutil
import site
import subprocess
from collections import Counter
from glob import glob

import pytest
import torch
from torch.utils import cpp_extension

from megatron_zpp.zeropp.wire import kernels

CUDA = torch.device("cuda:0")
# From the toolkit, or else from torch's packages.
FOLDERS = [
    os.environ["PATH"],
    f"{cpp_extension.CUDA_HOME}/bin",
    *glob(f"{site.getsitepackages()[0]}/triton/backends/*/bin"),
]
CUOBJDUMP, PTXAS = (shutil.which(name, path=os.pathsep.join(FOLDERS)) for name in ("cuobjdump", "ptxas"))
pytestmark = pytest.mark.skipif(not kernels.has_cuda, reason=f"no CUDA build: {kernels.why_not_on(CUDA)}")


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


@pytest.mark.skipif(
    CUOBJDUMP is None or PTXAS is None, reason="needs cuobjdump and ptxas, of the CUDA toolkit or triton"
)
def test_newer_cards_translate_the_ptx_without_spills(tmp_path):
    """A driver makes sm_100's code of the PTX for sm_90, as ptxas does here."""
    subprocess.run([CUOBJDUMP, "--extract-ptx", "all", str(kernels.LIBRARY)], cwd=tmp_path, check=True)
    for file in tmp_path.glob("*.ptx"):
        command = [PTXAS, "-v", "-arch=sm_100", str(file), "-o", str(tmp_path / "kernels.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        names = re.findall(r"Compiling entry function '(\w+)' for 'sm_100'", said)
        stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert names and not [n for n, stack in zip(names, stacks, strict=True) if stack != ("0", "0", "0")], file.name
    assert len([*tmp_path.glob("*.ptx")]) == 8  # one for each file of csrc/cuda


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
    assert len(checked) == 40 + 24 + 24 + 2  # encoding, with scales of elements; decoding, with scales of elements
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
