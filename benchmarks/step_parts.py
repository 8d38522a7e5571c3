"""Where a training step's time goes, from torch.profiler: forward, backward, optimizer, collectives, quantizers, data.

Every operation belongs to the innermost range around it that names a part. PyTorch names some by itself (FSDP2's
collectives with their copies and casts, the optimizer, the loader); the others are wrapped here, for the profiled
steps alone. Two times are kept: the host's is the main thread's, which on a GPU runs ahead and waits; the device's is
the kernels' time, by the part that launched them. On a device it also counts the launches of each part, and how long
a step communicates without computing: the exposed time, which overlap should have hidden.
"""

import bisect
import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from side_by_side import OurTraining
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megatron_zpp.families import ARCHITECTURES
from megatron_zpp.training import pretrain, step
from megatron_zpp.training.loss import LossTotals
from megatron_zpp.training.trainer import Trainer
from megatron_zpp.zeropp.gather.all_gather import UnitAllGather
from megatron_zpp.zeropp.reduce.reduce_scatter import UnitReduceScatter

PARTS = ("forward", "backward", "optimizer", "collectives", "quantizers", "data", "other")
STEP = "training step"
WRAPPED: tuple[tuple[Any, str, str], ...] = (
    *((architecture.module, "forward", "forward") for architecture in ARCHITECTURES),
    (LossTotals, "add", "forward"),
    (torch.Tensor, "backward", "backward"),
    (step, "sum_over_all_ranks", "optimizer"),
    (step, "clip_gradients", "optimizer"),
    (UnitAllGather, "__call__", "quantizers"),  # what ZeRO++ does, but for the collectives inside
    (UnitAllGather, "renew", "quantizers"),
    (UnitReduceScatter, "__call__", "quantizers"),
    (UnitReduceScatter, "_finish", "quantizers"),
    (dist.Work, "wait", "collectives"),
)
NAMED_BY_PYTORCH = {
    "FSDP::": "collectives",
    "c10d::": "collectives",
    "nccl:": "collectives",
    "gloo:": "collectives",
    "Optimizer.": "optimizer",
    "enumerate(DataLoader)": "data",
}
WARM_UP_STEPS = 3  # the loader's workers start, the profiler too
TOP_KERNELS = 10


