"""Streams, and how long the program waited for collectives on them, per link: by the clock or by events of a GPU.

Streams have the same names on a CPU, where torch has stubs that do nothing. There a collective that has not arrived
blocks the program, so the time in it is the time waited. On a GPU the host runs ahead, and streams of collectives wait
beside the one that computes: what counts is when that one stood still while a collective was in flight.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function


def new_stream(device: torch.device) -> torch.Stream:
    """Make a stream for gathers. Its kernels go before those that compute, as on FSDP2's streams."""
    stream: torch.Stream = torch.get_device_module(device).Stream(priority=-1)
    return stream


def current_stream(device: torch.device) -> torch.Stream:
    return torch.get_device_module(device).current_stream()


@contextmanager
def on_stream(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Queue work on ``stream`` after all work of the current stream, which then waits for it."""
    streams = torch.get_device_module(device)
    current = streams.current_stream()
    stream.wait_stream(current)
    try:
        with streams.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


def to_host(values: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy ``values`` to host memory, pinned so that a GPU's current stream copies; into ``out`` if that fits."""
    if out is None or (out.shape, out.dtype) != (values.shape, values.dtype):
        out = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return out.copy_(values, non_blocking=True)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, label: str) -> None:
    """Raise RuntimeError while a CUDA graph is captured: it would replay what was decided then, for ever."""
    if is_capturing(device):
        raise RuntimeError(
            f"{label} cannot be gathered or reduced in a CUDA graph: ZeRO++ decides again at every step what to "
            "send. Capture parts of the model without fully_shard, or train without CUDA graphs"
        )


Interval = tuple[Any, Any]  # beginning and end: seconds, or events of one device


class Waits:
    """Intervals since the last ``take_seconds``; nothing is recorded before the first one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.are_named = False  # while a profile is taken: torch.profiler and NVTX show each collective by its name
        self._is_recording = False
        self._within_nodes: list[Interval] = []
        self._between_nodes: list[Interval] = []
        self._stalls: list[Interval] = []  # stalls of the compute stream

    @contextmanager
    def collective(self, name: str, unit: str, *, crosses_nodes: bool) -> Iterator[None]:
        """Time a wait for a collective of ``unit``. A ring through all ranks is as fast as its slowest link."""
        intervals, link = self._within_nodes, "within nodes"
        if crosses_nodes:
            intervals, link = self._between_nodes, "between nodes"
        with record_function(f"{name} {link}: {unit}") if self.are_named else nullcontext():
            now = self._event if self.device.type == "cuda" else time.perf_counter
            begin = now() if self._is_recording else None
            yield
            if begin is not None:
                intervals.append((begin, now()))

    @contextmanager
    def stall(self) -> Iterator[None]:
        """Time where the stream that computes waits for others. On a CPU there is only one stream."""
        begin = self._event() if self._is_recording and self.device.type == "cuda" else None
        yield
        if begin is not None:
            self._stalls.append((begin, self._event()))

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds waited for links within nodes, and between nodes, since the last call.

        On a GPU the host does not wait here: what has not finished counts next time.
        """
        self._is_recording = True
        recorded = (self._stalls, self._within_nodes, self._between_nodes)
        if self.device.type != "cuda":
            seconds = total(self._within_nodes), total(self._between_nodes)
        elif not all(end.query() for intervals in recorded for _, end in intervals[-1:]):
            return 0.0, 0.0
        elif not self._stalls:
            seconds = 0.0, 0.0
        else:
            first = self._stalls[0][0]
            stalls, within, between = (
                [(first.elapsed_time(begin) / 1000, first.elapsed_time(end) / 1000) for begin, end in intervals]
                for intervals in recorded
            )
            # Where both links are busy, the slower one is to blame.
            on_any, on_between = overlap(stalls, within + between), overlap(stalls, between)
            seconds = on_any - on_between, on_between
        for intervals in recorded:
            intervals.clear()
        return seconds

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(current_stream(self.device))
        return event


def total(intervals: Sequence[Interval]) -> float:
    return float(sum(end - begin for begin, end in intervals))


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the seconds that some interval of both lists covers."""
    return total(merged(first)) + total(merged(second)) - total(merged([*first, *second]))


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Return intervals that cover the same time and do not overlap."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result
