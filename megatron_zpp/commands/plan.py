"""Rank layouts and settings of a run on a cluster by predicted tokens per second. Starts nothing.

``--cluster`` is nodes x GPUs of each x their kind @ Gbit/s out of a node, or a file of ``--measure``;
``2x32x8xH100@400@10`` are two sites of 32 nodes each, with a link of 10 Gbit/s.
"""

import argparse
import dataclasses
import shlex
import sys
import textwrap
from pathlib import Path

from megatron_zpp.arguments.parse import stated_flags
from megatron_zpp.commands import measure_cluster, suggest_settings
from megatron_zpp.commands.estimate import PROGRAMS, program_name
from megatron_zpp.commands.needs import memory_and_traffic
from megatron_zpp.convert.hf import files
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import ARCHITECTURES, Architecture
from megatron_zpp.metrics.history import find_runs, read_training
from megatron_zpp.planning.cluster import LIKE, Cluster, like_program, parse_cluster
from megatron_zpp.planning.predict import calibrate
from megatron_zpp.planning.search import USABLE, Outcome, Plan, make_plan
from megatron_zpp.planning.step import StepTime
from megatron_zpp.settings.flags import local_path, number
from megatron_zpp.zeropp.recipes import AUTO, LOSS_BUDGET

PARTS = {  # fields of StepTime: heading, and verb phrase
    "compute": ("compute", "computes"),
    "exposed_between": ("between", "waits for links between nodes for"),
    "exposed_within": ("within", "waits for links within nodes for"),
    "compression": ("encoding", "encodes and decodes for"),
    "optimizer": ("optimizer", "runs the optimizer for"),
    "bubble": ("bubble", "waits for other stages for"),
    "exposed_islands": ("islands", "waits for other islands for"),
}
SHOWN = ("compute", "exposed_between", "exposed_within")  # the others share a column
WIDTH = 100
NEAR = 1.04  # times the fastest step: the median error on published runs (docs/evidence/planner.md)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    about = "Rank settings of a run on a cluster. plan --measure --help and plan --try --help list two programs more."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    add, count = parser.add_argument, number(int, at_least=1)
    add("--cluster", required=True, metavar="WORD|FILE", help="as 64x8xH100@100, or a file of --measure")
    add("--vocabulary", type=count, metavar="N", help="size of the tokenizer's vocabulary")
    add("--huggingface", type=local_path(Path), metavar="DIR", help="the model: a folder with config.json")
    price, share = number(float, above=0), number(float, above=0, at_most=1)
    add("--dollars-per-gpu-hour", type=price, metavar="X", help="price, for cost per token")
    add("--like", choices=LIKE, help="predict that program, not ours, on a cluster by data sheets")
    own_run = "take the rate of arithmetic from a run of this program: the folder of its metrics.jsonl"
    add("--calibrate-from", type=local_path(Path), metavar="DIR", help=own_run)
    budget = f"percent of loss that the suggested plan may cost at most; default {LOSS_BUDGET}"
    add("--loss-budget", type=number(float, at_least=0), default=LOSS_BUDGET, metavar="X", help=budget)
    memory = f"share of a GPU's memory that tensors may take; default {USABLE}"
    add("--usable-memory", type=share, default=USABLE, metavar="X", help=memory)
    add("--rows", type=count, default=10, metavar="N", help="rows of the table; default 10")
    add("--all", action="store_true", help="list all, why each is slower or refused, and what the suggested one needs")
    commands = "print N commands: the suggested one, then the fastest; default 1"
    add("--commands", type=count, default=1, metavar="N", help=commands)
    programs = f"{'|'.join(PROGRAMS)} FLAGS"
    add("command", nargs=argparse.REMAINDER, metavar=programs, help="the trainer, and its flags")
    args = parser.parse_args(argv)
    words = [word for word in args.command if word != "--"]
    args.program = None
    if args.huggingface is None:
        if not words:
            parser.error("which model? give the trainer and its flags last, or --huggingface DIR")
        args.program = program_name(words.pop(0))
        if args.program not in PROGRAMS:
            parser.error(f"{args.program} is not {' or '.join(PROGRAMS)}: give the trainer and its flags last")
        if args.vocabulary is None:
            parser.error("give --vocabulary, the size of the tokenizer's vocabulary")
    # Without --zeropp auto, in whose place a plan names a recipe.
    autos = [i for i, word in enumerate(words) if word == "--zeropp" and words[i + 1 : i + 2] == [AUTO]]
    args.flags = [w for i, w in enumerate(words) if w != f"--zeropp={AUTO}" and i not in autos and i - 1 not in autos]
    return args


