"""Time to loss: steps that a wire takes in the study, times seconds of a step in the race of against_peers.py."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import against_peers as race
from common import markdown_table
from study_arms import CPU
from study_experiments import COMMON_RATE, HEADLINE, at_rate
from study_tables import Rows, half_width

SMOOTHED = 1 / 8  # share of a run that a point of a curve averages
ABOVE = 1.01  # the goal over the loss that the bf16 wire ends with
# Who sends 16 bit has the bf16 wire's curve: the study did not train each, and rounding differs in order alone.
CURVES = dict.fromkeys(["FSDP2", "FSDP2, kept", "HSDP, kept", race.MEGATRON_FSDP[0], race.HIERARCHY], "bf16")
CURVES |= {f"{name}, kept": f"`{name}`" for name in ("lossless", "int8", "int6", "ternary")}


def curve(lines: Sequence[float]) -> list[float]:
    """Return the training loss by log line, a mean over the lines of ``SMOOTHED``."""
    width = int(SMOOTHED * len(lines))
    return [statistics.mean(lines[max(0, i - width + 1) : i + 1]) for i in range(len(lines))]


def steps_of(flags: str, rows: Rows) -> dict[int | None, float]:
    """Return the steps to the goal by seed, and of the mean over all seeds (None); infinite where it is not reached."""
    ours, control = rows[flags], rows[at_rate(HEADLINE["bf16"], COMMON_RATE)]
    both: dict[int | None, Any] = {
        seed: [row["train_losses"] for row in (ours[seed], control[seed])] for seed in ours.keys() & control.keys()
    }
    means = [[*map(statistics.mean, zip(*lines, strict=True))] for lines in zip(*both.values(), strict=True)]
    every = {None: means, **both}
    return {i: CPU.train_iters * share_of_steps(curve(a), ABOVE * curve(b)[-1]) for i, (a, b) in every.items()}


def share_of_steps(losses: list[float], goal: float) -> float:
    """Return the share of a run after which its curve, from the first step on, reaches the goal; infinite if never."""
    for i, (before, loss) in enumerate(itertools.pairwise(losses)):
        if loss <= goal:
            return (i + (before - goal) / (before - loss)) / (len(losses) - 1)
    return math.inf


def table(rows: Rows) -> str:
    """Minutes to the loss by wire, rate of the links, and micro-batches of a step."""
    lines = []
    for setting, wire in CURVES.items():
        steps, base = (steps_of(at_rate(HEADLINE[name], COMMON_RATE), rows) for name in (wire, "bf16"))
        mean = steps.pop(None)
        more = [n - base[seed] for seed, n in steps.items() if n < math.inf]
        reached = "" if len(more) == len(steps) else f", {len(more)} of {len(steps)} seeds"
        over = f" ({statistics.mean(more):+.0f} ± {half_width(more):.0f}{reached})" if wire != "bf16" else ""
        medians = [statistics.median(race.figures(setting, "seconds", rate=r, micro_batches=n)) for r, n in race.SHOWN]
        minutes = (f"{mean * seconds / 60:.1f}" for seconds in medians)
        lines.append([race.name_of(setting), f"{mean:.0f}{over}", *minutes])
    return markdown_table(["", "steps", *(race.cell_name(*cell) for cell in race.SHOWN)], lines)
