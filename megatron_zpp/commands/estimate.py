"""Estimate what a training run needs before it starts: memory of each rank, bytes between nodes, days.

python tools/estimate.py --nodes 8 --ranks-per-node 8 --gpu A100 --vocabulary 50257 pretrain_gpt.py FLAGS
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.arguments.parse import parse_settings, stated_flags
from megatron_zpp.commands.common import given_architecture
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import ARCHITECTURES
from megatron_zpp.metrics.throughput import peak_tflops
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import Estimate, estimate, memory_and_traffic
from megatron_zpp.planning.search import filled_in
from megatron_zpp.settings.flags import number
from megatron_zpp.zeropp.recipes import AUTO

PROGRAMS = {f"pretrain-{architecture.name}": architecture for architecture in ARCHITECTURES}


@dataclass(frozen=True)
class RunTime:
    """The time of a run at assumed rates."""

    needs: Estimate
    peak_tflops: float  # dense, of one device, in 16 bit
    mfu: float  # share of the peak that the model's arithmetic reaches
    link_gbps: float  # out of a node, all its links together

    @property
    def compute_seconds(self) -> float:
        """Seconds of arithmetic per step."""
        rate = self.needs.grid.world_size * self.peak_tflops * 1e12 * self.mfu
        return self.needs.tokens / self.needs.steps * self.needs.flops_per_token / rate

    @property
    def network_seconds(self) -> float:
        """Seconds per step on a node's links."""
        return self.needs.sent_out_of_node * 8 / (self.link_gbps * 1e9)

    def duration(self) -> str:
        """Format the run's time: from complete overlap of communication and computing to none."""
        least = self.needs.steps * max(self.compute_seconds, self.network_seconds)
        most = self.needs.steps * (self.compute_seconds + self.network_seconds)
        unit, seconds = next((u for u in (("days", 86400), ("hours", 3600)) if most >= u[1]), ("minutes", 60))
        numbers = dict.fromkeys(_short(duration / seconds) for duration in (least, most))
        return f"{' to '.join(numbers)} {unit}"

    def brief(self) -> str:
        """Format everything in one line; the scripts in examples/ quote it."""
        sent = _short(self.needs.sent_out_of_node / 1e9)
        return (
            f"{_short(self.needs.memory / 1e9)} GB a GPU; a node sends {sent} GB per "
            f"step in {_short(self.network_seconds)} s, computing takes {_short(self.compute_seconds)} s; "
            f"{self.duration()}"
        )


def _short(number: float) -> str:
    """Format two digits, or the whole part: 0.028, 3.1, 48, 603."""
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def report(time: RunTime, gpu: str) -> str:
    """Format the whole estimate as text."""
    needs = time.needs
    lines = [
        f"{needs.architecture.name} on {needs.grid.nodes} x {needs.grid.ranks_per_node} {gpu}",
        needs.length,
        *memory_and_traffic(needs),
        "",
        f"computing {_short(time.compute_seconds)} s per step, at {time.mfu:.0%} (assumed) of "
        f"{time.peak_tflops:g} TFLOP/s; {needs.flops_per_token * needs.tokens:.2e} FLOPs in all",
        f"network   {_short(time.network_seconds)} s per step, at {time.link_gbps:g} Gbit/s out of each node",
        f"in all    {time.duration()}: from all communication hidden behind computing to none",
        "",
        time.brief(),
    ]
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    about = "Estimate memory, traffic and time of a training run."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    add, ranks = parser.add_argument, number(int, at_least=1, at_most=2**16)
    add("--nodes", type=ranks, default=1, metavar="N", help="number of nodes; default 1")
    add("--ranks-per-node", type=ranks, default=8, metavar="P", help="GPUs of each node; default 8")
    add("--gpu", default="A100", metavar="NAME", help="kind of GPU; default A100")
    share, rate = number(float, above=0, at_most=1), number(float, above=0)
    add("--mfu", type=share, default=0.4, metavar="X", help="share of the peak that the run reaches; default 0.4")
    add("--link-gbps", type=rate, default=100, metavar="X", help="Gbit/s out of a node; default 100")
    vocabulary = number(int, at_least=1)
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


def run(args: argparse.Namespace) -> RunTime:
    """Estimate the run. Raises SettingsError or ValueError on a mistake."""
    architecture = given_architecture(args) or PROGRAMS[args.program]
    world_size = args.nodes * args.ranks_per_node
    per_node = args.ranks_per_node
    flags = filled_in(args.flags, stated_flags(architecture, args.flags), args.vocabulary)
    settings = parse_settings(architecture, flags, world_size, lambda text: None, ranks_per_node=per_node)
    if settings.zero.recipe == AUTO:
        raise ValueError("--zeropp auto decides when the run starts, by its links: name a recipe, or ask for a plan")
    peak = settings.logging.peak_tflops or peak_tflops(args.gpu)
    if peak is None:
        raise ValueError(f"the peak of --gpu {args.gpu} is not known; give the trainer's --peak-tflops")
    grid = RankGrid(args.nodes, args.ranks_per_node, settings.distributed)
    return RunTime(estimate(architecture, settings, args.vocabulary, grid), peak, args.mfu, args.link_gbps)


@reports_errors
def main() -> None:
    args = parse_arguments()
    print(report(run(args), args.gpu))
