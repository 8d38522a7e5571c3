"""Start and end the process group, report errors from all ranks together, and agree on signals to stop."""

import atexit
import ctypes
import errno
import json
import math
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megatron_zpp.errors import messages_of
from megatron_zpp.zeropp.fsdp import find_units
from megatron_zpp.zeropp.fsdp.topology import gather_objects

from . import staged_backend
from .flight_record import last_collective, write_record

T = TypeVar("T")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDS_TO_LEAVE = 4.0
SECONDS_OF_TORCHRUN = 60.0  # that it takes to end after a rank has: it gives the others 30
SECONDS_OF_ONE_CTRL_C = 2.0  # ranks get one Ctrl-C twice within it: from the terminal and from torchrun
SECONDS_FOR_THE_CAUSE = 3.0  # that ranks which lost a peer wait, so that torchrun sees first who died


class FailedTogether(Exception):  # noqa: N818 - not an error of its own: it carries one that was reported already
    """Some rank met a user's error; rank 0 has reported it. Its arguments are the messages."""


def init_distributed(backend: str | None, timeout_minutes: float, local_ranks: int | None = None) -> torch.device:
    """Join the process group that torchrun describes, or be its only rank without torchrun; returns the device.

    backend: default NCCL where this rank has a GPU, gloo elsewhere. local_ranks: ranks that ``--local-ranks`` started
    here; where they outnumber the GPUs they share them, through ``staged_backend``.
    Raises ValueError where torchrun's variables are incomplete, and without enough GPUs.
    """
    world_size = ranks_of_environment()
    os.environ.setdefault("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world_size > 1 and missing:
        raise ValueError(f"WORLD_SIZE is {world_size}, but {', '.join(missing)} not set: start the ranks with torchrun")
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")

    device = device_of_rank(backend, local_ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise DeviceMesh chooses card LOCAL_RANK, which may not exist
        if local_ranks is not None and local_ranks > torch.cuda.device_count():
            backend = staged_backend.NAME
            staged_backend.register()
    timeout = timedelta(minutes=timeout_minutes)
    store: dist.Store
    try:
        if world_size == 1 and missing:
            store, rank = dist.HashStore(), 0  # alone: no port to collide on
        else:
            store, rank, world_size = _launchers_store(timeout)
        # Without device_id: with it NCCL makes every group by splitting the default one, which all ranks must call, and
        # ZeRO++ makes groups of nodes among their members alone (a pipeline stage may have experts, others none).
        dist.init_process_group(
            backend or ("nccl" if device.type == "cuda" else "gloo"),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except dist.DistStoreError as error:
        late = f"rank {os.environ['RANK']} waited {timeout.total_seconds():.0f} s for the other ranks to start"
        raise TimeoutError(
            f"{late}: look at their output, and if they only start late, raise --distributed-timeout-minutes"
        ) from error
    return device


def device_of_rank(backend: str | None, local_ranks: int | None = None) -> torch.device:
    """Return this rank's device. Raises ValueError without enough GPUs, which ``local_ranks`` may share."""
    use_cuda = torch.cuda.is_available() and backend != "gloo"
    if backend == "nccl" and not use_cuda:
        raise ValueError("--distributed-backend nccl needs a GPU, and torch sees none; use gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda and local_ranks is not None and local_ranks > torch.cuda.device_count():
        shares = f"--local-ranks {local_ranks} share {torch.cuda.device_count()} GPU(s), which NCCL refuses"
        if backend == "nccl":
            raise ValueError(f"{shares}: leave --distributed-backend out, or start as many ranks as GPUs")
        return torch.device("cuda", device.index % torch.cuda.device_count())
    if use_cuda and device.index >= torch.cuda.device_count():
        none = f"local rank {device.index} has no GPU, this machine has {torch.cuda.device_count()}"
        raise ValueError(f"{none}: start as many ranks as GPUs, or give --distributed-backend gloo")
    return device


def _launchers_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the launcher's key-value store, this rank, and the number of ranks; RANK etc. must be set. Collective.

    An agent of torchrun may keep one store for all restarts (pytorch issue 135712), in which ranks would find the
    addresses of their dead predecessors. So each restart has a prefix. Agents of several nodes count restarts apart:
    raises ValueError unless they make a store for each restart.
    """
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if is_kept and may_restart and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ValueError(
            "--max-restarts on several nodes needs a store for each restart: export "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes, and give torchrun --rdzv-backend c10d"
        )
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        place = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), place) from error
    if is_kept:
        # Nodes that join (--nnodes 1:2) start all ranks again, and count as no restart.
        start = (os.environ.get(name, "") for name in ("TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"))
        store = dist.PrefixStore("/".join(start), store)
    return store, rank, world_size


def wait_for_all_ranks(device: torch.device) -> None:
    """Return when all ranks have called this. ``device``: of this rank, which NCCL would guess by its number."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def ranks_of_environment() -> int:
    """Return WORLD_SIZE, or 1. Raises ValueError unless torchrun's variables are numbers that fit together."""
    world_size = 1
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if (text := os.environ.get(name)) is None:
            continue
        smallest = 0 if name in ("RANK", "LOCAL_RANK") else 1
        limits = {"WORLD_SIZE": 2**31 - 1, "MASTER_PORT": 65535, "LOCAL_WORLD_SIZE": world_size}
        largest = limits.get(name, world_size - 1)
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and smallest <= int(text) <= largest):
            wrong = f"{name} in the environment must be a whole number from {smallest} to {largest}, is {text!r}"
            raise ValueError(f"{wrong}: start the ranks with torchrun, or unset it for a single one")
        if name == "WORLD_SIZE":
            world_size = int(text)
    return world_size


def gather_if_any(local: T | None, group: dist.ProcessGroup | None = None) -> list[T | None]:
    """Gather as ``gather_objects`` does; if every rank passed None, return [] after one all-reduce. Collective.

    Gathering objects from W ranks costs each of them O(W), also where none has anything to report.
    """
    device = dist.distributed_c10d._get_object_coll_device(group)
    has_any = torch.tensor(int(local is not None), device=device)
    dist.all_reduce(has_any, op=dist.ReduceOp.MAX, group=group)
    return gather_objects(local, group) if has_any.item() else []


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Stop all ranks with one report, by FailedTogether, if a user's error stops any in this block."""
    error: tuple[str, ...] | None = None
    try:
        yield
    except (ValueError, OSError, ImportError) as caught:
        error = messages_of(caught)
    errors = gather_if_any(error)
    first = next(((rank, texts) for rank, texts in enumerate(errors) if texts is not None), None)
    if first is not None:
        rank, texts = first
        where = "" if all(texts == other for other in errors) else f"rank {rank}: "
        report_error(*(where + text for text in texts))
        raise FailedTogether(*texts)


def is_first_rank() -> bool:
    """Return whether this process is rank 0 by the environment; works before ranks have met."""
    return os.environ.get("RANK", "0") == "0"


def print_once(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def report_error(*texts: str) -> None:
    """Print each error as one line on stderr, on rank 0 alone."""
    if is_first_rank():
        for text in texts:
            print("error: " + " ".join(text.split()), file=sys.stderr, flush=True)


def exit_together(status: int, texts: Sequence[str]) -> NoReturn:
    """Exit on all ranks for what rank 0 has reported; under torchrun with ``status`` on the first rank of each node.

    torchrun's own report has seven lines for each rank that failed, and repeats ``texts`` near its end.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _report_behind_torchrun(texts)
        if os.environ["LOCAL_RANK"] != "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it if the first rank has ended before
            sys.exit(0)
        if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
            message = {"message": "; ".join(texts), "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": message}))
    sys.exit(status)


def _report_behind_torchrun(texts: Sequence[str]) -> None:
    """Repeat errors below torchrun's traceback, from a process of rank 0 that waits until torchrun has ended."""
    is_last_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TORCHELASTIC_MAX_RESTARTS"]
    if not (is_first_rank() and is_last_start):
        return
    agent = os.pidfd_open(os.getppid())
    if os.fork() == 0:
        try:
            os.setsid()  # a terminal's Ctrl-C and torchrun's signals are for the rank
            os.closerange(3, agent)  # the rank's connections end with it
            os.closerange(agent + 1, 2**16)
            select.select([agent], [], [], SECONDS_OF_TORCHRUN)
            os.write(2, "".join(f"error: {text}\n" for text in texts).encode())
        finally:
            os._exit(0)


def exit_process(status: int) -> NoReturn:
    """End a program whose ranks communicated, with what ``sys.exit`` does but for taking the interpreter down.

    A thread of gloo that frees a last tensor while the interpreter goes down aborts the process (seen in torch 2.13).
    """
    # They may wait for children that never end, such as data workers of a loader that failed halfway.
    exit_functions = Thread(target=atexit._run_exitfuncs, daemon=True)
    exit_functions.start()
    exit_functions.join(SECONDS_TO_LEAVE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def die(error: BaseException) -> NoReturn:
    """End this process after an error that is no user's, on whatever rank it came first: status 1, and no hang.

    Says which rank and host, in which collective of which FSDP unit; torchrun repeats that at the end of the log.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to save: go when torchrun says so
    rank, where = os.environ.get("RANK", "0"), collective_of(error)
    text = f"rank {rank} on {socket.gethostname()} failed" + (f" in {where}" if where else "")
    # At once, so that it stands in the log even if this process is ended while it waits.
    print(f"error: {text}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    write_record(where)
    if _is_of_communication(error) and "imed out" not in str(error):
        time.sleep(SECONDS_FOR_THE_CAUSE)
    error.add_note(text)
    traceback.print_exception(error)
    try:
        get_error_handler().record_exception(error)  # for torchrun's summary
    except OSError:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # threads that wait for a dead peer would keep sys.exit waiting


def _is_of_communication(error: BaseException) -> bool:
    return re.search(r"[Cc]onnection|Broken pipe|[Ss]ocket|gloo|NCCL", str(error)) is not None


def collective_of(error: BaseException) -> str | None:
    """Name the collective that failed, as "the all-gather of layers.3", or another one and its caller; else None."""
    caller = collective = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if (of_fsdp := find_units.collective_of(frame)) is not None:
            return of_fsdp
        if name in ("_wait_batch_p2p", "wait_for_neighbour"):  # torch's, and the evaluation's
            return "the exchange with a neighbouring pipeline stage"
        if file.endswith("distributed_c10d.py") and name != "wrapper":
            collective = collective or name
        elif collective is None and "megatron_zpp" in file:
            caller = f"{name} ({os.path.basename(file)}:{line})"
    if collective is None and _is_of_communication(error):
        collective = last_collective()  # tensor parallelism waits in torch's operators, whose frames name none
    return f"{collective} of {caller}" if collective else None


class CtrlC:
    """Passes Ctrl-C to the handler of ``StopSignals`` once there is one; ends this process before, and at a second one.

    Rank 0 prints a line about each. A thread waits for them: Python's own handler waits for a collective to return, and
    prints a traceback on every rank.
    """

    def __init__(self) -> None:
        """``describe``, which the run sets, says what is saved."""
        self.describe = lambda: "before the run began: nothing is saved"
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # threads inherit that, this one's among them
            Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        asked_at, end_by = math.inf, ctypes.CDLL(None).signal  # Python's own is for the main thread alone
        while True:
            signal.sigwait({signal.SIGINT})
            handler, now = signal.getsignal(signal.SIGINT), time.monotonic()
            if not callable(handler) or now - asked_at >= SECONDS_OF_ONE_CTRL_C:
                break
            if asked_at == math.inf:
                asked_at = now
                handler(signal.SIGINT, None)
                end_by(signal.SIGTERM, 0)  # as which torchrun passes on a second Ctrl-C
                self._print("Ctrl-C: saving and stopping, after the step at hand; another one ends the run at once")
        self._print(f"interrupted {self.describe()}")
        if ranks_of_environment() > 1:
            time.sleep(0.3)  # until the other ranks know: they would report a lost connection
        end_by(signal.SIGINT, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.kill(os.getpid(), signal.SIGINT)  # again, for this thread

    @staticmethod
    def _print(text: str) -> None:
        if is_first_rank():
            print(text, file=sys.stderr, flush=True)


class StopSignals:
    """Whether a signal asked this rank to save and stop.

    A signal reaches one rank, or each at another moment. So no rank acts alone: all agree at points that all pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.are_caught = self.is_asked = False

    def catch(self, numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        """Remember these signals from now on. Before this call they end the process."""
        if not self.are_caught:
            self.are_caught = True
            for number in numbers:
                signal.signal(number, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.is_asked = True

    def agree(self) -> bool:
        """Return whether any rank was asked. Collective, and free where no rank catches signals."""
        if not self.are_caught:
            return False
        asked = torch.tensor(float(self.is_asked), device=self.device)
        dist.all_reduce(asked)
        return asked.item() > 0
