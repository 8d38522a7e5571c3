"""What ``pip install`` makes of a checkout: with a compiler, with one that fails, and in an empty environment."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import megatron_zpp
from tests.conftest import ROOT
from tests.tools import run

CHECKOUT = ("csrc", "megatron_zpp", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
TINY = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 --train-iters 3
    --lr 1e-3 --mock-data --vocab-size 100 --eval-iters 1 --log-interval 1 --num-workers 0 --distributed-backend gloo
    --zero-quantized-weights --zero-hpz-partition-size 1 --zero-quantized-gradients --zeropp-loco"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the package is built from, with nothing built."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def call(*command: str | Path, folder: Path, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder`` as somebody would whose PYTHONPATH does not lead to this checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = inherited | {"OMP_NUM_THREADS": "1"} | more
    return run(*command, status=status, folder=folder, timeout=600, env=env)


def succeed(*command: str | Path, folder: Path) -> str:
    return call(*command, folder=folder).stdout


@pytest.mark.long
def test_kernels_compiled_from_other_sources_are_not_linked_into_a_build(checkout, tmp_path):
    """A GPU's machine would else measure, and pass, kernels that are not in the tree."""

    def refusal(**more: str) -> str:
        environment = dict(ZEROPP_CUDA_OBJECTS=str(tmp_path / "objects")) | more
        return call(sys.executable, "setup.py", "--version", folder=checkout, status=1, **environment).stderr

    assert refusal().startswith("error: no compiled kernels in ZEROPP_CUDA_OBJECTS=")
    sources = [*checkout.glob("csrc/*.h"), *checkout.glob("csrc/cuda/*")]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(checkout)}\n" for path in sources]
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "sources.sha256").write_text("".join(sums))
    # They are of these sources.
    lacking = "is not for CUDA" if torch.version.cuda is None else "no CUDA toolkit to link with"
    assert lacking in refusal(CUDA_HOME=str(tmp_path))
    with open(sources[0], "a") as source:
        source.write("// changed\n")
    assert refusal().endswith("was compiled from other sources than csrc/ holds: run `make cuda-objects` again\n")


def test_kernels_compiled_ahead_round_as_those_of_a_build():
    """--fmad=false decides bits."""
    ahead = run("make", "-n", "-B", "build/cuda-objects/moves.o").stdout
    (flags,) = re.findall(r'compile_args\["nvcc"\] = \["(.*)"\]', (ROOT / "setup.py").read_text())
    assert " {} ".format(flags.replace('", "', " ")) in ahead


@pytest.mark.long
def test_a_build_that_fails_leaves_the_kernels_out_and_installs_the_rest(checkout, tmp_path):
    # A ninja that is found and then fails is how torch comes to raise a RuntimeError, as it does for a broken nvcc.
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.11.1\n')  # status 1 but for --version
    ninja.chmod(0o755)
    target = tmp_path / "installed"
    stale = checkout / "megatron_zpp" / "zeropp" / "wire" / "_kernels.so"
    stale.write_bytes(b"an earlier build's")
    pip = (sys.executable, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps")
    done = call(*pip, "--target", target, ".", folder=checkout, PATH=f"{ninja.parent}{os.pathsep}{os.environ['PATH']}")
    warnings = [
        line.strip()
        for line in done.stderr.splitlines()  # pip's own is on stdout
        if "the kernels of csrc/ are left out" in line
    ]
    assert warnings == [
        "warning: the kernels of csrc/ are left out, and plain torch will quantize: "
        "Error compiling objects for extension"
    ]
    assert (target / "megatron_zpp" / "commands" / "estimate.py").exists()
    assert not list(target.rglob("_kernels*")) and not stale.exists()


@pytest.mark.long
def test_a_source_archive_holds_what_the_kernels_are_built_from(checkout):
    build = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    name = succeed(sys.executable, "-c", build, folder=checkout).splitlines()[-1]
    with tarfile.open(checkout / name) as archive:
        held = {member.partition("/")[2] for member in archive.getnames()}
    sources = [path for part in ("csrc", "megatron_zpp") for path in (ROOT / part).rglob("*") if path.is_file()]
    needed = {str(path.relative_to(ROOT)) for path in sources if path.suffix in (".py", ".h", ".cpp", ".cu")}
    assert len(needed) > 50 and needed <= held


def packages_of_torch() -> set[str]:
    """Names of the distributions that torch alone brings into an environment."""
    names, found = ["torch"], set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            names += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def share_torch(site_packages: Path) -> None:
    """Link torch and what it needs, and nothing else of this environment, into another one's ``site_packages``.

    Installing torch there would take minutes and gigabytes; everything else comes from the package index.
    """
    for name in packages_of_torch():
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(importlib.metadata.distribution(name).locate_file(top))


@pytest.mark.release
def test_the_wheel_installs_into_an_empty_environment_and_trains(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    programs, elsewhere = tmp_path / "venv" / "bin", tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = programs / "python"
    paths = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(succeed(python, "-c", paths, folder=elsewhere).strip())
    share_torch(site_packages)
    pip = (python, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt")

    # The library alone. `make release` built the wheel from the source archive beside it.
    (wheel,) = ROOT.glob(f"dist/megatron_zpp-{megatron_zpp.__version__}-*.whl")
    succeed(*pip, wheel, folder=elsewhere)
    assert (site_packages / "megatron_zpp" / "zeropp" / "wire" / "_kernels.so").exists()
    for package in ("numpy", "rich", "sentencepiece"):
        call(python, "-c", f"import {package}", folder=elsewhere, status=1)
    found = succeed(python, "-c", "import megatron_zpp.zeropp as it; print(it.__file__)", folder=elsewhere)
    assert Path(found.strip()).is_relative_to(site_packages)
    assert "encode on cpu" in succeed(programs / "megatron-zpp", "env", folder=elsewhere)
    (snippet,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (elsewhere / "demo.py").write_text(snippet)
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "demo.py")
    sent = re.findall(r"step \d: rank 0 sent ([\d.]+) MB", succeed(python, *words, folder=elsewhere))
    assert len(sent) == 3 and float(sent[2]) < 0.4 * 4.2  # 4.2 million weights; rank 0 sends 0.27 bytes for each
    diagnosis = call(programs / "megatron-zpp", "doctor", folder=elsewhere, status=1).stdout
    assert "LOOK  trainer's packages  without numpy, rich, sentencepiece: install the extra train" in diagnosis
    refused = call(programs / "megatron-zpp", "pretrain-gpt", "--help", folder=elsewhere, status=2)
    assert "pip install numpy rich sentencepiece" in refused.stderr

    # The trainer, without a GPU and outside of any checkout.
    succeed(*pip, f"{wheel}[train]", folder=elsewhere)
    listed = succeed(programs / "megatron-zpp", "--help", folder=elsewhere)
    assert re.search(r"^  plan  ", listed, re.MULTILINE)
    torchrun = (python, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    log = succeed(*torchrun, "-m", "megatron_zpp", "pretrain-gpt", *TINY.split(), folder=elsewhere)
    assert "iteration        3/       3" in log and "lm loss value" in log
