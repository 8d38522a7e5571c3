"""A process-group backend for several ranks on one GPU, which NCCL refuses: gloo on copies in host memory.

Collectives of ``init_process_group("staged")`` treat streams as NCCL's do: they read their inputs after what the
current stream has queued at the call, run beside it, and their outputs are valid after ``Work.wait``. Tensors on the
CPU go the same way, so that the backend is tested without a GPU.
gloo itself takes CUDA tensors, but in DTensor's all-gather torch 2.13 reads device memory from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "staged"


def register() -> None:
    """Make the backend known to torch.distributed, once per process."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])


class StagedGroup(dist.ProcessGroup):
    """Collectives of one group, in the order of their calls, on a thread and a stream of their own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # its stub lacks this overload
        self._backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo = dist.ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._backend)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._messages = ThreadPoolExecutor()  # wait for sends and receives, which peers may begin in another order
        self._stream: torch.cuda.Stream | None = None  # made with the first tensor on a GPU

    # C++ calls these by name. A group otherwise keeps its name in the backends that are registered with it.

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._messages.shutdown(wait=False)
        self._gloo.shutdown()

    def barrier(self, opts: Any) -> StagedWork:  # type: ignore[override]
        return self._run("barrier", opts)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> StagedWork:
        return self._run("send", tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> StagedWork:
        return self._run("recv", tensors, rank, tag)

    @torch.no_grad()
    def _run(self, collective: str, outputs: Any, *rest: Any) -> StagedWork:
        """Run gloo's ``collective`` on host copies of all tensors in its arguments, then copy ``outputs`` back."""
        tensors = _tensors_in((outputs, *rest))
        if not any(tensor.is_cuda for tensor in tensors):
            host = tree_map_only(Tensor, Tensor.clone, (outputs, *rest))
            return StagedWork(self._thread.submit(self._exchange, collective, host, outputs, None))
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = tree_map_only(Tensor, _to_pinned_memory, (outputs, *rest))
            copied = self._stream.record_event()
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)  # its memory must not be given away before the copies are done
        return StagedWork(self._thread.submit(self._exchange, collective, host, outputs, copied))

    def _exchange(self, collective: str, host: tuple[Any, ...], outputs: Any, copied: torch.cuda.Event | None) -> Any:
        """On the group's thread: start gloo's collective, and finish it before the next one starts."""
        if copied is not None:
            copied.synchronize()
        work = getattr(self._gloo, collective)(*host)
        if collective in ("send", "recv"):
            return self._messages.submit(self._finish, work, outputs if collective == "recv" else (), host[0], copied)
        return self._finish(work, outputs, host[0], copied)

    @torch.inference_mode()  # outputs may be tensors of an evaluation in inference mode
    def _finish(
        self, work: dist.Work, outputs: Any, results: Any, copied: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Wait, and copy ``results`` back to ``outputs``. Returns the event after which outputs on a GPU are valid."""
        work.wait()
        with nullcontext() if copied is None else torch.cuda.stream(self._stream):
            for output, result in zip(_tensors_in(outputs), _tensors_in(results), strict=False):
                output.data.copy_(result, non_blocking=True)  # .data: no new version, as with any other backend
            return None if copied is None else torch.cuda.current_stream().record_event()


class StagedWork(dist.Work):
    """Done for the host when gloo is, and for the current stream when the outputs are back on the GPU."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        valid = self._future.result()
        if isinstance(valid, Future):  # a point-to-point message
            valid = valid.result()
        if valid is not None:
            torch.cuda.current_stream().wait_event(valid)
        return True


def _collective(name: str) -> Callable[..., StagedWork]:
    return lambda self, outputs, *rest: self._run(name, outputs, *rest)


# The first argument of each holds the outputs. Names of torch 2.13, and of 2.11.
for _name in (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "alltoall_base",
    "all_to_all_single",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(StagedGroup, _name, _collective(_name))


def _tensors_in(value: Any) -> list[Tensor]:
    return list(filter(torch.is_tensor, tree_leaves(value)))


def _to_pinned_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
