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

    memories = [outcome.prediction.needs.memory / 1e9 for outcome in plan.outcomes]
    rates = [outcome.prediction.tokens_per_second / 1e6 for outcome in plan.outcomes]
    colors = [outcome.candidate.travel.risk for outcome in plan.outcomes]
    figure, axes = pyplot.subplots(figsize=(10, 4.8), layout="constrained")
    front = [max(rate for memory, rate in zip(memories, rates, strict=True) if memory <= m) for m in sorted(memories)]
    axes.plot(sorted(memories), front, color="0.6", linewidth=1, drawstyle="steps-post")
    drawn = axes.scatter(memories, rates, c=colors, cmap="viridis_r", vmin=0.0, zorder=3)
    figure.colorbar(drawn, label="loss over an fp32 wire, %: mean + spread of E5")
    # A number for each place, or several where points lie on each other; their names stand beside the chart.
    places: dict[tuple[int, int], list[int]] = {}
    for number, (memory, rate) in enumerate(zip(memories, rates, strict=True), 1):
        places.setdefault((round(15 * memory / max(memories)), round(20 * rate / max(rates))), []).append(number)
    for numbers in places.values():
        at = memories[numbers[0] - 1], rates[numbers[0] - 1]
        text = ", ".join(map(str, numbers))
        axes.annotate(text, at, textcoords="offset points", xytext=(-6, 5), ha="right", fontsize=9)
    names = [f"{number}  {name(outcome.candidate)}" for number, outcome in enumerate(plan.outcomes, 1)]
    handles = [axes.plot([], [], " ")[0] for _ in names]
    figure.legend(handles, names, loc="outside right upper", handlelength=0, fontsize=8, title="as in the table")
    axes.set(xlabel="memory of a GPU, GB (estimate)", ylabel="million tokens per second (predicted)")
    axes.set(xlim=(0, 1.08 * max(memories)), ylim=(0, 1.12 * max(rates)))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
