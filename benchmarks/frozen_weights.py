"""What LoRA sends between nodes under ZeRO++, and its loss: examples/library/lora.py with each way to send weights.

    python benchmarks/frozen_weights.py  # five minutes; adds to benchmarks/results/frozen_weights.jsonl
    examples/reproduce.sh --write        # the kept results into docs/reference/frozen-weights.md

4 ranks, which --zero-hpz-partition-size 2 divides into 2 nodes. Needs transformers and peft.
"""

import re
from functools import partial
from typing import Any

from common import RESULTS, markdown_table, measure_once, new_parser, read_rows, run_trainer

PATH = RESULTS / "frozen_weights.jsonl"
WAYS = {
    "16 bits": "--weight-bits 16",
    "16 bits, moves": "--weight-bits 16 --moves",
    "8 bits": "--weight-bits 8",
    "8 bits, moves": "--weight-bits 8 --moves",
    "4 bits": "--weight-bits 4",
    "16 bits, frozen matrices in NF4": "--weight-bits 16 --nf4",
    "8 bits, frozen matrices in NF4": "--weight-bits 8 --nf4",
    "8 bits, moves, frozen matrices in NF4": "--weight-bits 8 --moves --nf4",
}
STEPS = (1, 10, 40)


def measure(flags: str) -> dict[str, Any]:
    log = run_trainer(flags, program="examples/library/lora.py")
    lines = re.findall(r"step (\d+): loss ([\d.]+), \d+ bytes, ([\d.]+) per", log)
    steps = {step: {"loss": float(loss), "bytes": float(nbytes)} for step, loss, nbytes in lines}
    return {"steps": steps}


def table() -> str:
    rows = {row["flags"]: row["steps"] for row in read_rows(PATH)}
    headings = ["weights", *(f"bytes, step {step}" for step in STEPS), "loss, step 40"]
    lines = []
    for name, flags in WAYS.items():
        sent = [f"{rows[flags][str(step)]['bytes']:.3f}" for step in STEPS]
        lines.append([name, *sent, f"{rows[flags]['40']['loss']:.4f}"])
    return markdown_table(headings, lines)


def main() -> None:
    new_parser(__doc__).parse_args()
    for flags in WAYS.values():
        measure_once(PATH, {"flags": flags}, partial(measure, flags))
    print(table())


if __name__ == "__main__":
    main()
