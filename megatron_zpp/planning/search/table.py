"""A plan in words: the ranking, why the others are behind, and the command lines."""

from __future__ import annotations

from collections.abc import Sequence

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
    """The fastest so many, one line each."""
    priced = plan.cluster.dollars_per_gpu_hour > 0
    headings = ["", "travel", "layout", "batch", "recomputed", "GB", "step, s"]
    has_islands = any(outcome.prediction.settings.distributed.islands > 1 for outcome in plan.outcomes)
    parts = [part for part in PARTS if part != "exposed_islands" or has_islands]
    headings += [PARTS[part][0] for part in parts] + ["tokens/s", "MFU"]
    headings += ["$/M tokens"] if priced else []
    headings += ["loss, %"]
    lines = [headings]
    for number, outcome in enumerate(plan.outcomes[:rows], 1):
        found = outcome.prediction
        training = found.settings.training
        cells = [str(number), outcome.candidate.travel.name, outcome.candidate.layout.name]
        cells += [f"{found.needs.micro_batches} x {training.micro_batch_size}", outcome.recompute]
        cells += [f"{found.needs.memory / 1e9:.1f}", f"{found.time.seconds:.3f}"]
        cells += [f"{getattr(found.time, part):.3f}" for part in parts]
        cells += [f"{found.tokens_per_second:,.0f}", f"{found.mfu:.1%}"]
        cells += [f"{found.dollars_per_million_tokens:.3f}"] if priced else []
        loss = outcome.candidate.travel.loss
        cells += [f"{loss[0]:+.2f} ± {loss[1]:.2f}" if loss is not None else ""]
        lines.append(cells)
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns, the first words to the left and numbers to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = (1, 2, 4)
    return [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def reasons(plan: Plan) -> list[str]:
    """Why each of the others is behind the first, or not there."""
    lines = [f"{outcome.candidate.name}: {why_behind(outcome, plan.outcomes[0])}" for outcome in plan.outcomes[1:]]
    return lines + [f"{refused.candidate.name}: {refused.reason}" for refused in plan.refused]


def why_behind(outcome: Outcome, first: Outcome) -> str:
    """The part of the step, for the same samples, that costs most over the fastest."""
    mine, best = outcome.prediction.time, first.prediction.time
    parts = {part: getattr(mine, part) - getattr(best, part) for part in PARTS}
    worst = max(parts, key=lambda part: parts[part])
    slower = mine.seconds / best.seconds
    if slower < 1.005:
        return "as fast"
    said = PARTS[worst][1]
    return f"{slower:.2f} x the time: {said} {getattr(mine, worst):.3g} s, the fastest {getattr(best, worst):.3g} s"


def suggested(plan: Plan) -> Outcome:
    """Of those that are as fast as the fastest, as far as predictions can tell, the one that rounds least."""
    fastest = plan.outcomes[0].prediction.time.seconds
    near = [outcome for outcome in plan.outcomes if outcome.prediction.time.seconds <= NEAR * fastest]
    return min(near, key=lambda outcome: outcome.candidate.travel.place)


def command(plan: Plan, outcome: Outcome, program: str, flags: Sequence[str]) -> str:
    """What starts it on each node."""
    cluster = plan.cluster
    return (
        f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} {program} {' '.join(flags)} "
        f"{outcome.flags}"
    )
