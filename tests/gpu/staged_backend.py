"""A process-group backend for several ranks on one GPU, which NCCL refuses: gloo on copies in host memory.

Collectives of ``init_process_group("staged")`` behave as NCCL's do towards streams: they read their inputs behind what
the current stream has queued at the call, run beside it, and their outputs are valid behind ``Work.wait``. Tensors on
the CPU go the same way, which is how the backend itself is tested without a GPU.

(gloo takes CUDA tensors by itself, but not in ``all_gather_single_coalesced``, DTensor's all-gather: torch 2.13 reads
device memory there from the host.)
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

NAME = "staged"


def register() -> None:
    """Make the backend known to torch.distributed, once per process."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])


def start_group(device: torch.device, backend: str = NAME, **options: Any) -> None:
    """Start the default process group of ranks that all use ``device``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or DeviceMesh chooses card LOCAL_RANK, which only rank 0 has
    register()
    dist.init_process_group(backend, **options)


def restart_group(device: torch.device, store: str, backend: str = NAME) -> None:
    """Leave the default process group for one of the same ranks that all use ``device``. store: a file's name."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that leaves early would take the others' store along
    dist.destroy_process_group()
    start_group(device, backend, init_method=f"file://{store}", rank=rank, world_size=world_size)


class StagedGroup(dist.ProcessGroup):
    """Collectives of one group, in the order of their calls, on a thread and a stream of their own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._gloo = dist.ProcessGroup(store, rank, size)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._backend)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._stream: torch.cuda.Stream | None = None  # made with the first tensor on a GPU

    # What C++ asks for, by its names. A group's name otherwise lies in backends that are registered with it.

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
        self._gloo.shutdown()

    def barrier(self, opts: Any) -> StagedWork:
        return self._run("barrier", opts)

    @torch.no_grad()
    def _run(self, collective: str, outputs: Any, *rest: Any) -> StagedWork:
        """Run gloo's ``collective`` on host copies of all tensors in its arguments, then copy ``outputs`` back."""
        tensors = _tensors_in((outputs, *rest))
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if not on_gpu:
            host = _map_tensors(Tensor.clone, (outputs, *rest))
            return StagedWork(self._thread.submit(self._exchange, collective, host, outputs, None))
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = _map_tensors(_to_pinned_memory, (outputs, *rest))
            copied = self._stream.record_event()
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)  # its memory must not be given away before the copies are done
        return StagedWork(self._thread.submit(self._exchange, collective, host, outputs, copied))

    # Outputs may be tensors of an evaluation in inference mode.
    @torch.inference_mode()
    def _exchange(
        self, collective: str, host: list[Any], outputs: Any, copied: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """On the group's thread. Returns the event behind which outputs on a GPU are valid."""
        if copied is not None:
            copied.synchronize()
        getattr(self._gloo, collective)(*host).wait()
        with nullcontext() if copied is None else torch.cuda.stream(self._stream):
            for output, result in zip(_tensors_in(outputs), _tensors_in(host[0]), strict=True):
                output.data.copy_(result, non_blocking=True)  # .data: no new version, as with any other backend
            return None if copied is None else self._stream.record_event()


class StagedWork(dist.Work):
    """Done for the host when gloo is, and for the current stream when the outputs are back on the GPU."""

    def __init__(self, future: Future[torch.cuda.Event | None]) -> None:
        super().__init__()
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        valid = self._future.result()
        if valid is not None:
            torch.cuda.current_stream().wait_event(valid)
        return True


def _collective(name: str) -> Callable[..., StagedWork]:
    return lambda self, outputs, *rest: self._run(name, outputs, *rest)


# Those whose first argument holds the outputs, by torch 2.13's names and by 2.11's.
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
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, (list, tuple)) else []


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return [_map_tensors(function, item) for item in value] if isinstance(value, (list, tuple)) else value


def _to_pinned_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
