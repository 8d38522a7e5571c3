"""Streams of one device, under the same names on a GPU and on a CPU, where torch has stubs that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def new_stream(device: torch.device) -> torch.Stream:
    """One for gathers and what belongs to them: like FSDP2's, kernels on it go before those that compute."""
    stream: torch.Stream = torch.get_device_module(device).Stream(priority=-1)
    return stream


def current_stream(device: torch.device) -> torch.Stream:
    stream: torch.Stream = torch.get_device_module(device).current_stream()
    return stream


@contextmanager
def on_stream(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """What is queued in here goes to ``stream``: behind all of the current stream, which then waits for it."""
    current = current_stream(device)
    stream.wait_stream(current)
    try:
        with torch.get_device_module(device).stream(stream):
            yield
    finally:
        current.wait_stream(stream)
