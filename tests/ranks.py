"""Runs a function on W real gloo ranks, one process each, and returns what each rank returned.

The processes are forked from a server that has imported torch once, so that starting eight of them takes a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "megatron_zpp.training.pretrain"]
)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh gloo group; raise RuntimeError on an error or a hang."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_run_rank, args=(rank, world_size, folder, sender, function, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            answers = [_answer(rank, pipe, timeout) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [f"rank {rank} failed:\n{error}" for rank, (_, error) in enumerate(answers) if error is not None]
    if errors:
        # One rank's failure closes the others' connections: the cause is the one that is not about that.
        raise RuntimeError(min(errors, key=lambda error: "Connection closed by peer" in error))
    return [value for value, _ in answers]


def _answer(rank: int, pipe: Any, timeout: float) -> tuple[Any, str | None]:
    """What a rank returned, or its error."""
    if not pipe.poll(timeout):
        return None, f"rank {rank} did not answer within {timeout} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, f"rank {rank} died without a message"


def _run_rank(rank: int, world_size: int, folder: str, sender: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
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
