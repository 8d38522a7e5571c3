"""What a run would do on a cluster, with which settings: layouts and settings ranked by tokens per second.

    python tools/plan.py --cluster 64x8xH100@100 --vocabulary 128256 \\
        pretrain_llama.py --preset llama-8b --global-batch-size 4096

Takes the decided part of the trainer's command, and starts nothing. What the command leaves open is tried: how weights
and gradients are sent, micro-batches, recomputation and layouts. ``--huggingface DIR`` takes the model from a
config.json; the other flags then follow ``--``.

``--cluster`` is nodes x GPUs of each x their kind @ Gbit/s out of a node, by data sheets, or a file that
``tools/measure_cluster.py`` wrote. ``2x32x8xH100@400@10`` are two sites of 32 nodes each, whose link has 10 Gbit/s;
with ``--islands 2`` among the trainer's flags each is an island.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from megatron_zpp.commands.common import report_errors
from megatron_zpp.commands.estimate import PROGRAMS, program_name
from megatron_zpp.convert.hf import files
from megatron_zpp.families import ARCHITECTURES, Architecture
from megatron_zpp.planning.cluster import parse_cluster
from megatron_zpp.planning.needs.estimate import memory_and_traffic
from megatron_zpp.planning.search.plan import USABLE, Plan, make_plan
from megatron_zpp.planning.search.report import command, plot, reasons, suggested, table
from megatron_zpp.settings.flags import number


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rank settings of a run on a cluster.", allow_abbrev=False)
    add, count = parser.add_argument, number(int, at_least=1)
    add("--cluster", required=True, metavar="WORD|FILE", help="as 64x8xH100@100, or a file of measure_cluster")
    add("--vocabulary", type=count, metavar="N", help="size of the tokenizer's vocabulary")
    add("--huggingface", type=Path, metavar="DIR", help="the model: a folder with config.json")
    price, share = number(float, above=0), number(float, above=0, at_most=1)
    add("--dollars-per-gpu-hour", type=price, metavar="X", help="price, for cost per token")
    memory = f"share of a GPU's memory that tensors may take; default {USABLE}"
    add("--usable-memory", type=share, default=USABLE, metavar="X", help=memory)
    add("--rows", type=count, default=15, metavar="N", help="rows of the table; default 15")
    commands = "print N commands: the suggested one, then the fastest; default 1"
    add("--commands", type=count, default=1, metavar="N", help=commands)
    add("--plot", type=Path, metavar="FILE", help="also draw tokens/s over memory; needs matplotlib")
    programs = f"{'|'.join(PROGRAMS)} FLAGS"
    add("command", nargs=argparse.REMAINDER, metavar=programs, help="the trainer, and its flags")
    args = parser.parse_args(argv)
    args.program, args.flags = None, [word for word in args.command if word != "--"]
    if args.huggingface is None:
        if not args.command:
            parser.error("which model? give the trainer and its flags last, or --huggingface DIR")
        program, *args.flags = args.command
        args.program = program_name(program)
        if args.program not in PROGRAMS:
            parser.error(f"{args.program} is not {' or '.join(PROGRAMS)}: give the trainer and its flags last")
        if args.vocabulary is None:
            parser.error("give --vocabulary, the size of the tokenizer's vocabulary")
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
    length = [] if "--seq-length" in args.flags else ["--seq-length", str(positions)]
    return architecture, [*model, *length, *args.flags], config.vocab_size


def report(plan: Plan, program: str, flags: list[str], rows: int, commands: int) -> list[str]:
    """Format the whole plan as lines."""
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
    needs = best.prediction.needs
    lines += [f"{needs.tokens / needs.steps:,.0f} tokens in a step", "", *table(plan, rows), "", *reasons(plan)]
    lines += ["", f"suggested: {best.candidate.name}", "", *memory_and_traffic(needs)]
    for outcome in [best, *plan.outcomes][:commands]:
        lines += ["", f"{outcome.candidate.name}, on each node, with your data, tokenizer and rendezvous:"]
        lines += [f"  {command(plan, outcome, program, flags)}"]
    return lines


def run(args: argparse.Namespace) -> None:
    """Print the plan. Raises ValueError, OSError or ImportError on a mistake."""
    cluster = parse_cluster(args.cluster)
    if args.dollars_per_gpu_hour is not None:
        cluster = dataclasses.replace(cluster, dollars_per_gpu_hour=args.dollars_per_gpu_hour)
    architecture, flags, vocabulary = find_model(args)
    plan = make_plan(architecture, flags, vocabulary, cluster, args.usable_memory)
    print("\n".join(report(plan, architecture.script, flags, args.rows, args.commands)))
    if args.plot is not None:
        plot(plan, args.plot)
        print(f"\nplot: {args.plot}")


def main() -> int:
    args = parse_arguments()
    return report_errors(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
