"""Ends the scripts of examples/zeropp and examples/loco: sets a run beside its baseline and beside the paper.

python examples/conclude.py zeropp-pretraining zeropp runs/a [--baseline runs/b] [--data-path PREFIX] --on-cpus

Prints published | ours | how | verdict: first of this run, then of all that is known of its experiment, as
`examples/reproduce.sh zeropp-pretraining` prints it. Writes RUN/result.json.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "quickstart")]

from common import markdown_table, origin  # noqa: E402
from papers import PAPER, Row, verdict  # noqa: E402
from summary import BETWEEN, VALIDATION, read, unigram_entropy  # noqa: E402

from megatron_zpp.errors import attempt, reports_errors  # noqa: E402
from megatron_zpp.metrics.history import RunHistory  # noqa: E402

SHOWN = {
    "loss": "{} % of loss over the baseline",
    "bytes": "{} times the baseline's bytes between nodes",
    "speed": "{} times as fast as the baseline",
    **{name: f"{{}} times ZeRO-3's tokens/s in {name.upper()}" for name in ("sft", "dpo", "grpo")},
}


def measured(run: RunHistory, baseline: RunHistory, entropy: float) -> dict[str, float]:
    """Compare two runs of equal length; without the loss unless both learned more than how frequent tokens are."""
    if max(run.samples) != max(baseline.samples):
        lengths = f"{max(run.samples)} steps, {max(baseline.samples)} in the baseline {baseline.name}"
        raise ValueError(f"{run.name} has {lengths}: remove the baseline's folder, and start again")
    losses = run.last(VALIDATION), baseline.last(VALIDATION)
    found = {"loss": 100 * (losses[0] / losses[1] - 1)} if max(losses) < entropy else {}
    found["bytes"] = run.mean(BETWEEN) / baseline.mean(BETWEEN)
    return found | {"speed": run.tokens_per_second / baseline.tokens_per_second}


def measured_by_trl(path: Path) -> dict[str, float]:
    """Compare the methods of rlhf.sh, each under ZeRO-3 and then under ZeRO++."""
    rates: dict[str, list[float]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        rates.setdefault(row["method"], []).append(row["tokens/s"])
    return {method: zeropp / zero3 for method, (zero3, zeropp) in rates.items()}


def judge(what: str, published: Any, ours: float, on_cpus: bool) -> str:
    """Judge by the thresholds of papers.toml. One run has no interval: its loss shows a direction at most."""
    if what == "loss":
        if published == 0:
            return "one seed"
        is_higher = published == "higher" or (published != "lower" and published > 0)
        return "same direction" if is_higher == (ours > 0) else "not seen"
    return "needs GPUs" if what != "bytes" and on_cpus else verdict([published], [ours])


def rows_of(found: dict[str, float], published: dict[str, Any], how: str, on_cpus: bool) -> list[Row]:
    rows = []
    for what, ours in found.items():
        value, source = published.get(what, (None, ""))
        shown = value if isinstance(value, str) else f"{value:+.3g}" if what == "loss" and value else value
        said = "not published" if value is None else f"{SHOWN[what].format(shown)} ({source})"
        digits = f"{ours:+.2f}" if what == "loss" else f"{ours:.3g}"
        judged = "" if value is None else judge(what, value, ours, on_cpus)
        rows.append((said, SHOWN[what].format(digits), how, judged))
    return rows


def rows_of_page(experiment: str) -> list[Row]:
    """Return the lines of the paper's page that name the experiment."""
    page = ROOT / "docs" / "evidence" / f"{experiment.partition('-')[0]}-paper.md"
    lines = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if f"`{experiment}`" in line]
    return [(published, ours, how, judged) for published, ours, how, judged in lines]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Set a run beside its baseline and beside the paper.")
    parser.add_argument("experiment", help="a name that examples/reproduce.sh lists")
    parser.add_argument("variant", help="the recipe, or the bits")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--baseline", metavar="FOLDER", help="the run to compare with; default: none")
    parser.add_argument("--data-path", metavar="PREFIX", help="dataset whose unigram entropy a loss must be below")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--on-cpus", action="store_true", help="speeds say nothing of GPUs")
    where.add_argument("--on-gpus", action="store_true")
    return parser.parse_args(argv)


@reports_errors
def main() -> None:
    args = parse_arguments()
    published = PAPER["runs"][args.experiment].get(args.variant, {})
    result: dict[str, Any] = {"experiment": args.experiment, "variant": args.variant, **origin()}
    trl, said, found, how = args.run / "results.jsonl", "", dict[str, float](), "this run"
    if trl.exists():
        found = measured_by_trl(trl)
    else:
        run, entropy = (
            read(str(args.run), str(args.run)),
            unigram_entropy(args.data_path) if args.data_path else math.inf,
        )
        loss, how = run.last(VALIDATION), f"this run, {max(run.samples)} steps, one seed"
        said = f"validation loss {loss:.3f}"
        if args.data_path:
            learned = "below" if loss < entropy else "not below it, so it is not compared"
            said += f"; a model that knows only how frequent tokens are has {entropy:.3f}: {learned}"
        result |= {"steps": max(run.samples), "validation_loss": loss}
        found = measured(run, read(args.baseline, args.baseline), entropy) if args.baseline else {}
    result |= {"baseline": args.baseline, "over_baseline": found}
    rows = rows_of(found, published, how, args.on_cpus)
    rows += rows_of_page(args.experiment)
    result["rows"] = [dict(zip(("published", "ours", "how", "verdict"), row, strict=True)) for row in rows]
    path = args.run / "result.json"
    with attempt("write", path):
        path.write_text(json.dumps(result, indent=1) + "\n")
    table = markdown_table(("published", "ours", "how", "verdict"), rows)
    print("", *filter(None, (said, table, f"result: {path}")), sep="\n\n")


if __name__ == "__main__":
    sys.exit(main())
