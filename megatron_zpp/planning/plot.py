"""Tokens per second over memory, the risk for the loss as colour."""

from __future__ import annotations

from pathlib import Path

from megatron_zpp.planning.plan import Plan
from megatron_zpp.planning.table import name


def plot(plan: Plan, path: Path) -> None:
    """Raises ImportError without matplotlib, ValueError where nothing fits."""
    if not plan.outcomes:
        raise ValueError("nothing fits, so there is nothing to plot")
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need the package matplotlib: pip install matplotlib, or the extra plot") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    memories = [outcome.prediction.needs.memory / 1e9 for outcome in plan.outcomes]
    rates = [outcome.prediction.tokens_per_second for outcome in plan.outcomes]
    points = list(zip(memories, rates, strict=True))
    colors = [o.candidate.travel.risk for o in plan.outcomes]
    drawn = axes.scatter(memories, rates, c=colors, cmap="viridis_r", vmin=0.0, zorder=3)
    for outcome, point in zip(plan.outcomes, points, strict=True):
        axes.annotate(name(outcome.candidate), point, textcoords="offset points", xytext=(5, 4), fontsize=7)
    best = 0.0
    front = []
    for memory, rate in sorted(points):
        if rate > best:
            best = rate
            front.append((memory, rate))
    axes.plot(*zip(*front, strict=True), color="0.6", linewidth=1, drawstyle="steps-post", label="Pareto front")
    figure.colorbar(drawn, label="loss over an fp32 wire, mean + spread, % (docs/experiments.md, E5)")
    axes.set(xlabel="memory of a GPU, GB (estimate)", ylabel="tokens per second (predicted)", ylim=(0, None))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
