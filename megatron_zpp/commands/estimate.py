"""What a training run needs, before it is started: memory of each rank, bytes between nodes, days.

    python tools/estimate.py --nodes 8 --ranks-per-node 8 --gpu A100 --vocabulary 50257 \\
        pretrain_gpt.py --preset gpt-13b --micro-batch-size 2 --global-batch-size 1024 --train-iters 20000 --bf16 ...

Takes the whole command of the trainer as it will be typed behind torchrun, starts nothing, and needs neither the data
nor a GPU. ``planning/needs/estimate.py`` counts; what it assumes is printed with it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.commands.common import given_architecture, report_errors
from megatron_zpp.families import ARCHITECTURES
from megatron_zpp.metrics.throughput import peak_tflops
from megatron_zpp.planning.needs.estimate import Cluster, Estimate, estimate, memory_and_traffic, short
from megatron_zpp.settings.flags import number
from megatron_zpp.settings.resolved import ResolvedSettings

PROGRAMS = {f"pretrain-{architecture.name}": architecture for architecture in ARCHITECTURES}


def report(settings: ResolvedSettings, found: Estimate, gpu: str) -> str:
    """All of it, in lines."""
    cluster = found.cluster
    lines = [
        f"{settings.architecture}, {found.parameters / 1e9:.3f} billion parameters{found.of_a_token}, on "
        f"{cluster.nodes} x {cluster.ranks_per_node} {gpu}",
        f"{found.tokens / 1e9:.1f} billion tokens in {found.steps:,} steps of {found.micro_batches} micro-batches a "
        f"rank; {found.flops_per_token * found.tokens:.2e} FLOPs",
        "",
        *memory_and_traffic(found),
        "",
        f"computing {short(found.compute_seconds)} s per step, at {cluster.mfu:.0%} (assumed) of "
        f"{cluster.peak_tflops:g} TFLOP/s",
        f"network   {short(found.network_seconds)} s per step, at {cluster.link_gbps:g} Gbit/s out of each node",
        f"in all    {found.duration()}: from all communication hidden behind computing to none",
        "",
        found.brief(),
    ]
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Estimate memory, traffic and time of a training run.", allow_abbrev=False
    )
    parser.add_argument(
        "--nodes", type=number(int, at_least=1, at_most=2**16), default=1, metavar="N", help="default 1"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=number(int, at_least=1, at_most=2**16),
        default=8,
        metavar="P",
        help="GPUs of each node; default 8",
    )
    parser.add_argument("--gpu", default="A100", metavar="NAME", help="kind of GPU, for its peak; default A100")
    parser.add_argument(
        "--mfu",
        type=number(float, above=0, at_most=1),
        default=0.4,
        metavar="X",
        help="share of the peak reached; default 0.4",
    )
    parser.add_argument(
        "--link-gbps", type=number(float, above=0), default=100, metavar="X", help="Gbit/s out of a node; default 100"
    )
    parser.add_argument(
        "--vocabulary",
        type=number(int, at_least=1),
        required=True,
        metavar="N",
        help="size of the tokenizer's vocabulary",
    )
    parser.add_argument(
        "--architecture", metavar="MODULE:NAME", help="what the trainer trains, where it is none of ours"
    )
    parser.add_argument("program", metavar="|".join(PROGRAMS), help="the trainer, and its flags")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.program = Path(args.program).stem.replace("_", "-")  # pretrain_gpt.py is the same as pretrain-gpt
    if args.architecture is None and args.program not in PROGRAMS:
        parser.error(f"{args.program} is not {' or '.join(PROGRAMS)}: give the trainer and its flags last")
    if args.architecture is not None and args.program in PROGRAMS:
        parser.error(f"{args.program} does not train --architecture {args.architecture}; leave one of them out")
    return args


def run(args: argparse.Namespace) -> tuple[ResolvedSettings, Estimate]:
    """Raises SettingsError or ValueError on a mistake."""
    architecture = given_architecture(args) or PROGRAMS[args.program]
    world_size = args.nodes * args.ranks_per_node
    settings = parse_settings(architecture, args.flags, world_size, note=lambda text: None, of_all_jobs=True)
    given = settings.logging.peak_tflops
    peak = given if given is not None else peak_tflops(args.gpu)
    if peak is None:
        raise ValueError(f"the peak of --gpu {args.gpu} is not known; give the trainer's --peak-tflops")
    gloo = settings.distributed.distributed_backend == "gloo"
    cluster = Cluster(
        args.nodes,
        args.ranks_per_node,
        peak,
        args.mfu,
        args.link_gbps,
        ring_passes=2 if gloo else 1,
    )
    return settings, estimate(architecture, settings, args.vocabulary, cluster)


def main() -> int:
    args = parse_arguments()
    return report_errors(lambda: print(report(*run(args), args.gpu)), (ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main())
