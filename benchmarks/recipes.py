"""Does the loss suffer? The quickstart's model and text for 500 steps on 2 nodes x 2 ranks, recipe by recipe.

    make quickstart                                # makes the text and its tokens
    .venv/bin/python benchmarks/recipes.py         # trains what benchmarks/results/recipes.jsonl lacks
    .venv/bin/python benchmarks/recipes.py table   # as Markdown

One seed, so differences of a few tenths of a percent are noise.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from quickstart_model import FLAGS, measure_missing, train_on_4_ranks
from rows import read_rows

from megatron_zpp.metrics.log_reader import BETWEEN, parse_log

RESULTS = Path(__file__).parent / "results" / "recipes.jsonl"
RUN = f"{FLAGS} --bf16 --train-iters 500 --log-interval 100 --eval-iters 40"
ALL_FLAGS = "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients"
TWO_BITS = "--zero-gradient-bits 2 --zero-gradient-scaling absmax"
LARGE_BLOCKS = f"{TWO_BITS} --zero-gradient-block-size 2048"
RECIPES = {
    "ZeRO-3 in bf16": "--grad-reduce-in-bf16 --zero-ranks-per-node 2",
    "all flags": ALL_FLAGS,
    "all flags, LoCo": f"{ALL_FLAGS} --zeropp-loco",
    "all flags, LoCo, 4-bit weight differences": f"{ALL_FLAGS} --zeropp-loco --zero-weight-difference-bits 4",
    "2-bit gradients": f"{ALL_FLAGS} {TWO_BITS}",
    "2-bit gradients, error feedback (beta 0)": f"{ALL_FLAGS} {TWO_BITS} --zeropp-loco --zeropp-loco-beta 0",
    "2-bit gradients, LoCo": f"{ALL_FLAGS} {TWO_BITS} --zeropp-loco",
    "2-bit gradients in blocks of 2048": f"{ALL_FLAGS} {LARGE_BLOCKS}",
    "2-bit gradients in blocks of 2048, error feedback": f"{ALL_FLAGS} {LARGE_BLOCKS} --zeropp-loco "
    "--zeropp-loco-beta 0",
    "2-bit gradients in blocks of 2048, LoCo": f"{ALL_FLAGS} {LARGE_BLOCKS} --zeropp-loco",
}


def main() -> None:
    if sys.argv[1:] == ["table"]:
        print_table()
        return
    measure_missing(RESULTS, RECIPES, measure)


def measure(flags: str) -> dict[str, Any]:
    log = parse_log(train_on_4_ranks(f"{RUN} {flags}"))
    return {
        "validation_loss": log.validation_loss,
        "megabytes_between_nodes_per_step": log.lines[-1][BETWEEN],
        "command": f"torchrun --nproc-per-node 4 pretrain_gpt.py {RUN} {flags}",
    }


def print_table() -> None:
    rows = read_rows(RESULTS)
    print("| recipe | validation loss | over ZeRO-3 | MB between nodes per step |\n|---|---|---|---|")
    for row in rows:
        excess = row["validation_loss"] / rows[0]["validation_loss"] - 1
        megabytes = row["megabytes_between_nodes_per_step"]
        print(f"| {row['setting']} | {row['validation_loss']:.4f} | {excess:+.2%} | {megabytes:.2f} |")


if __name__ == "__main__":
    main()
