"""A plan in words and as a plot: the ranking, why the others are slower, and the command lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from megatron_zpp.planning.search.plan import Outcome, Plan

PARTS = {  # of StepTime: headings, and what one says of them
    "compute": ("compute", "computes"),
    "exposed_between": ("between nodes", "waits for links between nodes for"),
    "exposed_within": ("within", "waits for links within nodes for"),
    "compression": ("encoding", "encodes and decodes for"),
    "optimizer": ("optimizer", "runs the optimizer for"),
    "bubble": ("bubble", "waits for other stages for"),
    "exposed_islands": ("islands", "waits for other islands for"),
}
NEAR = 1.02  # times the fastest step: no difference that a prediction could tell


def table(plan: Plan, rows: int) -> list[str]:
    """Format the ``rows`` fastest candidates, one line each."""
    priced = plan.cluster.dollars_per_gpu_hour > 0
    headings = ["", "wire", "layout", "batch", "recomputed", "GB", "step, s"]
    has_islands = any(outcome.prediction.settings.distributed.islands > 1 for outcome in plan.outcomes)
    parts = [part for part in PARTS if part != "exposed_islands" or has_islands]
    headings += [PARTS[part][0] for part in parts] + ["tokens/s", "MFU"]
    headings += ["$/M tokens"] if priced else []
    headings += ["loss, %"]
    lines = [headings]
    for number, outcome in enumerate(plan.outcomes[:rows], 1):
        found = outcome.prediction
        training = found.settings.training
        cells = [str(number), outcome.candidate.wire.name, outcome.candidate.layout.name]
        cells += [f"{found.needs.micro_batches} x {training.micro_batch_size}", outcome.recompute]
        cells += [f"{found.needs.memory / 1e9:.1f}", f"{found.time.seconds:.3f}"]
        cells += [f"{getattr(found.time, part):.3f}" for part in parts]
        cells += [f"{found.tokens_per_second:,.0f}", f"{found.mfu:.1%}"]
        cells += [f"{found.dollars_per_million_tokens:.3f}"] if priced else []
        loss = outcome.candidate.wire.loss
        cells += [f"{loss[0]:+.2f} ± {loss[1]:.2f}" if loss is not None else ""]
        lines.append(cells)
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Align columns, words to the left and numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = (1, 2, 4)
    return [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def reasons(plan: Plan) -> list[str]:
    """Say why each of the others is slower than the first, or was refused."""
    lines = [f"{outcome.candidate.name}: {_why_slower(outcome, plan.outcomes[0])}" for outcome in plan.outcomes[1:]]
    return lines + [f"{refused.candidate.name}: {refused.reason}" for refused in plan.refused]


def _why_slower(outcome: Outcome, first: Outcome) -> str:
    """Name the part of the step, for the same samples, that costs most over the fastest."""
    mine, best = outcome.prediction.time, first.prediction.time
    parts = {part: getattr(mine, part) - getattr(best, part) for part in PARTS}
    worst = max(parts, key=lambda part: parts[part])
    slower = mine.seconds / best.seconds
    if slower < 1.005:
        return "as fast"
    said = PARTS[worst][1]
    return f"{slower:.2f} x the time: {said} {getattr(mine, worst):.3g} s, the fastest {getattr(best, worst):.3g} s"


def suggested(plan: Plan) -> Outcome:
    """Return the candidate that rounds least among those within ``NEAR`` of the fastest."""
    fastest = plan.outcomes[0].prediction.time.seconds
    near = [outcome for outcome in plan.outcomes if outcome.prediction.time.seconds <= NEAR * fastest]
    return min(near, key=lambda outcome: outcome.candidate.wire.rank)


def command(plan: Plan, outcome: Outcome, program: str, flags: Sequence[str]) -> str:
    """Return the command that starts the run on each node."""
    cluster = plan.cluster
    return (
        f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} {program} {' '.join(flags)} "
        f"{outcome.flags}"
    )


def plot(plan: Plan, path: Path) -> None:
    """Draw tokens per second over memory, the risk for the loss as color, and the Pareto front by name.

    Raises ImportError without matplotlib, ValueError if nothing fits.
    """
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
    colors = [outcome.candidate.wire.risk for outcome in plan.outcomes]
    figure, axes = pyplot.subplots(figsize=(10, 4.8), layout="constrained")
    # The Pareto front: nothing with as little memory is faster. plan.outcomes are ordered by their rates.
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
