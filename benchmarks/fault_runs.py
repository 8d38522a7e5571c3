"""Starts of the training program on local ranks, for ``lifecycle_fuzz.py``: how they are hit, and how they end.

Ranks are forked from one process that has imported torch, which takes the place of torchrun: it ends the others a while
after one has died.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PATIENCE = 180.0  # seconds after which a run counts as hung
GRACE = 30.0  # seconds in which all ranks must be gone after one has failed, as torchrun does it
STEP = "rank 0 begins a step\n"  # in the output
context = multiprocessing.get_context("forkserver")


def preload(*more: str) -> None:
    """Import torch, the program and ``more`` once: ranks are forked from there."""
    program = ("torch._dynamo", "torch.distributed.fsdp", "megatron_zpp.commands.pretrain")
    context.set_forkserver_preload([*program, *more])


@dataclass
class Result:
    """How one start of the program ended."""

    codes: list[int | None]  # exit status per rank; None: it had to be killed
    output: str

    @property
    def hung(self) -> bool:
        return None in self.codes

    @property
    def well(self) -> bool:
        return set(self.codes) == {0}


class Run:
    """Ranks of one start of the program, with their output in one file."""

    def __init__(self, argv: list[str], ranks: int) -> None:
        self.file = tempfile.NamedTemporaryFile(prefix="output", suffix=".log")  # noqa: SIM115
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        more = (ranks, port, argv, self.file.name)
        self.processes = [context.Process(target=_rank, args=(rank, *more)) for rank in range(ranks)]
        for process in self.processes:
            process.start()

    def output(self) -> str:
        return Path(self.file.name).read_text(errors="replace")

    def is_over(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)

    def wait_for(self, text: str, times: int = 1) -> bool:
        deadline = time.monotonic() + PATIENCE
        while self.output().count(text) < times and time.monotonic() < deadline and not self.is_over():
            time.sleep(0.005)
        return self.output().count(text) >= times

    def hit(self, rank: int, number: signal.Signals, after: float) -> bool:
        """Send a signal after some seconds, and return whether the rank was still there."""
        time.sleep(after)
        process = self.processes[rank]
        if process.exitcode is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            return True
        return False

    def wait(self) -> Result:
        """Until all ranks have ended. As torchrun does, ask the others to end, by SIGTERM, when one has failed."""
        deadline = time.monotonic() + PATIENCE
        asked = False
        while not self.is_over() and time.monotonic() < deadline:
            if not asked and any(process.exitcode not in (None, 0) for process in self.processes):
                asked, deadline = True, time.monotonic() + GRACE
                for process in self.processes:
                    process.terminate()
            time.sleep(0.005)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return Result(codes, self.output())


def _rank(rank: int, ranks: int, port: int, argv: list[str], output: str) -> None:
    """What torchrun and ``python pretrain_gpt.py`` do, on one rank."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.argv = ["pretrain_gpt.py", *argv]
    from megatron_zpp.commands.pretrain import pretrain
    from megatron_zpp.families import GPT
    from megatron_zpp.training import pretrain as program

    def announced_step(*arguments: Any, **more: Any) -> Any:
        if rank == 0:
            os.write(1, STEP.encode())
        return train_step(*arguments, **more)

    train_step, program.train_step = program.train_step, announced_step  # type: ignore[assignment]
    pretrain(GPT)
