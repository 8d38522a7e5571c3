"""Time to loss: steps that a wire takes in the study, times seconds of a step in the race of against_peers.py."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import against_peers as race
from common import markdown_table
from study_arms import LOG_INTERVAL
from study_experiments import COMMON_RATE, HEADLINE, ISLAND_RATES, POWER_SGD, at_rate, islands_at
from study_tables import Rows, half_width

from megatron_zpp.zeropp.recipes import RECIPES

SMOOTHED = 1 / 8  # share of a run that a point of a curve averages
ABOVE = 1.01  # the goal over the loss that the bf16 wire ends with
BF16 = at_rate(HEADLINE["bf16"], COMMON_RATE)
# Who sends 16 bit has the bf16 wire's curve: the study did not train each, and rounding differs in order alone.
CURVES = dict.fromkeys(["FSDP2", "FSDP2, kept", "HSDP, kept", race.MEGATRON_FSDP[0], race.HIERARCHY], BF16)
CURVES[race.POWER_SGD] = at_rate(POWER_SGD[80], COMMON_RATE)
CURVES |= {f"{name}, kept": at_rate(HEADLINE[f"`{name}`"], COMMON_RATE) for name in RECIPES if name != "zero3"}
CURVES |= {f"2 islands {how}": islands_at(rate, how).flags for how, rate in ISLAND_RATES.items()}  # not raced


def curve(lines: Sequence[float]) -> list[float]:
    """Return the training loss by log line, a mean over the lines of ``SMOOTHED``."""
    width = int(SMOOTHED * len(lines))
    return [statistics.mean(lines[max(0, i - width + 1) : i + 1]) for i in range(len(lines))]


def steps_of(flags: str, rows: Rows) -> dict[int | None, float]:
    """Return the steps to the goal by seed, and of the mean over all seeds (None); infinite where it is not reached."""
    ours, control = rows[flags], rows[BF16]
    both: dict[int | None, Any] = {
        seed: [row["train_losses"] for row in (ours[seed], control[seed])] for seed in ours.keys() & control.keys()
    }
    means = [[*map(statistics.mean, zip(*lines, strict=True))] for lines in zip(*both.values(), strict=True)]
    every = {None: means, **both}
    return {i: LOG_INTERVAL * lines_to(ABOVE * curve(b)[-1], curve(a)) for i, (a, b) in every.items()}


def lines_to(goal: float, losses: list[float]) -> float:
    """Return how many log lines after the first step's line a curve takes to reach the goal; infinite if never."""
    for i, (before, loss) in enumerate(itertools.pairwise(losses)):
        if loss <= goal:
            return i + (before - goal) / (before - loss)
    return math.inf


def table(rows: Rows) -> str:
    """Minutes to the loss by wire, rate of the links, and micro-batches of a step."""
    lines, no_minutes, base = [], [""] * len(race.SHOWN), steps_of(BF16, rows)
    for setting, flags in CURVES.items():
        steps = steps_of(flags, rows)
        mean = steps.pop(None)
        if mean == math.inf:
            lines.append([race.name_of(setting), "not reached", *no_minutes])
            continue
        never = sum(n == math.inf for n in steps.values())
        over = f" (not reached in {never} of {len(steps)} seeds)" if never else ""
        if flags != BF16 and not never:
            more = [n - base[seed] for seed, n in steps.items()]
            seeds = f" in {len(more)} seeds" if len(more) < len(base) - 1 else ""
            over = f" ({statistics.mean(more):+.0f} ± {half_width(more):.0f}{seeds})"
        raced = race.SHOWN if setting in race.SETTINGS else []
        minutes = [f"{mean * race.seconds(setting, rate=r, micro_batches=n) / 60:.1f}" for r, n in raced]
        once = len(race.ratios(setting, "int8, kept", rate=None, micro_batches=1)) == 1
        lines.append([race.name_of(setting) + " (one turn)" * once, f"{mean:.0f}{over}", *(minutes or no_minutes)])
    return markdown_table(["", "steps", *(race.cell_name(*cell) for cell in race.SHOWN)], lines)
