"""The CUDA build of csrc/ where there is no GPU: which kernels it has, for which cards, and that none spills.

`make test-cuda-build` makes such a build, against torch for CUDA, in an environment of its own.
"""

import os
import re
import shutil
import site
import subprocess
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
