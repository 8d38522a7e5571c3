"""Starting and ending the process group, and errors that all ranks report together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


class FailedTogether(Exception):  # noqa: N818 - not an error of its own: it carries one that was reported already
    """Some rank met a user's error; rank 0 has reported it."""


def init_distributed(backend: str | None, timeout_minutes: float) -> torch.device:
    """Join the process group that torchrun describes, or be its only rank without torchrun; returns the device.

    backend: default NCCL where this rank has a GPU, gloo elsewhere.
    Raises ValueError where torchrun's variables are incomplete, and without enough GPUs.
    """
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    world_size = int(os.environ.setdefault("WORLD_SIZE", "1"))
    if world_size > 1 and missing:
        raise ValueError(f"WORLD_SIZE is {world_size}, but {', '.join(missing)} not set: start the ranks with torchrun")
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")
    store = dist.HashStore() if world_size == 1 and missing else None  # alone: no port to collide on

    use_cuda = torch.cuda.is_available() and backend != "gloo"
    if backend == "nccl" and not use_cuda:
        raise ValueError("--distributed-backend nccl needs a GPU, and torch sees none; use gloo")
    device = torch.device("cpu")
    if use_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {device.index} has no GPU, this machine has {torch.cuda.device_count()}: "
                "start as many ranks as GPUs, or give --distributed-backend gloo"
            )
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend or ("nccl" if use_cuda else "gloo"),
        store=store,
        rank=0 if store is not None else -1,
        world_size=1 if store is not None else -1,
        timeout=timedelta(minutes=timeout_minutes),
        device_id=device if use_cuda else None,
    )
    return device


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Wrap work that needs no communication: if a user's error stops any rank, it stops all, with one report.

    Raises FailedTogether on every rank.
    """
    error = None
    try:
        yield
    except (ValueError, OSError, ImportError) as caught:
        error = str(caught)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next(((rank, text) for rank, text in enumerate(errors) if text is not None), None)
    if first is not None:
        rank, text = first
        assert text is not None
        report_error(text if all(text == other for other in errors) else f"rank {rank}: {text}")
        raise FailedTogether


def report_error(text: str) -> None:
    """Print an error as one line on stderr, on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print("error: " + " ".join(text.split()), file=sys.stderr, flush=True)
