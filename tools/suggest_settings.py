"""Suggests how weights and gradients should travel: trains your model on your data for a few hundred steps with each of
some settings, emulated in one process, and ranks them by loss against bytes.

    python tools/suggest_settings.py gpt --emulate-ranks 16 --emulate-nodes 4 --link-gbps 25 -- \\
        --num-layers 12 --hidden-size 768 ... --data-path PREFIX

or your own settings: ``--try "--zero-quantized-weights --zero-weight-bits 6"``, as often as you like.

What follows ``--`` are the flags of pretrain_gpt.py or pretrain_llama.py as they would be given on the cluster. All
settings see the same data in the same order. The first one, plain ZeRO-3, is trained again on the same data with
initial weights that are 0.1 % larger: what differs between the two is noise. Without a GPU, ZeRO-3's bytes are those of
gloo, whose reduce-scatter is an all-reduce: its gradients count twice what NCCL sends of them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from megatron_zpp.training.arguments import parse_settings
from megatron_zpp.training.log_reader import BETWEEN, RunLog, parse_log

ROOT = Path(__file__).parents[1]
ALL = "--zero-quantized-weights --zero-quantized-gradients"
LOCO = "--zeropp-loco"
DIFFERENCES = "--zero-weight-difference-bits 4"
CONTROL = "ZeRO-3"
SETTINGS = {  # from what sends most to what sends least; hpZ is added to all
    "8-bit weights, 8-bit gradients": f"{ALL} --zero-gradient-bits 8",
    "8-bit weights, 4-bit gradients": ALL,
    "8-bit weights, 4-bit gradients, LoCo": f"{ALL} {LOCO}",
    "4-bit weight differences, 4-bit gradients, LoCo": f"{ALL} {LOCO} {DIFFERENCES}",
    "the same in gradient blocks of 1024": f"{ALL} {LOCO} {DIFFERENCES} --zero-gradient-block-size 1024",
    "4-bit weight differences, 3-bit gradients, LoCo": f"{ALL} {LOCO} {DIFFERENCES} --zero-gradient-bits 3",
    "4-bit weight differences, 2-bit gradients, LoCo": f"{ALL} {LOCO} {DIFFERENCES} --zero-gradient-bits 2",
}


@dataclass(frozen=True)
class Outcome:
    """What a setting did."""

    name: str
    flags: str
    loss: float  # training loss, mean over the last quarter of the run
    bytes_per_step: float  # that a node sends


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Rank ZeRO++ and LoCo settings by loss against bytes, on your model and data.",
        epilog="After --: the flags of pretrain_gpt.py or pretrain_llama.py.",
        allow_abbrev=False,
    )
    parser.add_argument("architecture", choices=("gpt", "llama"))
    parser.add_argument("--emulate-ranks", type=int, default=8, metavar="W", help="GPUs of the cluster; default 8")
    parser.add_argument("--emulate-nodes", type=int, default=2, metavar="N", help="its nodes; default 2")
    parser.add_argument("--iterations", type=int, default=200, metavar="K", help="steps of each setting; default 200")
    parser.add_argument(
        "--link-gbps", type=float, metavar="R", help="a node's link, for seconds instead of bytes alone"
    )
    parser.add_argument("--try", action="append", dest="tried", metavar="FLAGS", help="a setting, instead of ours")
    words = sys.argv[1:]
    separator = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(words[:separator]), words[separator + 1 :]
    if not flags:
        parser.error("give the flags of the run after --")
    try:
        outcomes, noise = measure(args, flags)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(outcomes, noise, args.emulate_nodes, args.link_gbps))
    best = suggest(outcomes, noise)
    print(f"\nSuggested: {best.name}, the fewest bytes of those whose loss is within the noise:\n  {best.flags}")
    return 0


def measure(args: argparse.Namespace, flags: list[str]) -> tuple[list[Outcome], float | None]:
    """Every setting's outcome, and the noise: what slightly larger initial weights do to the first one's loss.

    None with --finetune, whose initial weights are the checkpoint's.
    """
    ranks, nodes = args.emulate_ranks, args.emulate_nodes
    if args.iterations < 20:
        raise ValueError(f"--iterations {args.iterations} is too short to tell settings apart: give 20 or more")
    if nodes < 2 or ranks % nodes:
        raise ValueError(
            f"--emulate-ranks {ranks} on --emulate-nodes {nodes}: give 2 nodes or more that divide the ranks"
        )
    common = ["--emulate-ranks", str(ranks), "--emulate-nodes", str(nodes)]
    common += f"--train-iters {args.iterations} --log-interval 1 --eval-iters 0 --zero-stage 3".split()
    per_node = ranks // nodes
    settings = {setting: setting for setting in args.tried} if args.tried else SETTINGS
    all_flags = {CONTROL: f"--zero-ranks-per-node {per_node}"}
    all_flags |= {name: f"--zero-hpz-partition-size {per_node} {setting}" for name, setting in settings.items()}
    for setting in all_flags.values():  # a mistake comes to light before anything is trained
        parsed = parse_settings(args.architecture, [*flags, *common, *setting.split()], note=lambda _: None)
        checkpoint, logging = parsed.checkpoint, parsed.logging
        writes = checkpoint.save or logging.tensorboard_dir or logging.wandb_project
        if writes or (checkpoint.load and not checkpoint.finetune):
            raise ValueError(
                "every setting starts anew: leave --save, --tensorboard-dir and --wandb-project out; "
                "--load only with --finetune"
            )
    outcomes, noise = [], None
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=len(all_flags) + (not checkpoint.finetune))
        for name, setting in all_flags.items():
            log = train(args.architecture, [*flags, *common, *setting.split()])
            outcomes.append(Outcome(name, setting, final_loss(log), log.lines[-1][BETWEEN] * 1e6 / nodes))
            bar.advance(task)
        if not checkpoint.finetune:
            larger_weights = ["--init-method-std", str(parsed.model.init_method_std * 1.001)]
            log = train(args.architecture, [*flags, *common, *all_flags[CONTROL].split(), *larger_weights])
            noise = abs(final_loss(log) - outcomes[0].loss)
            bar.advance(task)
    return outcomes, noise


def train(architecture: str, flags: list[str]) -> RunLog:
    """Raises RuntimeError with what the run said when it fails."""
    command = [sys.executable, str(ROOT / f"pretrain_{architecture}.py"), *flags]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        said = [line for line in ran.stderr.splitlines() if line.startswith("error:")]
        raise RuntimeError(said[-1].removeprefix("error: ") if said else ran.stderr[-2000:])
    return parse_log(ran.stdout)


def final_loss(log: RunLog) -> float:
    """The training loss over the last quarter of a run: every setting's is over the same samples."""
    losses = [line["lm loss"] for line in log.lines]
    return statistics.mean(losses[-max(1, len(losses) // 4) :])


def table(outcomes: list[Outcome], noise: float | None, nodes: int, link_gbps: float | None) -> str:
    """The settings, most bytes first."""
    control = outcomes[0]
    header = f"{'setting':50}{'loss':>9}{'over ZeRO-3':>13}{'MB a node sends':>17}"
    lines = [header + (f"{'s per step':>12}" if link_gbps else "")]
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.bytes_per_step):
        change = 100 * (outcome.loss / control.loss - 1)
        line = f"{outcome.name:50}{outcome.loss:9.4f}{change:+12.2f}%{outcome.bytes_per_step / 1e6:17.2f}"
        lines.append(line + (f"{outcome.bytes_per_step * 8 / (link_gbps * 1e9):12.4f}" if link_gbps else ""))
    if noise is None:
        lines.append("Noise: not measured, as the checkpoint's weights are the initial ones; 0.25 % is assumed.")
    else:
        change = 100 * noise / control.loss
        lines.append(f"Noise: initial weights that are 0.1 % larger move the first one's loss by {change:.2f} %.")
    return "\n".join(lines)


def suggest(outcomes: list[Outcome], noise: float | None) -> Outcome:
    """The fewest bytes among the settings that lose no more than the noise, or 0.25 %, against the first."""
    limit = outcomes[0].loss + max(noise or 0.0, 0.0025 * outcomes[0].loss)
    good = [outcome for outcome in outcomes if math.isfinite(outcome.loss) and outcome.loss <= limit]
    return min(good or outcomes[:1], key=lambda outcome: outcome.bytes_per_step)


if __name__ == "__main__":
    sys.exit(main())
