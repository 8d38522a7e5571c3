"""Records what a real program on CPU ranks would do on the streams of a GPU.

FSDP2 and ZeRO++ ask ``torch.cpu`` for streams and events, which do nothing. Here others take their place, which write
down who waits for what. A dispatch mode writes down which memory each operator reads and writes, and on which stream.
Nothing else changes: operators and gloo's collectives run at once, so that every value is right.

What is recorded is what CUDA and NCCL would do, as torch uses them since 2.8:

- An operator runs on the current stream; new memory is of that stream, and goes back to it when the storage is gone.
- A collective with ``async_op`` runs on a stream of its communicator, which waits for the current one at the call.
  ``work.wait()`` lets the then current stream wait for it; until then the work keeps its tensors. Without ``async_op``
  it runs on the current stream.
- Reading a number (``item``, ``tolist``, ``cpu``, ``equal``) makes the host wait for the current stream.

Not recorded: other threads, and autograd's own switching of streams. A backward pass runs on the stream that it is
called on, as on a GPU where the forward pass ran on that one.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zeropp.order.trace import Allocation, Line, Operation, Record, RecordStream, Release, Site, Span, Trace, Wait

DEFAULT = "the default stream"
# The host has the result when these return.
ANSWERS_THE_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "c10d::barrier"}
# Operators that do not say in their schema what they write.
WRITES_UNSAID = {"fsdp::all_gather_copy_in": {"all_gather_output"}}
NO_PROGRAMS = {__file__, str(Path(__file__).with_name("fake_cuda.py"))}
TORCH, FSDP2 = Path(torch.__file__).parent, "/torch/distributed/fsdp/_fully_shard/"


@dataclass(frozen=True)
class Collective:
    """What one rank asked of a communicator."""

    communicator: str
    ranks: tuple[int, ...]  # the communicator's ranks
    name: str
    shapes: tuple[tuple[tuple[int, ...], str], ...]  # and dtypes, of what is sent and of what arrives


class Recorder:
    """``with Recorder() as recorder: program()``; then ``recorder.trace`` and ``recorder.collectives``.

    ``device_type``: whose streams are replaced, "cpu" or, for fake tensors, "cuda".
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_module: Any = torch.get_device_module(device_type)
        self.trace: Trace = []
        self.collectives: list[Collective] = []
        self.streams = [Stream(self, DEFAULT)]
        self.current_stream = self.streams[0]
        self._unwaited: set[Work] = set()  # works keep their tensors
        self._latest: Work | None = None  # or C++ would return one without our methods
        self._memory: dict[int, tuple[StorageWeakRef, int, str]] = {}  # by storage: its block, and the block's stream
        self._numbers = itertools.count()
        self._patches = ExitStack()

    def __enter__(self) -> Recorder:
        device = self.device_module
        replacements = [
            (device, "Stream", self._new_stream),
            (device, "Event", lambda **_: Event(self)),
            (device, "stream", self._use_stream),
            (device, "current_stream", lambda device=None: self.current_stream),
            (torch.accelerator, "current_stream", lambda device=None: self.current_stream),
            (device, "synchronize", lambda device=None: self.synchronize()),
            (torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_)),
            (torch.Tensor, "record_stream", lambda tensor, stream: self._record_stream(tensor, stream)),
            *((torch.Tensor, name, self._reading(getattr(torch.Tensor, name))) for name in ("tolist", "cpu", "numpy")),
        ]
        for owner, name, replacement in replacements:
            self._patches.enter_context(patch.object(owner, name, replacement, create=True))
        self._patches.enter_context(_Operators(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.close()

    # Streams and events

    def record(self, stream: Stream) -> int:
        event = next(self._numbers)
        self.trace.append(Record(event, stream.name))
        return event

    def wait(self, stream: Stream | None, event: int, site: Site | None) -> None:
        self.trace.append(Wait(stream.name if stream is not None else None, event, site))

    def answer_host(self) -> None:
        """The host waits for what the current stream was asked for; no program can leave that out."""
        self.wait(None, self.record(self.current_stream), site=None)

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def _new_stream(self, priority: int = 0) -> Stream:
        name = re.match(r"(?:\w+\.)*(\w+)(?::.*)? = ", self.site()[0].text)  # the variable's name
        self.streams.append(Stream(self, f"{name[1] if name else 'a stream'} ({len(self.streams)})"))
        return self.streams[-1]

    @contextmanager
    def _use_stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.current_stream = self.current_stream, stream or self.current_stream
        try:
            yield
        finally:
            self.current_stream = before

    # Memory

    def span(self, tensor: Tensor) -> Iterable[Span]:
        """What a tensor's elements span; none if there are none."""
        if tensor.numel() == 0:
            return ()
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.itemsize
        return (Span(self._block(tensor.untyped_storage()), start, start + (last + 1) * tensor.itemsize),)

    def is_known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._memory

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """The storage has new memory."""
        self._release_what_is_gone()
        block = next(self._numbers)
        self._memory[storage._cdata] = (StorageWeakRef(storage), block, self.current_stream.name)
        self.trace.append(Allocation(block, self.current_stream.name, self.site()))

    def _block(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._memory:  # from before the recording
            self._memory[storage._cdata] = (StorageWeakRef(storage), next(self._numbers), DEFAULT)
        return self._memory[storage._cdata][1]

    def _release_what_is_gone(self) -> None:
        # Soon enough: what is given back can do harm only when it is given out again.
        for key in [key for key, (storage, _, _) in self._memory.items() if storage.expired()]:
            self._release(key)

    def _release(self, key: int) -> None:
        _, block, stream = self._memory.pop(key)
        self.trace.append(Release(block, stream))

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """FSDP2 frees and fills unsharded parameters so, which no operator tells."""

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            self._release_what_is_gone()
            if storage._cdata in self._memory:
                self._release(storage._cdata)
            result = resize(storage, size)
            if size > 0:
                self.allocate(storage)
            return result

        return resize_

    def _record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.trace.append(RecordStream(self._block(tensor.untyped_storage()), stream.name, self.site()))

    def _reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """On a GPU these copy to the host and wait; on a CPU no operator tells."""

        def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensor, DTensor):
                self.operation(read.__name__, self.current_stream, reads=[tensor], writes=[])
                self.answer_host()
            return read(tensor, *args, **kwargs)

        return reading

    # Operators

    def operation(self, name: str, stream: Stream, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        read, written = ([span for tensor in side for span in self.span(tensor)] for side in (reads, writes))
        if read or written:
            self.trace.append(Operation(name, stream.name, self.site(), tuple(read), tuple(written)))

    def collective(self, name: str, group: dist.ProcessGroup, async_op: bool, reads: Any, writes: Any) -> Work:
        """One on ``group``: a work to wait for, on which nothing waits yet."""
        ranks = tuple(dist.get_process_group_ranks(group))
        shapes = tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in (*reads, *writes))
        self.collectives.append(Collective(group.group_name, ranks, name, shapes))
        stream = self.current_stream
        if async_op:
            stream = Stream(self, f"the communicator {group.group_name} of ranks {ranks}")
            self.wait(stream, self.record(self.current_stream), site=None)
        self.operation(name, stream, reads, writes)
        self._latest = Work(self, self.record(stream), (reads, writes) if async_op else ())
        return self._latest

    def site(self) -> Site:
        """The two innermost lines outside of torch and of this file; FSDP2 counts as outside of torch."""
        lines: list[Line] = []
        frame = sys._getframe(1)
        while frame is not None and len(lines) < 2:
            if _is_shown(frame.f_code.co_filename):
                lines.append(_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return tuple(lines)


@functools.cache
def _is_shown(path: str) -> bool:
    if FSDP2 in path:
        return not path.endswith("_fsdp_common.py")  # decorators
    return not (path in NO_PROGRAMS or path.startswith((str(TORCH), "<")) or "/contextlib" in path)


@functools.cache
def _line(path: str, number: int, function: str) -> Line:
    return Line(Path(path).name, number, function, linecache.getline(path, number).strip())


class Stream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def wait_event(self, event: Event) -> None:
        if event.number is not None:
            self.recorder.wait(self, event.number, self.recorder.site())

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.number: int | None = None  # None = never recorded

    def record(self, stream: Stream | None = None) -> None:
        self.number = self.recorder.record(stream or self.recorder.current_stream)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.recorder.current_stream).wait_event(self)

    def synchronize(self) -> None:
        if self.number is not None:
            self.recorder.wait(None, self.number, self.recorder.site())


class Work(dist.Work):
    """NCCL's work: waiting for it is the current stream's business, not the host's."""

    def __init__(self, recorder: Recorder, event: int, tensors: Any) -> None:
        super().__init__()
        self.recorder, self.event, self.tensors = recorder, event, tensors
        if tensors:
            recorder._unwaited.add(self)

    def wait(self, timeout: Any = None) -> bool:
        if self.tensors:
            self.recorder.wait(self.recorder.current_stream, self.event, self.recorder.site())
            self.recorder._unwaited.discard(self)
            self.tensors = ()
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        raise NotImplementedError(
            "what a program does must not depend on what has finished: one recording is of one case"
        )


class _Operators(TorchDispatchMode):
    """Writes every operator down, while it runs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors come here
        name = func._schema.name
        if func.namespace == "prim":  # C++ asks where a fake tensor is
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(name, func, args, kwargs)
        if func.namespace == "_c10d_functional":
            raise NotImplementedError(f"{name}: the recorder knows torch.distributed's own collectives")
        with self:  # inference mode hands over operators that are made of others
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        reads, writes, is_view = _arguments(func, args, kwargs)
        fresh = [tensor for tensor in _tensors(result) if not self.recorder.is_known(tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        fresh = [tensor for tensor in fresh if tensor.untyped_storage()._cdata not in known]
        for tensor in fresh:
            self.recorder.allocate(tensor.untyped_storage())
        if not is_view and "empty" not in name:
            self.recorder.operation(name, self.recorder.current_stream, reads, [*writes, *fresh])
        if name in ANSWERS_THE_HOST:
            self.recorder.answer_host()
        return result

    def _collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        done = result[-1] if isinstance(result, tuple) else result
        dist.Work.unbox(done).wait()
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        reads = [tensor for key in given if not key.startswith("output") for tensor in _tensors(given[key])]
        writes = [
            tensor
            for key in given
            if key.startswith("output") or (key == "tensors" and name != "c10d::send")
            for tensor in _tensors(given[key])
        ]
        group = dist.ProcessGroup.unbox(given["process_group"])
        work = self.recorder.collective(name, group, given.get("async_op", True), reads, writes)
        if name in ANSWERS_THE_HOST:
            self.recorder.answer_host()
        return (*result[:-1], work.boxed()) if isinstance(result, tuple) else work.boxed()


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor], bool]:
    """What an operator reads, what it writes, and whether it only looks at memory in another way."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    is_view = False
    for i, argument in enumerate(func._schema.arguments):
        tensors = _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in WRITES_UNSAID.get(func._schema.name, ()):
            writes += tensors
        else:
            reads += tensors
            is_view |= alias is not None
    if reads and not writes and not func._schema.returns and func.namespace != "aten":
        raise NotImplementedError(f"{func._schema.name} does not say what it writes: add it to WRITES_UNSAID")
    return reads, writes, is_view and not writes


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