def profile_steps(run: Trainer, training: OurTraining, num_steps: int) -> dict[str, Any]:
    """Milliseconds per step of each part, of the step, and of the longest kernels; the run goes on meanwhile."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (run.device.type == "cuda")
    plan = schedule(wait=0, warmup=WARM_UP_STEPS, active=num_steps, repeat=1)
    with profile(activities=activities, schedule=plan, acc_events=True) as profiler, _parts_named():

        def profiled_step(*args: Any, **options: Any) -> Any:
            with record_function(STEP):
                result = train_step(*args, **options)
            profiler.step()
            return result

        train_step = pretrain.train_step
        with patch.object(pretrain, "train_step", profiled_step):
            training.steps(WARM_UP_STEPS + num_steps)
    return sum_up(list(profiler.events()), num_steps)


def sum_up(events: list[FunctionEvent], num_steps: int) -> dict[str, Any]:
    """The result of ``profile_steps`` from the profiler's events."""
    on_device = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    events = [event for event in events if event.device_type == DeviceType.CPU and not event.is_async]
    steps = [event for event in events if event.name == STEP]
    main_thread = steps[0].thread

    def named_part_of(event: FunctionEvent) -> str | None:
        """By the ranges of its own thread; on the main thread None outside of the steps, such as logging."""
        part: str | None = None
        ancestor: FunctionEvent | None = event
        while ancestor is not None:
            part = part or _named_part(ancestor)
            if ancestor.name == STEP:
                return part
            ancestor = ancestor.cpu_parent
        return None if event.thread == main_thread else part

    ranges = sorted(
        (event.time_range.start, event.time_range.end, part)
        for event in events
        if event.thread == main_thread and _named_part(event) and (part := named_part_of(event)) is not None
    )
    starts = [start for start, _, _ in ranges]

    def part_of(event: FunctionEvent) -> str | None:
        part = named_part_of(event)
        if part is not None or event.thread == main_thread:
            return part
        # Autograd's thread, while the main one waits inside of backward(): what the main thread is in then.
        now = event.time_range.start
        before = range(bisect.bisect_right(starts, now) - 1, -1, -1)
        return next((ranges[i][2] for i in before if ranges[i][1] >= now), None)

    host: dict[str | None, float] = defaultdict(float)
    device: dict[str | None, float] = defaultdict(float)
    launches: dict[str | None, int] = defaultdict(int)
    kernels: dict[str, float] = defaultdict(float)
    for event in events:
        part = part_of(event)
        if event.thread == main_thread:
            host[part] += event.self_cpu_time_total
        for kernel in event.kernels:
            device[part] += kernel.duration
            launches[part] += 1
            kernels[kernel.name] += kernel.duration

    def per_step(microseconds: float) -> float:
        return round(microseconds / 1000 / num_steps, 3)

    longest = sorted(kernels.items(), key=lambda item: -item[1])[:TOP_KERNELS]
    wall = statistics.mean(event.time_range.elapsed_us() for event in steps)
    return {
        "profiled_steps": num_steps,
        "step_ms": round(wall / 1000, 3),
        "host_ms": {part: per_step(host[part]) for part in PARTS},
        "device_ms": {part: per_step(device[part]) for part in PARTS} if kernels else None,
        "device_idle_ms": round(wall / 1000 - per_step(sum(device.values())), 3) if kernels else None,
        "launches": {part: round(launches[part] / num_steps, 1) for part in PARTS} if kernels else None,
        "exposed_communication_ms": per_step(exposed(on_device)) if kernels else None,
        "longest_kernels_ms": {name: per_step(duration) for name, duration in longest},
    }


def format_parts(parts: dict[str, Any]) -> str:
    """The result of ``profile_steps`` as a table."""
    host, device = parts["host_ms"], parts["device_ms"]
    lines = [f"| part of a step of {parts['step_ms']:.2f} ms | host, ms | device, ms | launches |", "|---|---|---|---|"]
    for part in PARTS:
        of_device = f"{device[part]:.2f} | {parts['launches'][part]:g}" if device else "- | -"
        lines.append(f"| {part} | {host[part]:.2f} | {of_device} |")
    if device:
        lines.append(f"| idle |  | {parts['device_idle_ms']:.2f} | |")
        lines.append(f"| communicates, does not compute |  | {parts['exposed_communication_ms']:.2f} | |")
        lines += ["", "| longest kernels | ms |", "|---|---|"]
        lines += [f"| {name[:80]} | {duration:.2f} |" for name, duration in parts["longest_kernels_ms"].items()]
    return "\n".join(lines)


def exposed(on_device: list[FunctionEvent]) -> float:
    """Microseconds in which only kernels and copies of collectives run: NCCL's, or copies to and from the host."""
    when: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # communication; all else
    for event in on_device:
        communicates = event.name.lower().startswith(("nccl", "memcpy htod", "memcpy dtoh"))
        when[communicates].append((event.time_range.start, event.time_range.end))
    return covered(when[True] + when[False]) - covered(when[False])


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end)."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _named_part(event: FunctionEvent) -> str | None:
    if event.name == STEP:
        return "other"
    if event.name in PARTS:
        return event.name
    return next((part for prefix, part in NAMED_BY_PYTORCH.items() if event.name.startswith(prefix)), None)


@contextmanager
def _parts_named() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, part in WRAPPED:
            stack.enter_context(patch.object(owner, name, _in_range(part, getattr(owner, name))))
        yield


def _in_range(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        # A unit whose collectives are FSDP2's own quantizes nothing.
        with nullcontext() if getattr(args[0], "is_plain", False) else record_function(part):
            return function(*args, **options)

    return wrapped
