"""How much slower than the best recipe is the one that ``--zeropp auto`` chooses? In the cluster in a box, as root.

    sudo .venv/bin/python benchmarks/auto_regret.py run --rates 100mbit 1gbit unlimited --micro-batches 1 8
    python benchmarks/auto_regret.py show

A cell is a rate and a number of micro-batches of a GPT of 26M parameters on 2 nodes of 2 ranks. In each cell every
recipe trains, and auto decides, in turns; a recipe that takes over twice the fastest's time trains in the first turn
only. Regret is the step's time with the chosen recipe over that with the fastest, less 1, of medians. What is in
``results/auto_regret.jsonl`` is not measured again.
"""

import argparse
import itertools
import re
import statistics
from collections import Counter
from typing import Any

from cluster_in_a_box import check_requirements, cluster, programs, run
from common import RESULTS, ROOT, markdown_table, measure_once, read_rows

from megatron_zpp.zeropp.recipes import RECIPES

MEASURED = RESULTS / "auto_regret.jsonl"
NODES, RANKS = 2, 2
TRAIN = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 --mock-data "
    "--vocab-size 1023 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --bf16 --grad-reduce-in-bf16"
)
STEPS, WARMUP = 8, 3  # the first steps send all weights, and are left out


def program(recipe: str, micro_batches: int, steps: int) -> list[str]:
    batch = f"--global-batch-size {NODES * RANKS * micro_batches} --train-iters {steps} --zeropp {recipe}"
    return [str(ROOT / "pretrain_gpt.py"), *TRAIN.split(), *batch.split()]


def decide(rate: str | None, micro_batches: int) -> dict[str, Any]:
    """Let auto decide in a run of one step; return its words too."""
    with cluster(NODES, rate) as namespaces, programs(program("auto", micro_batches, 1), namespaces, RANKS) as started:
        said = [process.communicate(timeout=900)[0] for process in started]
    found = re.search(r"^--zeropp auto: (\w+) .*Measured in (\d+) s.*$", said[0], re.MULTILINE)
    if found is None:
        raise RuntimeError(f"auto did not decide:\n{said[0][-3000:]}")
    return {"chosen": found[1], "decided_in_seconds": int(found[2]), "why": found[0]}


def measure(rates: list[str], micro_batches: list[int], repeats: int, recipes: list[str]) -> None:
    check_requirements()
    for turn, rate, count in itertools.product(range(repeats), rates, micro_batches):
        limit = None if rate == "unlimited" else rate
        first = {"rate": rate, "micro_batches": count, "turn": 0}
        seen = [row for row in read_rows(MEASURED) if first.items() <= row.items()] if MEASURED.exists() else []
        times = {row["recipe"]: row["seconds"] for row in seen if "seconds" in row}
        slow = {recipe for recipe, seconds in times.items() if turn > 0 and seconds > 2 * min(times.values())}
        for recipe in [name for name in recipes if name not in slow]:

            def measured(recipe: str = recipe, limit: str | None = limit, count: int = count) -> dict[str, Any]:
                if recipe == "auto":
                    return decide(limit, count)
                words = program(recipe, count, STEPS)
                return {"seconds": run(words, NODES, RANKS, limit, WARMUP, 1800, False).seconds_per_step}

            key = {"rate": rate, "micro_batches": count, "recipe": recipe, "turn": turn}
            if row := measure_once(MEASURED, key, measured):
                print(row, flush=True)


def table() -> str:
    """Seconds of a step, median of turns; what auto chose, its largest regret, and the longest decision."""
    rows = read_rows(MEASURED)
    lines = []
    for rate, count in dict.fromkeys((row["rate"], row["micro_batches"]) for row in rows):
        cell = [row for row in rows if (row["rate"], row["micro_batches"]) == (rate, count)]
        seconds = {
            recipe: statistics.median(times)
            for recipe in RECIPES
            if (times := [row["seconds"] for row in cell if row["recipe"] == recipe])
        }
        decided = [row for row in cell if row["recipe"] == "auto"]
        chosen = Counter(row["chosen"] for row in decided)
        regrets = [seconds[row["chosen"]] / min(seconds.values()) - 1 for row in decided if row["chosen"] in seconds]
        lines.append(
            [
                rate,
                count,
                *(f"{seconds[recipe]:.3f}" if recipe in seconds else "" for recipe in RECIPES),
                ", ".join(f"{name} ({number})" for name, number in chosen.items()),
                f"{max(regrets):.0%}" if regrets else "",
                max((row["decided_in_seconds"] for row in decided), default=""),
            ]
        )
    return markdown_table(["link", "micro-batches", *RECIPES, "chosen", "regret", "decided in, s"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "show"))
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "unlimited"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--recipes", nargs="+", default=[*reversed(RECIPES), "auto"], help="auto alone: more decisions")
    args = parser.parse_args()
    if args.action == "run":
        measure(args.rates, args.micro_batches, args.repeats, args.recipes)
    else:
        print(table())


if __name__ == "__main__":
    main()
