"""Reads the trainer's log. Follows a run in short lines, or compares runs in a table and a plot.

torchrun ... pretrain_gpt.py ... 2>&1 | tee run.log | python examples/quickstart/summary.py follow
python examples/quickstart/summary.py compare --data-path PREFIX --plot loss.png "ZeRO-3=a.log" "ZeRO++=b.log"
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.errors import attempt, reports_errors
from megatron_zpp.files import regular_file
from megatron_zpp.metrics.log_reader import BETWEEN, WITHIN, RunLog, read_log, shorten

FEWEST_STEPS = 50  # of a run whose speed is compared


def unigram_entropy(prefix: str) -> float:
    """Nats per token of the tokens' frequencies: the loss of a model that knows nothing of context."""
    dataset = IndexedDataset(prefix)
    counts = np.bincount(np.memmap(f"{prefix}.bin", dtype=dataset.dtype, mode="r"))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def table(runs: dict[str, RunLog], entropy: float) -> str:
    """Runs side by side; differences are to the first, where the runs are long enough to differ by more than noise."""
    every = [*runs.values()]
    have_learned = all(run.validation_loss < entropy for run in every)
    are_long = all(run.lines[-1]["iteration"] >= FEWEST_STEPS for run in every)

    def row(name: str, cells: list[str]) -> str:
        return name.ljust(34) + "".join(cell.rjust(24) for cell in cells)

    def less(number: float, first: float) -> str:
        return f" ({first / number:.1f}x less)"

    def percent(number: float, first: float) -> str:
        return f" ({100 * (number / first - 1):+z.1f} %)"

    def values(name: str, numbers: list[float], unit: str, compare: Callable[[float, float], str] | None) -> str:
        changes = ["" if compare is None else compare(number, numbers[0]) for number in numbers[1:]]
        return row(name, [f"{number:{unit}}{change}" for number, change in zip(numbers, ["", *changes], strict=True)])

    losses, speeds = [run.validation_loss for run in every], [run.tokens_per_second() for run in every]
    lines = [
        row("", list(runs)),
        values("validation loss, nats per token", losses, ".3f", percent if have_learned else None),
        row("unigram entropy of the text", [f"{entropy:.3f}"] * len(every)),
        values("MB between nodes per step", [run.mean(BETWEEN) for run in every], ".2f", less),
        values("MB within nodes per step", [run.mean(WITHIN) for run in every], ".2f", percent),
        values("tokens per second", speeds, ",.0f", percent if are_long else None),
    ]
    if not have_learned:
        lines.append("losses are not compared: train until they are below the unigram entropy")
    if not are_long:
        lines.append(f"speeds are not compared: train {FEWEST_STEPS} steps or more")
    return "\n".join(lines)


def plot(runs: dict[str, RunLog], entropy: float, path: Path) -> None:
    """Loss curves, and bytes between nodes, as a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "--plot needs the package matplotlib: pip install matplotlib, or megatron_zpp's extra plot"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 1), layout="constrained")
    styles = ["-", "--", ":"]
    for i, (name, run) in enumerate(runs.items()):
        lines = [line for line in run.lines if "lm loss" in line]  # the others' steps were all skipped
        steps, losses = [line["iteration"] for line in lines], [line["lm loss"] for line in lines]
        curves.plot(steps, losses, styles[i % len(styles)], label=name)
        bar = bars.bar(name, run.mean(BETWEEN))
        bars.bar_label(bar, fmt="%.1f")
    curves.axhline(entropy, color="grey", linewidth=0.8)
    curves.annotate("unigram entropy", (1, entropy), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    curves.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    curves.legend()
    bars.set(ylabel="MB between nodes per step")
    bars.tick_params(axis="x", labelrotation=15)
    figure.savefig(path, dpi=150)


def follow() -> None:
    """Training lines from stdin in short; every other line as it is."""
    for text in sys.stdin:
        short = shorten(text)
        print(text.rstrip("\n") if short is None else short, flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Follow or compare training runs by their logs.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("follow", help="shorten a log on stdin while it is written")
    compare = commands.add_parser("compare", help="compare logs in a table and a plot")
    compare.add_argument("runs", nargs="+", metavar="NAME=LOG")
    compare.add_argument("--data-path", required=True, metavar="PREFIX", help="dataset whose unigram entropy to show")
    compare.add_argument("--plot", type=Path, metavar="FILE", help="PNG file to write")
    args = parser.parse_args(argv)
    if args.command == "compare" and not all("=" in run for run in args.runs):
        parser.error("give each run as NAME=LOG")
    return args


@reports_errors
def main() -> None:
    args = parse_arguments()
    if args.command == "follow":
        follow()
        return
    runs = {name: read_log(regular_file(log)) for name, _, log in (run.rpartition("=") for run in args.runs)}
    entropy = unigram_entropy(args.data_path)
    print(table(runs, entropy))
    if args.plot is not None:
        with attempt("write", args.plot):
            plot(runs, entropy, args.plot)
        print(f"\nloss curves: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
