"""What the quality monitors show for each setting: the quickstart's model and text, 200 steps on 2 nodes x 2 ranks.

    make quickstart                                 # makes the text and its tokens
    .venv/bin/python benchmarks/monitors.py         # trains what benchmarks/results/monitors.jsonl lacks
    .venv/bin/python benchmarks/monitors.py table   # as Markdown, and what normally distributed values would show

Figures are means over the samples of the last 100 steps, of all units together.
"""

import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS as FOLDER
from common import ROOT, markdown_table, measure_once, read_rows, run_trainer

from megatron_zpp.metrics.tensorboard_reader import find_runs, read_run
from megatron_zpp.zeropp.wire.quantization import SCALINGS, Code, count_largest, dequantize_blocks, quantize_blocks

RESULTS = FOLDER / "monitors.jsonl"
FLAGS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 8 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 "
    "--adam-beta2 0.95 --weight-decay 0.1 --num-workers 0 --data-path runs/quickstart/python_text_document "
    "--split 97,3,0 --tokenizer-type SentencePieceTokenizer --tokenizer-model runs/quickstart/tokenizer.model"
)
RUN = (
    f"{FLAGS} --train-iters 200 --log-interval 10 --eval-iters 10 "
    "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-monitor-interval 10"
)
TWO_BITS = "--zeropp-gradient-bits 2 --zeropp-gradient-scaling absmax"
SETTINGS = {
    "8 bits, blocks of 128": "--zeropp-gradient-bits 8",
    "4 bits, blocks of 128": "",
    "4 bits, blocks of 128, LoCo": "--zeropp-loco",
    "4 bits, blocks of 2048": "--zeropp-gradient-block-size 2048",
    "4 bits, blocks of 2048, LoCo": "--zeropp-gradient-block-size 2048 --zeropp-loco",
    "2 bits, blocks of 128": TWO_BITS,
    "2 bits, blocks of 128, LoCo": f"{TWO_BITS} --zeropp-loco",
    "2 bits, blocks of 2048": f"{TWO_BITS} --zeropp-gradient-block-size 2048",
    "2 bits, blocks of 2048, LoCo": f"{TWO_BITS} --zeropp-gradient-block-size 2048 --zeropp-loco",
    "4-bit weights in blocks of 256": "--zeropp-weight-bits 4",
}
SHOWN = ("comm/error/", "comm/error-state/", "comm/largest-codes/")


def main() -> None:
    if sys.argv[1:] == ["table"]:
        print(f"{table()}\n\n{table_of_normal_values()}")
        return
    if not (ROOT / "runs/quickstart/python_text_document.bin").exists():
        sys.exit("error: no text yet: run make quickstart first")
    for name, flags in SETTINGS.items():
        if row := measure_once(RESULTS, {"setting": name}, partial(measure, flags)):
            print(row, flush=True)


def measure(flags: str) -> dict[str, Any]:
    command = f"{RUN} {flags}".strip()
    with tempfile.TemporaryDirectory() as folder:
        run_trainer(f"{command} --tensorboard-dir {folder}", cwd=ROOT)
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


def table() -> str:
    """What was measured in runs."""
    columns = {
        "validation loss": "validation_loss",
        "weights: error": "error/weights",
        "within nodes: error": "error/gradients/intra",
        "between nodes: error": "error/gradients/inter",
        "largest codes": "largest-codes/gradients/inter",
        "LoCo's error state": "error-state/gradients/inter",
    }
    rows = read_rows(RESULTS)
    lines = [[row["setting"], *(f"{row[key]:.4f}" if key in row else "" for key in columns.values())] for row in rows]
    return markdown_table(["setting", *columns], lines)


def table_of_normal_values() -> str:
    """The same statistics for independent normally distributed values."""
    codes = [Code(8), Code(6), Code(4), *(Code(bits, scaling) for bits in (3, 2) for scaling in SCALINGS), Code(1)]
    lines = []
    for code, block in [(code, 128) for code in codes] + [(code, 2048) for code in codes if code.bits in (8, 4, 2)]:
        blocks = torch.randn(2**20 // block, block, generator=torch.Generator().manual_seed(0))
        integers, scales = quantize_blocks(blocks, code)
        error = (dequantize_blocks(integers, scales, code) - blocks).norm() / blocks.norm()
        largest = count_largest(integers, scales, code) / blocks.numel()
        lines.append([code.bits, code.scaling, block, f"{error:.4f}", f"{largest:.4f}"])
    return markdown_table(("bits", "code", "block", "error", "largest codes"), lines)


if __name__ == "__main__":
    main()
