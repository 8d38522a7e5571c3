"""Estimate what a training run needs before it starts: memory of each rank, bytes between nodes, days."""

import argparse
from pathlib import Path

from megatron_zpp.arguments.parse import parse_settings, stated_flags
from megatron_zpp.commands.common import given_architecture
from megatron_zpp.commands.needs import memory_and_traffic
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import ARCHITECTURES
from megatron_zpp.planning.cluster import default_cluster
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import estimate
from megatron_zpp.planning.predict import Prediction, predict
from megatron_zpp.planning.search import filled_in
from megatron_zpp.settings.flags import number
from megatron_zpp.zeropp.recipes import AUTO

PROGRAMS = {f"pretrain-{architecture.name}": architecture for architecture in ARCHITECTURES}


def _short(number: float) -> str:
    """Format two digits, or the whole part: 0.028, 3.1, 48, 603."""
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def brief(found: Prediction) -> str:
    """Format memory, traffic and time in one line; the scripts in examples/ quote it."""
    needs, step = found.needs, found.time.seconds
    run = needs.steps * step
    unit, seconds = next((u for u in (("days", 86400), ("hours", 3600)) if run >= u[1]), ("minutes", 60))
    return (
        f"{_short(needs.memory / 1e9)} GB a GPU; a node sends {_short(needs.sent_per_node / 1e9)} GB per step; "
        f"a step takes {_short(step)} s, the run {_short(run / seconds)} {unit}"
    )


def report(found: Prediction) -> str:
    """Format the whole estimate as text."""
    needs, time = found.needs, found.time
    lines = [
        f"{needs.architecture.name} on {needs.grid.nodes} x {needs.grid.ranks_per_node} {found.cluster.gpu}",
        *memory_and_traffic(needs),
        "",
        f"a step takes {_short(time.seconds)} s: {_short(time.compute)} s compute, {_short(time.exposed_between)} s "
        f"wait for links between nodes, {_short(time.exposed_within)} s within them; MFU {found.mfu:.0%} of "
        f"{found.cluster.peak_tflops:g} TFLOP/s; {needs.flops_per_token * needs.tokens:.2e} FLOPs in all",
        "",
        brief(found),
    ]
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    about = "Estimate memory, traffic and time of a training run."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    add, ranks = parser.add_argument, number(int, at_least=1, at_most=2**16)
    add("--nodes", type=ranks, default=1, metavar="N", help="number of nodes; default 1")
    add("--ranks-per-node", type=ranks, default=8, metavar="P", help="GPUs of each node; default 8")
    add("--gpu", default="A100", metavar="NAME", help="kind of GPU; default A100")
    vocabulary, rate = number(int, at_least=1), number(float, above=0)
    add("--link-gbps", type=rate, default=100, metavar="X", help="Gbit/s out of a node; default 100")
    add("--vocabulary", type=vocabulary, required=True, metavar="N", help="size of the tokenizer's vocabulary")
    add("--architecture", metavar="MODULE:NAME", help="what the trainer trains, if it is not built in")
    add("program", metavar="|".join(PROGRAMS), help="the trainer, and its flags")
    add("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.program = program_name(args.program)
    if args.architecture is None and args.program not in PROGRAMS:
        parser.error(f"{args.program} is not {' or '.join(PROGRAMS)}: give the trainer and its flags last")
    if args.architecture is not None and args.program in PROGRAMS:
        parser.error(f"{args.program} does not train --architecture {args.architecture}; leave one of them out")
    return args


def program_name(word: str) -> str:
    """Return the name in ``PROGRAMS``: pretrain_gpt.py is the same as pretrain-gpt."""
    return Path(word).stem.replace("_", "-")


def run(args: argparse.Namespace) -> Prediction:
    architecture = given_architecture(args) or PROGRAMS[args.program]
    world_size = args.nodes * args.ranks_per_node
    per_node = args.ranks_per_node
    flags = filled_in(args.flags, stated_flags(architecture, args.flags), args.vocabulary)
    settings = parse_settings(architecture, flags, world_size, lambda text: None, ranks_per_node=per_node)
    if settings.zero.recipe == AUTO:
        raise ValueError("--zeropp auto decides when the run starts, by its links: name a recipe, or ask for a plan")
    cluster = default_cluster(args.nodes, args.ranks_per_node, args.gpu, args.link_gbps)
    grid = RankGrid(args.nodes, args.ranks_per_node, settings.distributed)
    return predict(cluster, estimate(architecture, settings, args.vocabulary, grid))


@reports_errors
def main() -> None:
    print(report(run(parse_arguments())))
