"""Save checkpoints while training goes on."""

import dataclasses
import functools
import sys
import time
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron_zpp.files import is_url
from megatron_zpp.settings.groups import CheckpointSettings

from .folder import FolderLock, discard, retain
from .staging import Stager
from .state import checkpoint_state, root_cause
from .storage import CachedPlanner, CheckpointWriter, Layout
from .trained import Trained, zeropp_layout


@dataclasses.dataclass
class _Pending:
    begun: float  # monotonic seconds
    stopped: float  # seconds that training waited so far
    future: Future[Any]
    writer: CheckpointWriter
    finished: float | None = None


class CheckpointSaver:
    """Saves in the folder of ``--save``, in the background or at once. Reports a failed save. Collective."""

    def __init__(self, settings: CheckpointSettings, timeout_minutes: float, lock: FolderLock | None) -> None:
        """settings: with ``--save``. lock: the job's lock on the folder, on rank 0."""
        assert settings.save is not None
        self.folder, self._asynchronous, self._lock = settings.save, not settings.no_async_save, lock
        self.saved_iteration: int | None = None  # the last one that is on the disk
        keep_last, interval = settings.save_keep_last, settings.save_retain_interval
        if keep_last is None and interval is not None:
            keep_last = 2  # one to go back to if the last is damaged
        self._delete_old = functools.partial(retain, self.folder, keep_last, interval)
        self._pending: _Pending | None = None
        # Ranks wait for the slowest upload, which may take long and then only costs this save.
        self._timeout = timedelta(days=1) if is_url(self.folder) else timedelta(minutes=timeout_minutes)
        self._stager = Stager()
        self._layout: Layout | None = None  # the last save's layout, unless that save failed

    @functools.cached_property
    def _group(self) -> dist.ProcessGroup:
        """A group of all ranks, made by the first save: its collectives run in another thread, and on the CPU."""
        return dist.new_group(backend="gloo", timeout=self._timeout)

    def save(self, iteration: int, trained: Trained, meta: dict[str, Any], with_optimizer: bool = True) -> None:
        """Wait for the save before, then begin to save; training may go on when this returns."""
        begun = time.monotonic()
        self.wait()
        meta = meta | {"iteration": iteration, "torch": str(torch.__version__), "saved_at": _now()}
        meta |= {"world_size": dist.get_world_size(), "has_optimizer": with_optimizer, "has_rng": True}
        meta["zeropp"] = zeropp_layout(trained.zeropp)
        writer = CheckpointWriter(self.folder, iteration, meta, self._lock, self._delete_old)
        planner = CachedPlanner(self._group, self._layout)
        arguments: dict[str, Any] = dict(storage_writer=writer, planner=planner, process_group=self._group)
        state = checkpoint_state(trained, with_optimizer)
        if self._asynchronous:
            # Returns when it has copied the state.
            future = dcp.async_save(state, **arguments, async_stager=self._stager)
            assert isinstance(future, Future)
        else:
            future = Future()
            try:
                future.set_result(dcp.save(state, **arguments))
            except dcp.api.CheckpointException as error:
                future.set_exception(error)
        pending = self._pending = _Pending(begun, time.monotonic() - begun, future, writer)
        future.add_done_callback(lambda _: setattr(pending, "finished", time.monotonic()))
        if self._asynchronous:
            self._print(f"saving checkpoint of iteration {iteration} to {self.folder} while training goes on")
        else:
            self._settle()

    def poll(self) -> None:
        """Report a save that has finished; call it at every step."""
        if self._pending is not None and self._pending.future.done():
            self._settle()

    def wait(self) -> None:
        """Wait for a save in progress, and report it."""
        if self._pending is not None:
            begun = time.monotonic()
            self._pending.future.exception()  # waits
            self._pending.stopped += time.monotonic() - begun
            self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        error, iteration = pending.future.exception(), pending.writer.iteration
        self._layout = pending.writer.layout if error is None else None
        if error is None:
            self.saved_iteration = iteration
            written = (pending.finished or time.monotonic()) - pending.begun
            self._print(
                f"successfully saved checkpoint from iteration {iteration:7d} to {self.folder} "
                f"(written in {written:.2f} s, training stopped for {pending.stopped:.2f} s)"
            )
            if pending.writer.nonfinite:
                self._print(f"note: this checkpoint holds NaN or Inf in {', '.join(pending.writer.nonfinite)}")
        elif not isinstance(error, dcp.api.CheckpointException):
            raise error
        elif dist.get_rank() == 0:
            discard(self.folder, iteration)  # makes room
            cause = " ".join(root_cause(error).split())
            print(
                f"ERROR: the checkpoint of iteration {iteration} was NOT SAVED: {cause}. Training goes on; the "
                f"latest checkpoint in {self.folder} stays what it was. Make room, or make it writable",
                file=sys.stderr,
                flush=True,
            )

    def _print(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"  [{_now()}] {text}", flush=True)


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")
