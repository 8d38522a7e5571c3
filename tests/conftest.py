"""What several test files share: the quickstart, run once on little text and for few steps."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Quickstart:
    folder: Path  # stands for the repository's root: its subfolder runs/quickstart holds the results
    output: str  # what the user saw


def environment(**more: str) -> dict[str, str]:
    """The environment of a user who has activated the virtual environment that the tests run in."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | more


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    folder = tmp_path_factory.mktemp("quickstart")
    results = folder / "runs" / "quickstart"
    small = environment(OUT=str(results), MEGABYTES="1", VOCAB_SIZE="500", TRAIN_ITERS="3")
    script = ROOT / "examples" / "quickstart" / "run.sh"
    done = subprocess.run([script], env=small, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return Quickstart(folder, done.stdout)
