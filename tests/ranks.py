"""Runs a function on W real gloo ranks, one process each, and returns what each rank returned.

The processes are forked from a server that has imported torch once, so that starting eight of them takes a moment.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# For ranks that are forked: torch.cuda.is_available() must not start CUDA, nor see for ever what it saw first.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "megatron_zpp.commands.pretrain"),
        *("pytest", "tests.training.small_run"),  # which a rank imports to find the test's function
        "torch.distributed.launcher.api",  # torchrun
    ]
)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh gloo group; raise RuntimeError on an error or a hang."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = FORKSERVER.Pipe(duplex=False)
            process = FORKSERVER.Process(
                target=_run_rank, args=(rank, world_size, folder, sender, timeout, function, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            answers = [
                _answer(rank, pipe, process, timeout, _report(folder, rank))
                for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True))
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [f"rank {rank} failed:\n{error}" for rank, (_, error) in enumerate(answers) if error is not None]
    if errors:
        # One rank's failure closes the others' connections: the cause is the one that is not about that.
        raise RuntimeError(
            min(errors, key=lambda error: re.search("Connection (closed|reset) by peer", error) is not None)
        )
    return [value for value, _ in answers]


def run_in_turn(
    world_size: int, functions: Mapping[str, Callable[[], Any]], timeout: float = 240.0
) -> dict[str, list[Any]]:
    """Call functions one after another on the same ranks, which start once; by name, what each rank returned."""
    results = run_ranks(world_size, _call_each, functions, timeout=timeout)
    return {name: [of_rank[name] for of_rank in results] for name in functions}


def _call_each(functions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: function() for name, function in functions.items()}


def free_port() -> int:
    """One that nothing listens on, and that no outgoing connection is given before someone does."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)  # below what Linux gives out by itself
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port


def _answer(rank: int, pipe: Any, process: Any, timeout: float, report: Path) -> tuple[Any, str | None]:
    """What a rank returned, or its error."""
    if not pipe.poll(timeout):
        return None, f"rank {rank} did not answer within {timeout} s\n{report.read_text()}"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(10)
        return None, f"rank {rank} died without a message, with exit status {process.exitcode}"


def _die_with_parent() -> None:
    """Have the kernel kill this process when the server ends, as it does when the tests are killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _report(folder: str, rank: int) -> Path:
    """The file that says where a rank was when its time was nearly over."""
    return Path(folder) / f"rank{rank}.txt"


def _run_rank(
    rank: int, world_size: int, folder: str, sender: Any, timeout: float, function: Callable[..., Any], args: Any
) -> None:
    gc.freeze()  # or each collection would look at, and so copy, all that the server has imported
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # a loader's workers start as they do without this server
    _die_with_parent()
    faulthandler.dump_traceback_later(0.9 * timeout, file=open(_report(folder, rank), "w"))  # noqa: SIM115
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        # Plain pickle: multiprocessing's own would share tensors by descriptors that die with the process.
        sender.send_bytes(pickle.dumps((function(*args), None)))
    except Exception:
        sender.send_bytes(pickle.dumps((None, traceback.format_exc())))
        return  # closes this rank's connections, which fails the others at once
    signal.pause()  # until killed: another rank may still be connecting to this one