def find_model(args: argparse.Namespace) -> tuple[Architecture, list[str], int]:
    """Return the architecture, the trainer's flags that describe the run, and the vocabulary."""
    if args.huggingface is None:
        return PROGRAMS[args.program], args.flags, args.vocabulary
    files.require_packages()
    hf = files.read_config(args.huggingface, files.model_types(ARCHITECTURES))
    architecture, config, positions = files.from_hf_config(hf, ARCHITECTURES)
    assert architecture.flags is not None
    model = architecture.flags(config, positions)
    length = [] if "--seq-length" in stated_flags(architecture, args.flags) else ["--seq-length", str(positions)]
    return architecture, [*model, *length, *args.flags], config.vocab_size


def report(plan: Plan, program: str, flags: list[str], rows: int, commands: int, shows_all: bool = False) -> list[str]:
    """Format the plan as lines: the suggested one first, and why."""
    cluster = plan.cluster
    lines = [
        f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}: {cluster.flops_per_second / 1e12:.0f} TFLOP/s of "
        f"{cluster.peak_tflops:g}, {cluster.within_gbytes:.3g} GB/s within a node, {cluster.between_gbits:.3g} Gbit/s "
        "out of it"
        + (f", {cluster.site_gbits:.3g} Gbit/s out of each of {cluster.sites} sites" if cluster.sites > 1 else "")
    ]
    if not plan.outcomes:
        return [*lines, "", "nothing fits: more GPUs, or a smaller model or batch", "", *reasons(plan)]
    best = suggested(plan)
    lines += ["", *textwrap.wrap(why(plan, best), WIDTH)]
    torchrun = f"torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} {program}"
    for outcome in [best, *plan.outcomes][:commands]:
        lines += ["", f"{outcome.candidate.name}, on each node, with your data, tokenizer and rendezvous:"]
        lines += [f"  {torchrun} {shlex.join(flags)} {outcome.flags}"]
    needs = best.prediction.needs
    tokens = f"{needs.tokens / needs.steps:,.0f} tokens in a step; seconds of a step and its parts; GB of a GPU"
    lines += ["", tokens, *table(plan, len(plan.outcomes) if shows_all else rows)]
    if shows_all:
        return [*lines, "", *reasons(plan), "", f"{best.candidate.name} needs", *memory_and_traffic(needs)]
    more = max(0, len(plan.outcomes) - rows)
    if needs.settings.precision.fp8_format is not None:
        lines += ["products are timed as in bf16: how much faster float8 makes them was never measured here"]
    return [*lines, f"--all lists {more} more, and {len(plan.refused)} that were refused, with the reasons"]


def why(plan: Plan, best: Outcome) -> str:
    """Say in a few sentences what is suggested, why, and what ZeRO-3 would take."""
    fastest, found, loss = plan.allowed[0], best.prediction, best.candidate.wire.recipe.loss
    said = f"suggested: {best.candidate.name}: {found.time.seconds:.3g} s a step, {found.tokens_per_second:,.0f} tokens"
    said += f"/s, MFU {found.mfu:.0%}{f', loss {loss[0]:+.2f} ± {loss[1]:.2f} % in the study' if loss else ''}. "
    if best is plan.outcomes[0]:
        said += "It is the fastest. "
    elif best is not fastest:
        near = f"the plans within {NEAR - 1:.0%} of the fastest ({fastest.candidate.name}"
        said += f"It rounds least of {near}: {fastest.prediction.time.seconds:.3g} s). "
    if plan.outcomes[0] is not fastest:
        faster, risk = plan.outcomes[0], plan.outcomes[0].candidate.wire.recipe.risk
        said += f"{faster.candidate.name} takes {faster.prediction.time.seconds:.3g} s, and may cost {risk:.2g} % of "
        said += f"loss, above --loss-budget {plan.loss_budget:g}. "
    # ZeRO-3 in its fastest layout; None if it does not fit.
    plain = next((outcome for outcome in plan.outcomes if outcome.candidate.wire.name == "ZeRO-3"), None)
    if plain is not None and plain is not best:
        time = plain.prediction.time
        said += f"{plain.candidate.name} takes {time.seconds:.3g} s: it {slowest_part(time, found.time)}. "
    return said.rstrip()


