"""Time to loss: steps that a wire takes in the study, times seconds of a step in the race of against_peers.py."""

import itertools
import math
import statistics

import against_peers as race
from common import markdown_table
from study_arms import CPU
from study_experiments import COMMON_RATE, HEADLINE, at_rate
from study_tables import Rows

SMOOTHED = 1 / 8  # share of a run that a point of a curve averages
ABOVE = 1.01  # the goal over the loss that the bf16 wire ends with
# Who sends 16 bit has the bf16 wire's curve: the study did not train each, and rounding differs in order alone.
CURVES = dict.fromkeys(["FSDP2", "FSDP2, kept", "HSDP, kept", race.MEGATRON_FSDP[0], race.HIERARCHY], "bf16")
CURVES |= {f"{name}, kept": f"`{name}`" for name in ("lossless", "int8", "int6", "ternary")}


def curve(flags: str, rows: Rows) -> list[float]:
    """Return a wire's training loss by log line: a mean over its seeds and the lines of ``SMOOTHED``."""
    lines = list(zip(*(row["train_losses"] for row in rows[flags].values()), strict=True))
    means, width = [statistics.mean(line) for line in lines], int(SMOOTHED * len(lines))
    return [statistics.mean(means[max(0, i - width + 1) : i + 1]) for i in range(len(means))]


def share_of_steps(losses: list[float], goal: float) -> float:
    """Return the share of a run after which its curve, from the first step on, reaches the goal; infinite if never."""
    for i, (before, loss) in enumerate(itertools.pairwise(losses)):
        if loss <= goal:
            return (i + (before - goal) / (before - loss)) / (len(losses) - 1)
    return math.inf


def table(rows: Rows) -> str:
    """Minutes to the loss by wire, rate of the links, and micro-batches of a step."""
    curves = {wire: curve(at_rate(flags, COMMON_RATE), rows) for wire, flags in HEADLINE.items()}
    goal, lines = ABOVE * curves["bf16"][-1], []
    for setting, wire in CURVES.items():
        steps = CPU.train_iters * share_of_steps(curves[wire], goal)
        medians = [statistics.median(race.figures(setting, "seconds", rate=r, micro_batches=n)) for r, n in race.SHOWN]
        lines.append([race.name_of(setting), f"{steps:.0f}", *(f"{steps * seconds / 60:.1f}" for seconds in medians)])
    return markdown_table(["", "steps", *(race.cell_name(*cell) for cell in race.SHOWN)], lines)
