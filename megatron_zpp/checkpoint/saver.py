"""Save checkpoints while training goes on."""

import dataclasses
import functools
import sys
import time
from concurrent.futures import Future
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from megatron_zpp.errors import describe_error
from megatron_zpp.files import is_url
from megatron_zpp.settings.groups import CheckpointSettings
from megatron_zpp.zeropp.api import local_part

from .folder import FolderLock, discard, retain
from .state import checkpoint_state
from .storage import CachedPlanner, CheckpointWriter, Layout
from .trained import Trained, zeropp_layout


class Stager(BlockingAsyncStager):
    """Copies each rank's own part of a state by name, into host memory that is kept for the next save.

    Fresh memory is slow, and pinning it, as fast copies from a GPU need, more so. DCP's stager knows a buffer by the
    tensor that it copies, but errors and codes are other tensors after each step. The save before must have finished.
    """

    def __init__(self, copies: bool = True) -> None:
        """copies: False where training waits for the whole save."""
        super().__init__()
        self._copies, self._buffers = copies, dict[str, Tensor]()

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._copies:
            return state_dict
        staged, buffers = {}, dict[str, Tensor]()  # buffers of tensors that are not saved any more are freed
        for name, tensor in state_dict.items():
            local, buffer = local_part(tensor), self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            buffers[name] = staged[name] = buffer.copy_(local, non_blocking=True)
            if isinstance(tensor, DTensor):
                staged[name] = DTensor(buffer, tensor._spec, requires_grad=False)  # DCP reads only its placement
        self._buffers = buffers
        if any(tensor.is_cuda for tensor in state_dict.values()):
            torch.cuda.synchronize()
        return staged


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
        self._stager, self._layout = Stager(self._asynchronous), Layout()

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
        state = checkpoint_state(trained, with_optimizer)
        # Returns when it has copied the state.
        future = dcp.async_save(
            state, storage_writer=writer, planner=planner, process_group=self._group, async_stager=self._stager
        )
        assert isinstance(future, Future)
        pending = self._pending = _Pending(begun, time.monotonic() - begun, future, writer)
        future.add_done_callback(lambda _: setattr(pending, "finished", time.monotonic()))
        if self._asynchronous:
            self._print(f"saving checkpoint of iteration {iteration} to {self.folder} while training goes on")
        else:
            self.wait()

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
        if error is None:
            self.saved_iteration = iteration
            written = (pending.finished or time.monotonic()) - pending.begun
            self._print(
                f"successfully saved checkpoint from iteration {iteration:7d} to {self.folder} "
                f"(written in {written:.2f} s, training stopped for {pending.stopped:.2f} s)"
            )
            if pending.writer.nonfinite:
                self._print(f"note: this checkpoint holds NaN or Inf in {', '.join(pending.writer.nonfinite)}")
            return
        self._layout = Layout()
        if not isinstance(error, dcp.api.CheckpointException):
            raise error
        if dist.get_rank() == 0:
            discard(self.folder, iteration)  # makes room
            rank, (cause, _) = min(error.failures.items(), key=itemgetter(0))  # DCP wraps all ranks' tracebacks
            kind = "" if isinstance(cause, OSError) else f"{type(cause).__name__}: "
            lost = f"the checkpoint of iteration {iteration} was NOT SAVED: rank {rank}: {kind}{describe_error(cause)}"
            stays = f"the latest checkpoint in {self.folder} stays what it was. Make room, or make it writable"
            print(f"ERROR: {lost}. Training goes on; {stays}", file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"  [{_now()}] {text}", flush=True)


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S")