def slowest_part(time: StepTime, least: StepTime) -> str:
    """Name the part of a step that takes most above the other step's."""
    worst = max(PARTS, key=lambda part: getattr(time, part) - getattr(least, part))
    return f"{PARTS[worst][1]} {getattr(time, worst):.3g} s, against {getattr(least, worst):.3g} s"


def table(plan: Plan, rows: int) -> list[str]:
    """Format the suggested candidate and then the fastest others, one line each, ``rows`` in all."""
    has_price = plan.cluster.dollars_per_gpu_hour > 0
    others = [part for part in PARTS if part not in SHOWN]
    lines = [["sent", "layout", "batch", "recomp.", "GB", "step", *(PARTS[part][0] for part in SHOWN), "other", "MFU"]]
    lines[0] += ["$/M tokens"] if has_price else []
    best = suggested(plan)
    for outcome in [best, *(outcome for outcome in plan.outcomes if outcome is not best)][:rows]:
        found = outcome.prediction
        cells = [outcome.candidate.wire.name, outcome.candidate.layout.name]
        cells += [f"{found.needs.micro_batches} x {found.needs.settings.training.micro_batch_size}", outcome.recompute]
        seconds = [found.time.seconds, *(getattr(found.time, part) for part in SHOWN)]
        seconds += [sum(getattr(found.time, part) for part in others)]
        cells += [f"{found.needs.memory / 1e9:.1f}", *(f"{each:.3g}" for each in seconds), f"{found.mfu:.1%}"]
        lines.append(cells + ([f"{found.dollars_per_million_tokens:.3f}"] if has_price else []))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pads = [str.ljust if i in (0, 1, 3) else str.rjust for i in range(len(widths))]  # words left, numbers right
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)).rstrip()
        for line in lines
    ]


def reasons(plan: Plan) -> list[str]:
    """Name the part of the step that slows each of the others most, for the same samples, or why it was refused."""
    lines = []
    for outcome in plan.outcomes[1:]:
        time, best = outcome.prediction.time, plan.outcomes[0].prediction.time
        slower, why = time.seconds / best.seconds, "as fast"
        if slower >= 1.005:
            why = f"{slower:.2f} x the time: {slowest_part(time, best)}"
        lines.append(f"{outcome.candidate.name}: {why}")
    return lines + [f"{refused.candidate.name}: {refused.reason}" for refused in plan.refused]


def suggested(plan: Plan) -> Outcome:
    """Return the candidate that rounds least among those within the loss budget and ``NEAR`` of the fastest."""
    fastest = plan.allowed[0].prediction.time.seconds
    near = [outcome for outcome in plan.allowed if outcome.prediction.time.seconds <= NEAR * fastest]
    return min(near, key=lambda outcome: outcome.candidate.wire.rank)


def run(args: argparse.Namespace) -> None:
    cluster = parse_cluster(args.cluster)
    if args.dollars_per_gpu_hour is not None:
        cluster = dataclasses.replace(cluster, dollars_per_gpu_hour=args.dollars_per_gpu_hour)
    if args.like is not None:
        cluster = like_program(cluster, args.like)
    if args.calibrate_from is not None:
        cluster = calibrate_from(cluster, args.calibrate_from)
    architecture, flags, vocabulary = find_model(args)
    plan = make_plan(architecture, flags, vocabulary, cluster, args.usable_memory)
    plan = dataclasses.replace(plan, loss_budget=args.loss_budget)
    print("\n".join(report(plan, architecture.script, flags, args.rows, args.commands, args.all)))


def calibrate_from(cluster: Cluster, folder: Path) -> Cluster:
    """Calibrate by the run whose metrics.jsonl is in a folder. Raises ValueError."""
    found = find_runs([folder])
    if len(found) > 1:
        raise ValueError(f"--calibrate-from {folder} holds {len(found)} runs: give the folder of one")
    ((name, path),) = found.items()
    calibrated = calibrate(cluster, read_training(name, path))
    reached = f"{name}: matrix products reach {calibrated.efficiency:.1%} of the peak"
    print(f"{reached}, {cluster.efficiency:.1%} was assumed")
    return calibrated


@reports_errors
def main() -> int:
    for word, program in (("--measure", measure_cluster), ("--try", suggest_settings)):
        if sys.argv[1:2] == [word]:
            sys.argv[:2] = [f"{sys.argv[0]} {word}"]
            return program.main()
    run(parse_arguments())
    return 0
