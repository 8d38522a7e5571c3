"""What a checkpoint costs: how long training stops for a save, beside how long the save takes.

    .venv/bin/python benchmarks/save_cost.py >> benchmarks/results/save_cost.jsonl

Trains a GPT on local ranks that saves every few steps, in the background and at once (``--no-async-save``), and reads
both times from the log. Prints one JSON line for each.
"""

import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import origin, run_trainer

RANKS = 2
MODEL = """--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 32 --micro-batch-size 1
    --global-batch-size 2 --lr 1e-3 --mock-data --vocab-size 8000 --eval-iters 0 --num-workers 0 --log-interval 1
    --train-iters 36 --save-interval 6 --save-keep-last 2"""


def measure(mode: str) -> dict[str, Any]:
    """Medians over the saves but the first, which allocates, and the last, for which the run waits anyway."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run_trainer(f"{MODEL} --save {folder} {mode}", RANKS)
        meta = json.loads(next(Path(folder).glob("iter_*/meta.json")).read_text())
    times = re.findall(r"written in (\S+) s, training stopped for (\S+) s", printed)
    written, stopped = ([float(pair[i]) for pair in times][1:-1] for i in (0, 1))
    steps = [float(ms) / 1000 for ms in re.findall(r"elapsed time per iteration \(ms\): (\S+)", printed)]
    return {
        "mode": mode or "asynchronous",
        "megabytes": round(sum(entry["bytes"] for entry in meta["files"].values()) / 1e6, 1),
        "saves": len(written),
        "seconds_written": round(statistics.median(written), 3),
        "seconds_stopped": round(statistics.median(stopped), 3),
        "stopped_fraction": round(statistics.median(stopped) / statistics.median(written), 3),
        "seconds_per_step": round(statistics.median(steps), 3),
        "ranks": RANKS,
    }


if __name__ == "__main__":
    for mode in ("", "--no-async-save"):
        print(json.dumps(measure(mode) | origin()))
