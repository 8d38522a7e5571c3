"""Steps with moved codes beside steps with 4-bit weight differences, which they replaced, over slow and distant links.

    git worktree add ../before cdc7657  # the last commit with weight differences
    (cd ../before && ../megatron_zpp/.venv/bin/python setup.py build_ext --inplace)
    sudo .venv/bin/python benchmarks/steps_over_links.py --before ../before
    .venv/bin/python benchmarks/steps_over_links.py --table

Both trees train in turns in the cluster in a box, 2 nodes of 2 ranks, so that they share the machine's slow minutes. A
row of ``benchmarks/results/steps_over_links.jsonl`` is one run; ratios are medians over the rounds.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median

from cluster_in_a_box import run
from common import RESULTS, ROOT, append_row, markdown_table, new_parser, read_rows

PATH = RESULTS / "steps_over_links.jsonl"
MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 4 --mock-data "
    "--vocab-size 1024 --attention-dropout 0 --hidden-dropout 0 --lr 3e-4 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --bf16 --grad-reduce-in-bf16"
)
WIRE = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"
TWO_BITS = "--zeropp-gradient-bits 2 --zeropp-gradient-element-scales --zeropp-gradient-bits-warmup 1:4"
MOVES = "--zeropp-weight-moves --zeropp-weight-bits"
DIFFERENCES = "4-bit differences"
SETTINGS = {  # name: (whether the older tree runs it, flags)
    DIFFERENCES: (True, "--zeropp-weight-difference-bits 4"),
    "moved int8": (False, f"{MOVES} 8"),
    "moved int6": (False, f"{MOVES} 6"),
    "moved int6, 2-bit gradients": (False, f"{MOVES} 6 {TWO_BITS}"),
    "moved int6, 2-bit gradients, older kernels": (True, f"{MOVES} 6 {TWO_BITS}"),
}
# rate, sequence length, delays in ms, rounds, steps
CELLS = [
    ("150mbit", 256, (0, 10, 50), 3, 10),
    ("300mbit", 64, (0, 10, 50), 3, 16),
    (None, 64, (0, 10, 50), 3, 24),
]


def measure(before: Path) -> None:
    for rate, length, delays, rounds, steps in CELLS:
        for delay in delays:
            for turn in range(rounds if delay == 0 else 1):
                names = [name for name in SETTINGS if "older kernels" not in name or (rate is None and delay == 0)]
                for name in names if turn % 2 else reversed(names):
                    cell = {"setting": name, "rate": rate, "delay_ms": delay, "round": turn}
                    if any(cell.items() <= row.items() for row in read_rows(PATH)):
                        continue
                    is_older, flags = SETTINGS[name]
                    flags = f"{MODEL} {WIRE} {flags} --seq-length {length} --train-iters {steps + 4}"
                    command = [str((before if is_older else ROOT).resolve() / "pretrain_gpt.py"), *flags.split()]
                    found = asdict(run(command, 2, 2, rate, warmup_steps=4, timeout=900, echo=False, delay_ms=delay))
                    append_row(PATH, cell | found | {"command": f"pretrain_gpt.py {flags}"})
                    print(cell, f"{found['seconds_per_step']:.3f} s", flush=True)


def print_table() -> None:
    rows = {(r["rate"], r["delay_ms"], r["setting"], r["round"]): r for r in read_rows(PATH)}
    lines = []
    for rate, length, delays, rounds, _ in CELLS:
        for delay in delays:
            base = [rows.get((rate, delay, DIFFERENCES, turn)) for turn in range(rounds)]
            for name in SETTINGS:
                pairs = [(rows.get((rate, delay, name, turn)), first) for turn, first in enumerate(base)]
                found = [(row, first) for row, first in pairs if row and first]
                if found:
                    seconds = median(row["seconds_per_step"] for row, _ in found)
                    ratios = sorted(row["seconds_per_step"] / first["seconds_per_step"] for row, first in found)
                    sent = median(row["bytes_per_node_and_step"] for row, _ in found) / 1e6
                    counted = median(
                        row["counted_bytes_per_node_and_step"] / row["bytes_per_node_and_step"] for row, _ in found
                    )
                    spread = f"{median(ratios):.2f}" + (
                        f" ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else ""
                    )
                    lines.append(
                        [
                            rate or "unlimited",
                            length,
                            delay,
                            name,
                            f"{sent:.2f}",
                            f"{counted:.3f}",
                            f"{seconds:.3f}",
                            spread,
                        ]
                    )
    headings = [
        "rate",
        "sequence",
        "delay, ms",
        "setting",
        "MB a node",
        "counted / interface",
        "s a step",
        "over differences",
    ]
    print(markdown_table(headings, lines))


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--before", type=Path, help="a built worktree of commit cdc7657")
    parser.add_argument("--table", action="store_true", help="print the table of what was measured")
    arguments = parser.parse_args()
    if arguments.before:
        measure(arguments.before)
    elif not arguments.table:
        parser.error("give --before FOLDER or --table")
    print_table()
