"""csrc/cuda where there is no GPU: its logic, run by a C++ compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tests.conftest import once
from tests.tools import run

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ALIGNED = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # vectors that are not aligned trap


@pytest.fixture(scope="session")
def cuda_on_cpu(tmp_path_factory):
    """The operators with the CUDA kernels, compiled for the CPU; see cuda_on_cpu/cuda_runtime.h."""
    return once(tmp_path_factory, "cuda_on_cpu", compile_for_cpu) / "kernels.so"


def compile_for_cpu(folder):
    sources = [
        ROOT / "csrc" / "operators.cpp",
        ROOT / "csrc" / "cpu" / "moves.cpp",
        HERE / "cuda_on_cpu" / "kernels.cpp",
        HERE / "cuda_on_cpu" / "device.cpp",
    ]
    includes = [f"-I{path}" for path in [HERE / "cuda_on_cpu", *cpp_extension.include_paths()]]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    flags += [*ALIGNED, "-DZEROPP_CUDA_ON_CPU", "-U_FORTIFY_SOURCE"]  # whose longjmp takes another stack for a mistake
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch", "-ltorch_cpu"]
    compiler, library = os.environ.get("CXX", "c++"), folder / "kernels.so"
    subprocess.run([compiler, *flags, *includes, *map(str, sources), *libraries, "-o", str(library)], check=True)


@pytest.mark.long
def test_quotients_by_the_reciprocal_round_as_division_does(tmp_path):
    """For all scales and all ties: what test_kernels.py, which draws some, cannot show."""
    program = tmp_path / "quotients"
    flags = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, str(HERE / "quotients.cpp"), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    wrong, wrong_products = map(int, done.stdout.split())
    assert wrong == 0 and wrong_products > 0


PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "--no-header")


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.evidence)])
def test_the_kernels_equal_plain_torch_in_any_order_of_threads_and_read_nothing_beyond_a_buffer(cuda_on_cpu, seed):
    # "eight_threads" is about the other kernels' work, and much for coroutines. One seed tries the large cases too.
    chosen = "not eight_threads" if seed == 1 else "not eight_threads and (small or moves)"
    files = [str(HERE / "test_kernels.py"), str(HERE / "test_moves.py"), "-k", chosen]
    run(*PYTEST, *files, timeout=None, ZEROPP_KERNELS=str(cuda_on_cpu), CUDA_ON_CPU_SEED=str(seed))


@pytest.mark.long
def test_no_operator_of_moved_weights_waits_for_a_copy_inside(cuda_on_cpu):
    """The same test without this library knows what operators return, not what they do."""
    test = f"{HERE / 'test_fake_cuda.py'}::test_a_step_of_moved_weights_waits_for_their_sizes_alone"
    run(*PYTEST, test, timeout=None, ZEROPP_KERNELS=str(cuda_on_cpu))


READ = """
import ctypes, sys, torch
from megatron_zpp.zeropp.wire import kernels
buffer = torch.zeros(8278, dtype=torch.uint8)
print("read", ctypes.c_uint8.from_address(buffer.data_ptr() + int(sys.argv[1])).value)
"""


@pytest.mark.long
def test_a_read_of_the_next_vector_ends_the_program_and_one_within_the_last_does_not(cuda_on_cpu):
    """A buffer of 8,278 bytes is 8,288 in vectors of 16. Beyond them a GPU has another tensor, or nothing."""
    command = (sys.executable, "-c", READ)
    environment = os.environ | {"ZEROPP_KERNELS": str(cuda_on_cpu)}
    done = [
        subprocess.run([*command, place], env=environment, cwd=ROOT, capture_output=True, text=True)
        for place in ("8287", "8288")
    ]
    assert done[0].returncode == 0 and done[0].stdout.startswith("read")
    assert done[1].returncode < 0 and done[1].stdout == ""


def test_the_fake_device_refuses_what_cuda_refuses(tmp_path):
    """Else a launch that works here fails on the first GPU."""
    program, compiler = tmp_path / "refusals", os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-O0", *ALIGNED, f"-I{HERE / 'cuda_on_cpu'}"]
    subprocess.run([compiler, *flags, str(HERE / "cuda_on_cpu" / "refusals.cpp"), "-o", str(program)], check=True)
    done = [subprocess.run([program, shift], capture_output=True, text=True) for shift in ("16", "8")]
    refused = "0 9 9 9 9 9 9 1 1 "
    assert [each.stdout for each in done] == [refused + "read 0", refused]
    assert done[0].returncode == 0 and done[1].returncode < 0


ROWS = """
import torch
from megatron_zpp.zeropp.wire import reference
from megatron_zpp.zeropp.wire.format import WireFormat
from megatron_zpp.zeropp.wire.layout import ParameterShard
format = WireFormat([ParameterShard("token", 32, True), ParameterShard("odd", 3, False)], 8, 32, torch.bfloat16)
values = torch.randn(70_000, 35).bfloat16()
wire, out = format.encode(values), torch.empty(70_000, 35, dtype=torch.bfloat16)
expected = torch.empty_like(wire)
reference.encode(format, values, expected, None, None, None)
assert wire.equal(expected) and format.decode(wire, out)[:, 32:].equal(values[:, 32:])
"""


@pytest.mark.long
def test_more_rows_than_grid_y_has(cuda_on_cpu):
    """Tokens on their way to experts are rows; grid.y ends at 65,535."""
    run(sys.executable, "-c", ROWS, timeout=None, ZEROPP_KERNELS=str(cuda_on_cpu))
