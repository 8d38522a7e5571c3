"""Tokens per second over memory, the risk for the loss as colour, the Pareto front by name."""

from __future__ import annotations

import math
from pathlib import Path

from megatron_zpp.planning.search.plan import Plan


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
    # Those that nothing with as little memory is faster than; plan.outcomes are in the order of their rates.
    front = [i for i, memory in enumerate(memories) if memory < min([*memories[:i], math.inf])]
    axes.step([memories[i] for i in front], [rates[i] for i in front], "0.6", linewidth=1, where="pre")
    drawn = axes.scatter(memories, rates, c=colors, cmap="viridis_r", vmin=0.0, zorder=3)
    figure.colorbar(drawn, label="loss over an fp32 wire, %: mean + spread of E5")
    for i in front:
        at = memories[i], rates[i]
        axes.annotate(str(i + 1), at, textcoords="offset points", xytext=(-6, 5), ha="right", fontsize=9)
    names = [f"{i + 1}  {plan.outcomes[i].candidate.name}" for i in front]
    handles = [axes.plot([], [], " ")[0] for _ in names]
    figure.legend(
        handles, names, loc="outside right upper", handlelength=0, fontsize=8, title="fastest for their memory"
    )
    axes.set(xlabel="memory of a GPU, GB (estimate)", ylabel="million tokens per second (predicted)")
    axes.set(xlim=(0, 1.08 * max(memories)), ylim=(0, 1.12 * max(rates)))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
