"""A plot of what was measured and what is predicted, for ``planner.py``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path


def scatter(points: Mapping[str, list[tuple[float, float]]], what: str, bar: float, path: Path) -> None:
    """What was measured and what is predicted, by the name of a group."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 6), layout="constrained")
    for (name, of_name), marker in zip(points.items(), itertools.cycle("os^Dv")):
        measured, predicted = zip(*of_name, strict=True)
        axes.scatter(measured, predicted, s=16, alpha=0.7, marker=marker, label=f"{name}, {len(of_name)} points")
    all_measured = [point[0] for of_name in points.values() for point in of_name]
    ends = [min(all_measured) / 2, max(all_measured) * 2]
    axes.plot(ends, ends, color="0.4", linewidth=1, label="as measured")
    below, above = ([(1 + sign * bar) * x for x in ends] for sign in (-1, 1))
    axes.fill_between(ends, below, above, color="0.4", alpha=0.15, label=f"± {bar:.0%}")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel=f"measured, {what}", ylabel=f"predicted, {what}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
