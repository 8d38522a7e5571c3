"""Does the loss suffer? The quickstart's model and text for 500 steps on 2 nodes x 2 ranks, recipe by recipe.

    make quickstart                                # makes the text and its tokens
    .venv/bin/python benchmarks/recipes.py         # trains what benchmarks/results/recipes.jsonl lacks
    .venv/bin/python benchmarks/recipes.py table   # as Markdown

One seed, so differences of a few tenths of a percent are noise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_zpp.training.log_reader import BETWEEN, parse_log

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "recipes.jsonl"
RUN = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 8 --train-iters 500 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.1 --adam-beta2 0.95 --weight-decay 0.1 --bf16 --num-workers 0 --log-interval 100 "
    "--data-path runs/quickstart/python_text_document --split 97,3,0 --eval-iters 40 "
    "--tokenizer-type SentencePieceTokenizer --tokenizer-model runs/quickstart/tokenizer.model"
)
ALL_FLAGS = "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients"
TWO_BITS = "--zero-gradient-bits 2"
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
    if not (ROOT / "runs/quickstart/python_text_document.bin").exists():
        sys.exit("error: no text yet: run make quickstart first")
    done = {row["recipe"] for row in read()}
    for name, flags in RECIPES.items():
        if name not in done:
            row = train(name, flags)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name}: {row['validation_loss']:.4f}")


def train(name: str, flags: str) -> dict[str, Any]:
    command = f"pretrain_gpt.py {RUN} {flags}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*launcher, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(f"{name} failed:\n{ran.stderr[-3000:]}")
    log = parse_log(ran.stdout)
    megabytes = log.lines[-1][BETWEEN]
    row = {"recipe": name, "validation_loss": log.validation_loss, "megabytes_between_nodes_per_step": megabytes}
    return row | {"command": f"torchrun --nproc-per-node 4 {command}"}


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def print_table() -> None:
    rows = read()
    print("| recipe | validation loss | over ZeRO-3 | MB between nodes per step |\n|---|---|---|---|")
    for row in rows:
        excess = row["validation_loss"] / rows[0]["validation_loss"] - 1
        megabytes = row["megabytes_between_nodes_per_step"]
        print(f"| {row['recipe']} | {row['validation_loss']:.4f} | {excess:+.2%} | {megabytes:.2f} |")


if __name__ == "__main__":
    main()
