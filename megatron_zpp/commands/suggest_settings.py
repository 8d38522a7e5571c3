"""``plan --try``: rank ways to send weights and gradients by loss against bytes, on your model and data.

Each setting trains for a few hundred steps, on ranks of this machine, on the same data in the same order. The first,
plain ZeRO-3, trains again with initial weights that are 0.1 % larger: the difference between the two is noise.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.arguments.resolve_parallel import data_parallel_size
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import ARCHITECTURES, load_architecture
from megatron_zpp.metrics.history import METRICS, RunHistory, read_training
from megatron_zpp.metrics.progress import progress
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.schedule import Schedule
from megatron_zpp.settings.flags import iterate_flags, number
from megatron_zpp.settings.groups import ZeroSettings
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.config import ZeroPPConfig
from megatron_zpp.zeropp.recipes import RECIPES

TRAINER = """
import sys
from megatron_zpp.families import load_architecture
from megatron_zpp.commands.pretrain import main
main(load_architecture(sys.argv.pop(1)))
"""
CONTROL, BETWEEN = "ZeRO-3", "comm/bytes-between-nodes"
SETTINGS = {name: f"--zeropp {name}" for name in RECIPES if name != "zero3"}


@dataclass(frozen=True)
class Outcome:
    """The loss and bytes of a setting."""

    name: str
    flags: str
    loss: float  # training loss, mean over the last quarter of the run; NaN: see failure
    bytes_per_step: float  # that a node sends; NaN if it failed
    failure: str | None = None


@reports_errors
def main() -> None:
    parser = argparse.ArgumentParser(
        description="Rank ZeRO++ and LoCo settings by loss against bytes, on your model and data.",
        epilog="After --: the flags of the architecture's training program, without ZeRO++'s.",
        allow_abbrev=False,
    )
    add, ranks, count = parser.add_argument, number(int, at_least=1, at_most=4096), number(int, at_least=1)
    names = ", ".join(architecture.name for architecture in ARCHITECTURES)
    add("architecture", help=f"{names}, or your own as package.module:NAME")
    add("--local-ranks", "--emulate-ranks", type=ranks, default=4, metavar="W", help="ranks to start here; default 4")
    add("--local-nodes", "--emulate-nodes", type=count, default=2, metavar="N", help="nodes they count as; default 2")
    add("--iterations", type=count, default=400, metavar="K", help="steps of each setting; default 400")
    rate = number(float, above=0)
    add("--link-gbps", type=rate, metavar="R", help="Gbit/s out of a node, to show seconds too")
    tried = "flags to try instead of the built-in settings; repeatable"
    add("--try", action="append", dest="tried", metavar="FLAGS", help=tried)
    words = sys.argv[1:]
    separator = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(words[:separator]), words[separator + 1 :]
    if not flags:
        parser.error("give the flags of the run after --")
    outcomes, noise = measure(args, flags)
    print(table(outcomes, noise, args.link_gbps))
    best, limit = suggest(outcomes, noise), 100 * _allowed_loss(outcomes, noise)
    print(f"\nSuggested: {best.name}, the fewest bytes of those that lose at most {limit:.2f} %:\n  {best.flags}")


def measure(args: argparse.Namespace, flags: list[str]) -> tuple[list[Outcome], float | None]:
    """Train every setting. Return the outcomes, and the noise; None with --finetune, whose weights are given."""
    ranks, nodes = args.local_ranks, args.local_nodes
    if args.iterations < 20:
        raise ValueError(f"--iterations {args.iterations} is too short to tell settings apart: give 20 or more")
    if nodes < 2 or ranks % nodes:
        raise ValueError(f"--local-nodes {nodes} must be 2 or more, and divide --local-ranks {ranks}")
    flags = [*flags, *f"--local-ranks {ranks} --local-nodes {nodes} --train-iters {args.iterations}".split()]
    flags += ["--log-interval", "1", "--eval-iters", "0", "--zero-stage", "3"]
    per_node = ranks // nodes
    settings = {setting: setting for setting in args.tried} if args.tried else SETTINGS
    all_flags = {CONTROL: f"--zeropp-ranks-per-node {per_node}"}
    hpz = f"--zero-hpz-partition-size {per_node} " if args.tried else ""
    all_flags |= {name: f"{hpz}{setting}" for name, setting in settings.items()}
    # Find mistakes before anything is trained.
    architecture = load_architecture(args.architecture)
    plain = parse_settings(architecture, flags, note=lambda _: None)
    _check_plain(plain)
    _check_warmup(plain, args.iterations)
    for setting in all_flags.values():
        parse_settings(architecture, [*flags, *setting.split()], note=lambda _: None)
    outcomes, noise, again = [], None, not plain.checkpoint.finetune
    with progress("training", len(all_flags) + again) as advance:
        for name, setting in all_flags.items():
            try:
                run = train(args.architecture, [*flags, *setting.split()])
                outcome = Outcome(name, setting, _final_loss(run), run.last(BETWEEN) / nodes)
            except ChildProcessError as error:
                if name == CONTROL:
                    raise
                outcome = Outcome(name, setting, math.nan, math.nan, failure=str(error))
            outcomes.append(outcome)
            advance(1)
        if again:
            larger_weights = ["--init-method-std", str(plain.model.init_method_std * 1.001)]
            run = train(args.architecture, [*flags, *all_flags[CONTROL].split(), *larger_weights])
            noise = abs(_final_loss(run) - outcomes[0].loss)
            advance(1)
    return outcomes, noise


def _check_plain(settings: ResolvedSettings) -> None:
    """Raise ValueError unless the run without settings is plain, and starts from scratch."""
    checkpoint, logging = settings.checkpoint, settings.logging
    continues = checkpoint.load and not checkpoint.finetune
    reports = logging.metrics_dir or logging.tensorboard_dir or logging.wandb_project or logging.mlflow_experiment
    if checkpoint.save or checkpoint.publish or reports or continues:
        scratch = "every setting starts from scratch: leave --save, --publish, and metrics' folders and projects out"
        raise ValueError(f"{scratch}; --load only with --finetune")
    flat = settings.as_flat_dict()
    given = [
        flag.name
        for flag in (*iterate_flags(ZeroSettings), *iterate_flags(ZeroPPConfig))
        if flat[flag.setting] != flag.default and flag.setting != "zeropp_monitor_interval"
    ]
    if given:
        plain = f"{', '.join(given)} would be in every setting, and plain {CONTROL} would not be plain"
        raise ValueError(f'{plain}: leave such flags out after --, or try them with --try="{given[0]} ..."')


def _check_warmup(settings: ResolvedSettings, iterations: int) -> None:
    """Raise ValueError if the learning rate warms up for over a quarter of the run."""
    ranks = settings.distributed
    batches = BatchSchedule.from_settings(settings.training, data_parallel_size(ranks, ranks.local_ranks or 1))
    schedule = Schedule.from_settings(settings.optimizer, settings.schedule, settings.training, batches)
    steps = batches.iterations_to_reach(math.ceil(schedule.warmup_samples))
    if steps > iterations / 4:
        longer = f"the learning rate warms up over {steps} of --iterations {iterations}"
        raise ValueError(f"{longer}: give a shorter warm-up")


def train(architecture: str, flags: list[str]) -> RunHistory:
    """Train in another process and read its metrics. Raises ChildProcessError with the run's error if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TRAINER, architecture, *flags, "--metrics-dir", folder]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode != 0:
            said = [line for line in ran.stderr.splitlines() if line.startswith("error:")]
            raise ChildProcessError(said[-1].removeprefix("error: ") if said else ran.stderr[-2000:])
        return read_training(" ".join(flags), Path(folder, METRICS))


