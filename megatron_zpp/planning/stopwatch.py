"""Seconds of what all ranks of a cluster do at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.metrics.throughput import synchronize


@dataclass(frozen=True)
class Sizes:
    """What is measured with: those of the runs that are to be planned."""

    hidden_size: int
    tokens: int  # of a micro-batch
    least_bytes: int = 2**12  # of a collective's pieces
    most_bytes: int = 2**24
    seconds: float = 0.5  # of each measurement, at least


def median_seconds(run: Callable[[], None], device: torch.device, sizes: Sizes) -> float:
    """Of one call, the median of several, as often on every rank."""
    run()
    times = [_timed(run, device)]
    # Ranks agree on how often, or some would wait in a collective that others do not enter.
    repeats = min(100, max(3, int(sizes.seconds * slowest(1 / times[0]))))
    times = [_timed(run, device) for _ in range(repeats)]
    return statistics.median(times)


def _timed(run: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def slowest(rate: float) -> float:
    """The slowest rank's: a step waits for it."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    least: Tensor = torch.tensor(rate, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)
