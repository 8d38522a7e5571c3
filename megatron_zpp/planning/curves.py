"""How long collectives take by their size, as measured: at small sizes no rate and no latency describes them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any

from megatron_zpp.planning.needs.exchanges import Exchange
from megatron_zpp.planning.needs.rank_groups import RankGroup

GATHER, REDUCTION, STRAIGHT = "all-gather", "reduction", "all-to-all"  # a reduction that takes two passes

Curve = Mapping[str, float]  # seconds by bytes of a piece; keys are text, as in a file


def curve_name(kind: str, group: RankGroup) -> str:
    return f"{kind} {group.nodes}x{group.ranks_per_node}"


def check_curves(curves: Any) -> None:
    """Raise ValueError where a cluster file has something else."""
    try:
        is_right = all(
            curve and all(int(size) > 0 < seconds < math.inf for size, seconds in curve.items())
            for curve in curves.values()
        )
    except (AttributeError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            'collective_seconds is not as {"all-gather 2x8": {"4096": 0.0001}}: seconds by kind and ranks, and by bytes'
        )


def kind_of(exchange: Exchange) -> str:
    if exchange.is_straight:
        return STRAIGHT
    return REDUCTION if exchange.passes == 2 else GATHER


def seconds_on(curve: Curve, nbytes: int) -> float:
    """Between the sizes that were measured a power law; below the least its time, above the largest its rate."""
    points = sorted((int(size), seconds) for size, seconds in curve.items())
    sizes, seconds = zip(*points, strict=True)
    if nbytes <= sizes[0]:
        return seconds[0]
    if nbytes >= sizes[-1]:
        return seconds[-1] * nbytes / sizes[-1]
    above = bisect.bisect_left(sizes, nbytes)
    share = math.log(nbytes / sizes[above - 1]) / math.log(sizes[above] / sizes[above - 1])
    return seconds[above - 1] ** (1 - share) * seconds[above] ** share
