"""Compares runs in a table and a plot, by their metrics.jsonl.

python examples/quickstart/summary.py --data-path PREFIX --plot loss.png "ZeRO-3=runs/a" "ZeRO++=runs/b"
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.errors import attempt, reports_errors
from megatron_zpp.metrics.history import RunHistory, find_runs, read_training

BETWEEN, WITHIN, VALIDATION = "comm/bytes-between-nodes", "comm/bytes-within-nodes", "lm loss validation"
FEWEST_STEPS = 50  # a run's speed is compared from this many steps on


def unigram_entropy(prefix: str) -> float:
    """Nats per token of the tokens' frequencies: the loss of a model that knows nothing of context."""
    dataset = IndexedDataset(prefix)
    counts = np.bincount(np.memmap(f"{prefix}.bin", dtype=dataset.dtype, mode="r"))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def table(runs: dict[str, RunHistory], entropy: float) -> str:
    """Runs side by side; differences are to the first, where the runs are long enough to differ by more than noise."""
    every = [*runs.values()]
    losses, speeds = [run.last(VALIDATION) for run in every], [run.tokens_per_second for run in every]
    have_learned = all(loss < entropy for loss in losses)
    are_long = all(max(run.samples) >= FEWEST_STEPS for run in every)

    def row(name: str, cells: list[str]) -> str:
        return name.ljust(34) + "".join(cell.rjust(24) for cell in cells)

    def less(number: float, first: float) -> str:
        return f" ({first / number:.1f}x less)" if number and first / number > 0 else ""  # NaN: a run did not count it

    def percent(number: float, first: float) -> str:
        return f" ({100 * (number / first - 1):+z.1f} %)" if first and not math.isnan(number / first) else ""

    def values(name: str, numbers: list[float], unit: str, compare: Callable[[float, float], str] | None) -> str:
        changes = ["" if compare is None else compare(number, numbers[0]) for number in numbers[1:]]
        return row(name, [f"{number:{unit}}{change}" for number, change in zip(numbers, ["", *changes], strict=True)])

    lines = [
        row("", list(runs)),
        values("validation loss, nats per token", losses, ".3f", percent if have_learned else None),
        row("unigram entropy of the text", [f"{entropy:.3f}"] * len(every)),
        values("MB between nodes per step", [run.mean(BETWEEN) / 1e6 for run in every], ".2f", less),
        values("MB within nodes per step", [run.mean(WITHIN) / 1e6 for run in every], ".2f", percent),
        values("tokens per second", speeds, ",.0f", percent if are_long else None),
    ]
    if not have_learned:
        lines.append("losses are not compared: train until they are below the unigram entropy")
    if not are_long:
        lines.append(f"speeds are not compared: train {FEWEST_STEPS} steps or more")
    return "\n".join(lines)


def plot(runs: dict[str, RunHistory], entropy: float, path: Path) -> None:
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
        losses = run.metrics["lm loss"]
        curves.plot([*losses], [*losses.values()], styles[i % len(styles)], label=name)
        bar = bars.bar(name, run.mean(BETWEEN) / 1e6)
        bars.bar_label(bar, fmt="%.1f")
    curves.axhline(entropy, color="grey", linewidth=0.8)
    curves.annotate("unigram entropy", (1, entropy), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    curves.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    curves.legend()
    bars.set(ylabel="MB between nodes per step")
    bars.tick_params(axis="x", labelrotation=15)
    figure.savefig(path, dpi=150)


def read(name: str, folder: str) -> RunHistory:
    """Read the one finished run in a folder. Raises ValueError for others."""
    found = find_runs([Path(folder)])
    if len(found) > 1:
        raise ValueError(f"{folder} holds {len(found)} runs, such as {next(iter(found))}: give the folder of one")
    run = read_training(name, *found.values())
    if math.isnan(run.last(VALIDATION)):
        raise ValueError(f"{folder} has no validation loss at its end: did the run finish?")
    return run


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare training runs in a table and a plot.")
    parser.add_argument("runs", nargs="+", metavar="NAME=DIR", help="a run's name, and the folder of its metrics.jsonl")
    parser.add_argument("--data-path", required=True, metavar="PREFIX", help="dataset whose unigram entropy to show")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file to write")
    args = parser.parse_args(argv)
    if not all("=" in run for run in args.runs):
        parser.error("give each run as NAME=DIR")
    return args


@reports_errors
def main() -> None:
    args = parse_arguments()
    runs = {name: read(name, folder) for name, _, folder in (run.rpartition("=") for run in args.runs)}
    entropy = unigram_entropy(args.data_path)
    print(table(runs, entropy))
    if args.plot is not None:
        with attempt("write", args.plot):
            plot(runs, entropy, args.plot)
        print(f"\nloss curves: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
