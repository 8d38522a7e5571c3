"""A run small enough for a test: its data, its flags, and the trainer called in this process, its metrics recorded."""

import argparse
import contextlib
import gc
import io
import os
import random
import re
import secrets
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.commands.pretrain import pretrain
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.families import Architecture, load_architecture
from megatron_zpp.settings.groups import flags_by_name
from megatron_zpp.training.data import batches_of
from megatron_zpp.training.pretrain import train
from megatron_zpp.training.setup import build_trainer
from megatron_zpp.training.step import train_step
from megatron_zpp.training.trainer import StepStats, Trainer
from tests.warm_python import programs

ROOT = Path(__file__).parents[2]
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --make-vocab-size-divisible-by 32"
RUN = "--micro-batch-size 1 --global-batch-size 8 --lr 3e-3 --log-interval 1 --eval-iters 1"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
flags_by_name()  # are read once, before ranks are forked from a process that has imported this

Metrics = dict[str, list[float]]  # every value that was written under a key, in order


def write_text(folder: Path) -> str:
    """Python sources in bytes, as a dataset for ByteTokenizer; returns its prefix."""
    prefix = str(folder / "text")
    sources = [Path(module.__file__).read_bytes() for module in (argparse, random, textwrap)]
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for paragraph in b"".join(sources).split(b"\n\n"):
            writer.add_document([[*paragraph, 256]])
    return prefix


def flags(data: str, *more: str, length: str = "--train-iters 8") -> list[str]:
    """A complete command line; what stands in ``more`` wins over what stands here."""
    words = f"{SHAPE} {RUN} {length} --num-workers 0 --tokenizer-type ByteTokenizer --data-path {data}"
    return f"{words} {' '.join(more)}".split()


class Recorder:
    """Stands where TensorBoard and wandb do, and keeps every metric exactly."""

    def __init__(self) -> None:
        self.metrics: Metrics = {}

    def write(self, metrics, iteration, consumed_samples) -> None:
        for key, value in metrics.items():
            self.metrics.setdefault(key, []).append(value)

    def close(self) -> None:
        pass


def start(argv: list[str], architecture: str | Architecture = "gpt", device: str = "cpu") -> tuple[Trainer, Metrics]:
    """Build what ``argv`` describes in the process group at hand."""
    if isinstance(architecture, str):
        architecture = load_architecture(architecture)
    settings = parse_settings(architecture, argv, dist.get_world_size(), note=lambda text: None)
    run = build_trainer(architecture, settings, torch.device(device))
    run.writers = recorder = Recorder()
    return run, recorder.metrics


def train_quietly(run: Trainer, out: io.StringIO | None = None) -> str:
    """Train; return what was printed, on ``out``."""
    with contextlib.redirect_stdout(out or io.StringIO()) as out:
        train(run, time.monotonic())
    return out.getvalue()


def log_lines(text: str) -> list[dict[str, float]]:
    """The numbers of each line of the log, by name."""
    lines = []
    for iteration, total, rest in re.findall(r"iteration +(\d+)/ *(\d+) (\|.*)", text):
        values = re.findall(r"([^|:]+): +([-+.\deE]+|nan|inf) \|", rest)
        numbers = {name.strip(" |"): float(value) for name, value in values}
        lines.append({"iteration": float(iteration), "train iterations": float(total)} | numbers)
    return lines


def take_step(run: Trainer, first_sample: int = 0, num_micro_batches: int = 2, change: Any = None) -> StepStats:
    """One optimizer step on the samples from ``first_sample`` on. change: of each batch."""
    batches = batches_of(run, "train", first_sample)
    assert batches is not None
    return train_step(run, map(change, batches) if change else batches, num_micro_batches, stop=False)


def train_each(runs: dict[str, list[str]], architecture: str = "gpt", device: str = "cpu") -> dict[str, Metrics]:
    """Train one command line after the other; each one's metrics, by its key. For ``run_ranks``."""
    results = {}
    for name, argv in runs.items():
        run, results[name] = start(argv, architecture, device)
        train_quietly(run)
        del run
        gc.collect()  # a model and its hooks hold each other
    return results


def torchrun(
    ranks: int,
    argv: list[str],
    script: str = "pretrain_gpt.py",
    launcher: Sequence[str] = (),
    *,
    warm: bool = True,
    **environment: str,
) -> subprocess.Popen:
    """The program as a user starts it; ranks 0: by python alone. ``launcher``: more flags of torchrun.

    ``warm``: torchrun and its ranks are forked from a process that has imported torch.
    """
    command = [str(programs() / "python") if warm else sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *launcher]
    return subprocess.Popen(
        [*command, str(ROOT / script), *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1", "JOB_OF_TEST": secrets.token_hex(8)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen, status: int = 0, timeout: float = 280) -> tuple[str, str]:
    """Stdout and stderr of a program, which must end with ``status``."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == status, f"{out}{err}"
    return out, err


def ranks_of(torchrun: subprocess.Popen) -> list[int]:
    """Process ids of the ranks that ``torchrun`` runs, in order. What is warm is no child of torchrun's."""
    job, found = _environment_of(torchrun.pid)["JOB_OF_TEST"], {}
    for process in sorted((int(path.name) for path in Path("/proc").glob("[0-9]*")), reverse=True):
        with contextlib.suppress(OSError):
            environment = _environment_of(process)
            if environment.get("JOB_OF_TEST") == job and "LOCAL_RANK" in environment:
                found[int(environment["LOCAL_RANK"])] = process  # the first of those that it forks
    return [found[rank] for rank in sorted(found)]


def _environment_of(process: int) -> dict[str, str]:
    entries = Path(f"/proc/{process}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def wait_for_iteration(process: subprocess.Popen, iteration: int) -> None:
    assert any(f"iteration {iteration:8d}/" in line for line in iter(process.stdout.readline, ""))


def call_pretrain(
    *argvs: list[str], architecture: str = "gpt", folder: str = ".", port: int | None = None
) -> list[tuple[Any, str, str]]:
    """Exit code, stdout and stderr of the whole program on this rank, for each command line. For ``run_ranks``.

    port: Where several ranks meet.
    """
    dist.barrier()  # a rank that leaves early would take the others' store along
    dist.destroy_process_group()  # the program makes its own
    os.chdir(folder)
    if port is not None:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    results = []
    for argv in argvs:
        sys.argv = [f"pretrain_{architecture}.py", *argv]
        code: Any = 0
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                pretrain(load_architecture(architecture))
            except SystemExit as exit_:
                code = exit_.code
        results.append((code, out.getvalue(), err.getvalue()))
    return results
