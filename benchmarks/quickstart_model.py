"""The quickstart's model and text, trained on 2 nodes x 2 ranks with one setting after another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rows import append_row, read_rows

ROOT = Path(__file__).parents[1]
FLAGS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 8 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 "
    "--adam-beta2 0.95 --weight-decay 0.1 --num-workers 0 --data-path runs/quickstart/python_text_document "
    "--split 97,3,0 --tokenizer-type SentencePieceTokenizer --tokenizer-model runs/quickstart/tokenizer.model"
)


def measure_missing(results: Path, settings: Mapping[str, str], measure: Callable[[str], dict[str, Any]]) -> None:
    """Append to ``results`` what ``measure`` says of the flags of each setting that is not there yet."""
    if not (ROOT / "runs/quickstart/python_text_document.bin").exists():
        sys.exit("error: no text yet: run make quickstart first")
    done = {row["setting"] for row in read_rows(results)}
    for name, flags in settings.items():
        if name not in done:
            row = {"setting": name, **measure(flags)}
            append_row(results, row)
            print(row, flush=True)


def train_on_4_ranks(flags: str) -> str:
    """What pretrain_gpt.py prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "pretrain_gpt.py", *flags.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(f"error: pretrain_gpt.py {flags} failed:\n{ran.stderr[-3000:]}")
    return ran.stdout
