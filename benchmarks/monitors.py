"""What the quality monitors show for each setting: the quickstart's model and text, 200 steps on 2 nodes x 2 ranks.

    make quickstart                                 # makes the text and its tokens
    .venv/bin/python benchmarks/monitors.py         # trains what benchmarks/results/monitors.jsonl lacks
    .venv/bin/python benchmarks/monitors.py table   # as Markdown, and what normally distributed values would show

Figures are means over the samples of the last 100 steps, of all units together.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from quickstart_model import FLAGS, measure_missing, train_on_4_ranks
from rows import read_rows

from megatron_zpp.metrics.tensorboard_reader import find_runs, read_run
from megatron_zpp.zeropp.wire.quantization import SCALINGS, Code, count_largest, dequantize_blocks, quantize_blocks

RESULTS = Path(__file__).parent / "results" / "monitors.jsonl"
RUN = (
    f"{FLAGS} --train-iters 200 --log-interval 10 --eval-iters 10 "
    "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zero-monitor-interval 10"
)
TWO_BITS = "--zero-gradient-bits 2 --zero-gradient-scaling absmax"
SETTINGS = {
    "8 bits, blocks of 128": "--zero-gradient-bits 8",
    "4 bits, blocks of 128": "",
    "4 bits, blocks of 128, LoCo": "--zeropp-loco",
    "4 bits, blocks of 2048": "--zero-gradient-block-size 2048",
    "4 bits, blocks of 2048, LoCo": "--zero-gradient-block-size 2048 --zeropp-loco",
    "2 bits, blocks of 128": TWO_BITS,
    "2 bits, blocks of 128, LoCo": f"{TWO_BITS} --zeropp-loco",
    "2 bits, blocks of 2048": f"{TWO_BITS} --zero-gradient-block-size 2048",
    "2 bits, blocks of 2048, LoCo": f"{TWO_BITS} --zero-gradient-block-size 2048 --zeropp-loco",
    "4-bit weights in blocks of 256": "--zero-weight-bits 4",
    "4-bit weight differences in blocks of 2048": "--zero-weight-difference-bits 4",
}
SHOWN = ("comm/error/", "comm/error-state/", "comm/largest-codes/")


def main() -> None:
    if sys.argv[1:] == ["table"]:
        print_table()
        print_gaussian_table()
        return
    measure_missing(RESULTS, SETTINGS, measure)


def measure(flags: str) -> dict[str, Any]:
    command = f"{RUN} {flags}".strip()
    with tempfile.TemporaryDirectory() as folder:
        train_on_4_ranks(f"{command} --tensorboard-dir {folder}")
        ((name, files),) = find_runs([Path(folder)]).items()
        run = read_run(name, files)
    means = {
        key.removeprefix("comm/"): statistics.fmean(value for i, value in points.items() if i > 100)
        for key, points in run.metrics.items()
        if key.startswith(SHOWN)
    }
    (validation_loss,) = run.metrics["lm loss validation"].values()
    command = f"torchrun --nproc-per-node 4 pretrain_gpt.py {command} --tensorboard-dir DIR"
    return {"validation_loss": validation_loss, **means, "command": command, "hardware": "CPU, gloo"}


def print_table() -> None:
    columns = {
        "validation loss": "validation_loss",
        "weights: error": "error/weights",
        "within nodes: error": "error/gradients/intra",
        "between nodes: error": "error/gradients/inter",
        "largest codes": "largest-codes/gradients/inter",
        "LoCo's error state": "error-state/gradients/inter",
    }
    print(f"| setting | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for row in read_rows(RESULTS):
        cells = [f"{row[key]:.4f}" if key in row else "" for key in columns.values()]
        print(f"| {row['setting']} | {' | '.join(cells)} |")


def print_gaussian_table() -> None:
    """The same statistics for independent normally distributed values."""
    print("\n| bits | code | block | error | largest codes |\n|---|---|---|---|---|")
    codes = [Code(8), Code(6), Code(4), *(Code(bits, scaling) for bits in (3, 2) for scaling in SCALINGS), Code(1)]
    settings = [(code, 128) for code in codes] + [(code, 2048) for code in codes if code.bits in (8, 4, 2)]
    for code, block in settings:
        blocks = torch.randn(2**20 // block, block, generator=torch.Generator().manual_seed(0))
        integers, scales = quantize_blocks(blocks, code)
        error = (dequantize_blocks(integers, scales, code) - blocks).norm() / blocks.norm()
        largest = count_largest(integers, scales, code) / blocks.numel()
        print(f"| {code.bits} | {code.scaling} | {block} | {error:.4f} | {largest:.4f} |")


if __name__ == "__main__":
    main()