def _final_loss(run: RunHistory) -> float:
    """Average the finite losses of a run's last quarter, NaN without any; all settings see the same samples."""
    losses = [*run.metrics.get("lm loss", {}).values()]
    finite = [loss for loss in losses[-max(1, len(losses) // 4) :] if math.isfinite(loss)]
    return statistics.mean(finite) if finite else math.nan


def table(outcomes: list[Outcome], noise: float | None, link_gbps: float | None) -> str:
    """Format the settings, most bytes first."""
    control, seconds = outcomes[0], f"{'s per step':>12}" if link_gbps else ""
    lines = [f"{'setting':50}{'loss':>9}{'over ZeRO-3':>13}{'MB a node sends':>17}{seconds}"]
    trained = [outcome for outcome in outcomes if outcome.failure is None]
    for outcome in sorted(trained, key=lambda outcome: -outcome.bytes_per_step):
        change = 100 * (outcome.loss / control.loss - 1)
        line = f"{outcome.name:50}{outcome.loss:9.4f}{change:+12.2f}%{outcome.bytes_per_step / 1e6:17.2f}"
        lines.append(line + (f"{outcome.bytes_per_step * 8 / (link_gbps * 1e9):12.4f}" if link_gbps else ""))
    lines += [f"{outcome.name:50} failed: {outcome.failure}" for outcome in outcomes if outcome.failure is not None]
    said = "not measured, as the checkpoint's weights are the initial ones."
    if noise is not None:
        change = 100 * noise / control.loss
        said = f"initial weights that are 0.1 % larger move the first one's loss by {change:.2f} %."
    lines.append(f"Noise: {said}")
    if not torch.cuda.is_available():
        twice = "bytes are gloo's, which sends gradients twice; over NCCL they are about 3/4 of that."
        lines.append(f"{CONTROL}'s {twice}")
    return "\n".join(lines)


def _allowed_loss(outcomes: list[Outcome], noise: float | None) -> float:
    """Return the loss that a setting may add, as a share of the first one's: the noise, at least 0.25 %."""
    return max((noise or 0.0) / outcomes[0].loss, 0.0025)


def suggest(outcomes: list[Outcome], noise: float | None) -> Outcome:
    """Choose the fewest bytes among the settings that add no more loss than allowed."""
    limit = outcomes[0].loss * (1 + _allowed_loss(outcomes, noise))
    good = [outcome for outcome in outcomes if math.isfinite(outcome.loss) and outcome.loss <= limit]
    return min(good or outcomes[:1], key=lambda outcome: outcome.bytes_per_step)
