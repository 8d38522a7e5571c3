"""What several test files share: the quickstart, run once on little text and for few steps, and environments."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.warm_python import programs

ROOT = Path(__file__).parents[1]
torch.set_num_threads(1)  # as ranks have: there is a worker for each processor, and threads of several would only wait


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Undo what a test sets for its process group (RANK and so on), which would make later ones ranks of it."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a dataset of text in bytes."""
    from tests.training.small_run import write_text

    return write_text(tmp_path_factory.mktemp("data"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB, which a test may fill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk]).returncode:
        pytest.skip("needs root, to mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on a disk; return the file that takes it."""
    filler = disk / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


@dataclass(frozen=True)
class Quickstart:
    folder: Path  # stands for the repository's root: its subfolder runs/quickstart holds the results
    output: str  # what the user saw


def environment(**more: str) -> dict[str, str]:
    """The environment of a user who has activated the tests' virtual environment; python and torchrun are warm."""
    path = os.pathsep.join([str(programs()), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | more


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of this name, which the worker that needs it first makes; the others wait for it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, made = shared / name, shared / f"{name}.made"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder.mkdir(exist_ok=True)  # a worker that failed may have made it
            make(folder)
            made.touch()
    return folder


@pytest.fixture(scope="session")
def quickstart_of_all(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """The quickstart, run once for all workers."""

    def make(folder: Path) -> None:
        results = folder / "runs" / "quickstart"
        small = environment(OUT=str(results), MEGABYTES="1", VOCAB_SIZE="500", TRAIN_ITERS="3", EVAL_ITERS="1")
        script = ROOT / "examples" / "quickstart" / "run.sh"
        done = subprocess.run([script], env=small, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "printed.txt").write_text(done.stdout)

    folder = once(tmp_path_factory, "quickstart", make)
    return Quickstart(folder, (folder / "printed.txt").read_text())


@pytest.fixture
def quickstart(quickstart_of_all: Quickstart, tmp_path: Path) -> Quickstart:
    """A copy of its results, to work in."""
    shutil.copytree(quickstart_of_all.folder, tmp_path / "quickstart")
    return Quickstart(tmp_path / "quickstart", quickstart_of_all.output)


@pytest.fixture(scope="session")
def namespaces_allowed() -> None:
    """Skips where there can be no network namespaces: some containers forbid them even to root."""
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need Linux, root and iproute2")
    name = f"mzpp-probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"this machine allows no network namespaces: {made.stderr.strip()}")
