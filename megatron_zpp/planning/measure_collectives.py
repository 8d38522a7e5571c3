"""How long a cluster's collectives take by their size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.planning.curves import GATHER, REDUCTION, STRAIGHT, Curve, curve_name
from megatron_zpp.planning.needs.rank_groups import RankGroup
from megatron_zpp.planning.stopwatch import Sizes, median_seconds, slowest
from megatron_zpp.zeropp.fsdp.collectives import all_gather, reduce_scatter

SIZE_STEP = 4  # between measured sizes


def measured_curves(
    groups: Mapping[RankGroup, dist.ProcessGroup], device: torch.device, sizes: Sizes
) -> dict[str, Curve]:
    """Of every kind of collective on every kind of group."""
    # Only gloo's reductions are not as fast as gathers.
    kinds = (GATHER, STRAIGHT, REDUCTION) if dist.get_backend() == "gloo" else (GATHER, STRAIGHT)
    return {
        curve_name(kind, group): _curve(kind, process_group, device, sizes)
        for group, process_group in groups.items()
        for kind in kinds
    }


def _curve(kind: str, group: dist.ProcessGroup, device: torch.device, sizes: Sizes) -> Curve:
    """Seconds of a collective by bytes of a piece. All groups of the same kind run at once."""
    steps = int(math.log(sizes.most_bytes / sizes.least_bytes, SIZE_STEP))
    curve = {}
    for nbytes in (sizes.least_bytes * SIZE_STEP**step for step in range(steps + 1)):
        piece = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        pieces = torch.zeros(group.size() * piece.numel(), dtype=torch.bfloat16, device=device)
        received = torch.empty_like(pieces)
        runs: dict[str, Callable[[], Any]] = {
            GATHER: partial(all_gather, received, piece, group=group),
            STRAIGHT: partial(dist.all_to_all_single, received, pieces, group=group),
            REDUCTION: partial(reduce_scatter, piece, pieces, group=group),
        }
        curve[str(nbytes)] = 1 / slowest(1 / median_seconds(runs[kind], device, sizes))
    return curve


def rate_and_latency(curve: Curve, ranks: int) -> tuple[float, float]:
    """Bytes that a rank sends per second at the best size, and seconds of a hop of the smallest.

    One rank sends nothing: its rate is that of copies.
    """
    hops, latency = max(1, ranks - 1), min(curve.values())
    rates = (hops * int(nbytes) / (seconds - latency) for nbytes, seconds in curve.items() if seconds > 2 * latency)
    return max(rates, default=hops * max(int(n) / s for n, s in curve.items())), latency / hops
