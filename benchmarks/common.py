"""Read and write result files, format Markdown tables and run the trainer, for all benchmarks."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_zpp.metrics.history import METRICS, RunHistory, read_training

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
ALL_FLAGS = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"
# Rows of older commits have flags --zero-X that are --zeropp-X now, and one that the outer momentum of 0 says too.
NO_MOMENTUM = "--island-outer-optimizer sgd "
FORMER_FLAG = "--zero-(?=gradient-|hadamard|monitor-|ranks-per-node|scale-dtype|weight-(?!difference))"


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the program's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_choice(doc: str | None, programs: Mapping[str, Callable[[], object]]) -> None:
    """Run the function that the command line's only argument names."""
    parser = new_parser(doc)
    parser.add_argument("what", choices=programs)
    programs[parser.parse_args().what]()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file of JSON lines, with flags by their names of today; none if there is no file."""
    text = path.read_text().replace(NO_MOMENTUM, "") if path.exists() else ""
    text = re.sub(FORMER_FLAG, "--zeropp-", text)
    return [json.loads(line) for line in text.splitlines()]


def commit() -> str:
    """The checkout's commit, with "-dirty" where it has changes outside of results and pages.

    In a copy without git, what BENCHMARK_COMMIT says. A test refuses stored rows of unknown and of dirty commits.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCHMARK_COMMIT", "unknown")


# When the program starts: a measurement may take hours, in which the checkout moves on.
COMMIT_AT_START, LOAD_AT_START = commit(), round(os.getloadavg()[0], 2)


def origin() -> dict[str, Any]:
    """Describe the code, the command and the machine of a measurement: the fields that every stored row has."""
    import torch

    return {
        "commit": COMMIT_AT_START,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "torch": torch.__version__,
        "processor": processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "load": LOAD_AT_START,
    }


def processor() -> str:
    """The processor's model name, or its architecture where Linux does not say."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0] if names else platform.machine()


def append_row(path: Path | None, row: dict[str, Any]) -> None:
    """Append a row and its ``origin`` at once, because a measurement that takes hours may be cut off.

    What the row says itself stays: a program that starts others gives their command. None: no file.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row | origin() | row) + "\n")


def measure_once(path: Path, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
    """Measure and append a row with ``key``, unless the file has one; return the new row."""
    if any(key.items() <= row.items() for row in read_rows(path)):
        return None
    print(", ".join(f"{name} {value}" for name, value in key.items() if name != "command"), file=sys.stderr, flush=True)
    row = {**key, **measure()}
    append_row(path, row)
    return row


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Format a Markdown table, one line per row, without a newline at the end."""
    headings = list(headings)
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)])


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def run_trainer(
    flags: str,
    ranks: int | None = 4,
    program: str = "pretrain_gpt.py",
    root: Path = ROOT,
    cwd: Path | None = None,
    python: str = sys.executable,
    threads: int = 1,
) -> str:
    """Train with the checkout ``root`` and return what the program prints. ranks: None = without torchrun.

    Raises RuntimeError if it fails.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    done = subprocess.run(
        [python, *torchrun, str(root / program), *flags.split()],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program} {flags} in {root}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def run_measured(flags: str, ranks: int | None = 4, program: str = "pretrain_gpt.py", threads: int = 1) -> RunHistory:
    """Train, and return the metrics. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        run_trainer(f"{flags} --metrics-dir {folder}", ranks, program, threads=threads)
        return read_training(flags, Path(folder, METRICS))
