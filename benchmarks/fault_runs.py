"""Starts of the training program on local ranks, for the fault campaign: how they are hit, and how they end.

Ranks are forked from one process that has imported torch, which takes the place of torchrun: it ends the others a while
after one has died.
"""

import contextlib
import importlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

RANKS, NODES = 4, 2
ITERATIONS = 12
PATIENCE = 180.0  # seconds after which a run counts as hung
GRACE = 30.0  # seconds in which all ranks must be gone after one has failed, as torchrun does it
SETTINGS = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --global-batch-size 4 --train-iters {ITERATIONS} --lr 3e-3 --log-interval 1 --eval-interval 5 --eval-iters 8
    --num-workers 0 --tokenizer-type ByteTokenizer --split 90,5,5 --exit-signal-handler
    --distributed-timeout-minutes 0.3 --zeropp-ranks-per-node 2 --zero-quantized-gradients --zeropp-loco
    --zero-quantized-weights --zero-hpz-partition-size 2 --zeropp-weight-moves --save-keep-last 3"""
# Where a run can be hit: the module's function that does it.
PLACES = {
    "building the index": ("megatron_zpp.data.index_cache", "_build"),
    "load": ("megatron_zpp.training.setup", "_load"),
    "step": ("megatron_zpp.training.pretrain", "train_step"),
    "encoding of moved codes": ("megatron_zpp.zeropp.gather.all_gather", "measure_moves"),
    "applying of moved codes": ("megatron_zpp.zeropp.gather.all_gather", "apply_moves"),
    "evaluation": ("megatron_zpp.training.evaluate", "evaluate"),
    "evaluated micro-batch": ("megatron_zpp.training.evaluate", "_sum_and_count"),
    "save": ("megatron_zpp.checkpoint.saver", "checkpoint_state"),
}
context = multiprocessing.get_context("forkserver")


def preload(*more: str) -> None:
    """Import torch, the program and ``more`` once: ranks are forked from there."""
    program = ("torch._dynamo", "torch.distributed.fsdp", "megatron_zpp.commands.pretrain")
    context.set_forkserver_preload([*program, *more])


@dataclass
class Result:
    """How one start of the program ended."""

    codes: list[int | None]  # of each rank; None: it had to be killed
    output: str
    seconds: float  # since the start
    seconds_after_hit: float | None

    @property
    def hung(self) -> bool:
        return None in self.codes

    @property
    def well(self) -> bool:
        return set(self.codes) == {0}

    def failed_with(self, code: int) -> bool:
        """Whether all ranks ended with a code, or were asked to end while they did because another one had."""
        return {code} <= set(self.codes) <= {code, -signal.SIGTERM}


class Run:
    """Ranks of one start of the program, with their output in one file.

    ``slow``: seconds more for what is done in a place. ``nan_from``: the step before which parameters become NaN.
    """

    def __init__(
        self, argv: list[str], slow: Mapping[str, float] = {}, nan_from: int | None = None, ranks: int = RANKS
    ) -> None:
        self.file = tempfile.NamedTemporaryFile(prefix="output", suffix=".log")  # noqa: SIM115
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        self.begun = time.monotonic()
        self.hit_at: float | None = None
        more = (ranks, port, argv, self.file.name, slow, nan_from)
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

    def hit(self, rank: int, number: signal.Signals, after: float) -> str | None:
        """Send a signal after so many seconds, and say what the rank was doing; None if it had ended."""
        time.sleep(after)
        output, process = self.output(), self.processes[rank]
        if process.exitcode is not None:
            return None
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        self.hit_at = time.monotonic()
        places = [place for place in PLACES if output.count(enters(rank, place)) > output.count(_leaves(rank, place))]
        if output.count("while training goes on") > output.count("successfully saved"):
            places.append("save in the background")
        steps = output.count(_leaves(rank, "step"))
        return f"{steps} steps done" + "".join(
            f", in the {place}" for place in places if place not in ("step", "evaluated micro-batch")
        )

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
        now = time.monotonic()
        return Result(codes, self.output(), now - self.begun, now - self.hit_at if self.hit_at is not None else None)


def enters(rank: int, place: str) -> str:
    """What a rank writes when it comes to a place."""
    return f"rank {rank} enters: {place}\n"


def _leaves(rank: int, place: str) -> str:
    return f"rank {rank} leaves: {place}\n"


def _rank(
    rank: int,
    ranks: int,
    port: int,
    argv: list[str],
    output: str,
    slow: Mapping[str, float],
    nan_from: int | None,
) -> None:
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

    def spoiled_step(run: Any, *arguments: Any, **more: Any) -> Any:
        if run.counters.iteration == nan_from:
            for parameter in run.model.parameters():
                parameter.data.to_local().fill_(math.nan)
        return train_step(run, *arguments, **more)

    train_step, program.train_step = program.train_step, spoiled_step  # type: ignore[assignment]
    for place, (module, name) in PLACES.items():
        owner = importlib.import_module(module)
        setattr(owner, name, partial(_announced, getattr(owner, name), rank, place, slow.get(place, 0.0)))
    pretrain(GPT)


def _announced(function: Any, rank: int, place: str, seconds: float, *arguments: Any, **more: Any) -> Any:
    os.write(1, enters(rank, place).encode())
    time.sleep(seconds)
    result = function(*arguments, **more)
    os.write(1, _leaves(rank, place).encode())
    return result
