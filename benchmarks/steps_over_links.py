"""Steps with moved codes beside steps with 4-bit weight differences, which they replaced, over slow and distant links.

    git worktree add ../before cdc7657  # the last commit with weight differences
    (cd ../before && ../megatron_zpp/.venv/bin/python setup.py build_ext --inplace)
    sudo .venv/bin/python benchmarks/steps_over_links.py --before ../before
    .venv/bin/python benchmarks/steps_over_links.py --table

Both trees train in turns in the cluster in a box, 2 nodes of 2 ranks, so that they share the machine's slow minutes. A
row of ``benchmarks/results/steps_over_links.jsonl`` is one run; ratios are medians over the rounds.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cluster_in_a_box import run
from common import RESULTS, ROOT, markdown_table, measure_once, new_parser, read_rows

PATH = RESULTS / "steps_over_links.jsonl"
MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 4 --mock-data "
    "--vocab-size 1024 --attention-dropout 0 --hidden-dropout 0 --lr 3e-4 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --bf16 --grad-reduce-in-bf16"
)
WIRE = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"
TWO_BITS = "--zeropp-gradient-bits 2 --zeropp-gradient-element-scales --zeropp-gradient-bits-warmup 1:4"
MOVES = "--zeropp-weight-moves --zeropp-weight-bits"
DIFFERENCES, OLDER_KERNELS = "4-bit differences", "moved int6, 2-bit gradients, older kernels"
SETTINGS = {  # name: (whether the older tree runs it, flags)
    DIFFERENCES: (True, "--zeropp-weight-difference-bits 4"),
    "moved int8": (False, f"{MOVES} 8"),
    "moved int6": (False, f"{MOVES} 6"),
    "moved int6, 2-bit gradients": (False, f"{MOVES} 6 {TWO_BITS}"),
    OLDER_KERNELS: (True, f"{MOVES} 6 {TWO_BITS}"),
}
DELAYS = (0, 10, 50)  # ms
# rate, sequence length, delay, rounds, steps
CELLS = [
    (rate, length, delay, rounds if delay == 0 else 1, steps)
    for rate, length, rounds, steps in (("150mbit", 256, 3, 10), ("300mbit", 64, 3, 16), (None, 64, 5, 24))
    for delay in DELAYS
]
WARMUP = 4  # steps; the first sends all weights in full


def measure(before: Path) -> None:
    for rate, length, delay, rounds, steps in CELLS:
        names = [name for name in SETTINGS if name != OLDER_KERNELS or (rate is None and delay == 0)]
        for turn in range(rounds):
            for name in names if turn % 2 else reversed(names):
                is_older, flags = SETTINGS[name]
                flags = f"{MODEL} {WIRE} {flags} --seq-length {length} --train-iters {steps + WARMUP}"
                key = {"setting": name, "rate": rate, "delay_ms": delay, "round": turn}
                measure_once(PATH, key, partial(run_on, before if is_older else ROOT, flags, rate, delay))


def run_on(tree: Path, flags: str, rate: str | None, delay: float) -> dict[str, Any]:
    command = [str(tree.resolve() / "pretrain_gpt.py"), *flags.split()]
    found = run(command, 2, 2, rate, warmup_steps=WARMUP, timeout=900, echo=False, delay_ms=delay)
    return asdict(found) | {"command": f"pretrain_gpt.py {flags}"}


def table(delays: Collection[int] = (0,)) -> str:
    """Medians over the rounds as Markdown, and ratios to the differences of the same round."""
    rows = {(row["rate"], row["delay_ms"], row["setting"], row["round"]): row for row in read_rows(PATH)}
    lines = []
    for (rate, length, delay, rounds, _), name in itertools.product(CELLS, SETTINGS):
        pairs = [[rows.get((rate, delay, which, turn)) for which in (name, DIFFERENCES)] for turn in range(rounds)]
        found = [(row, base) for row, base in pairs if row is not None and base is not None]
        if not found or delay not in delays:
            continue
        seconds, sent, counted = (
            median(row[key] for row, _ in found)
            for key in ("seconds_per_step", "bytes_per_node_and_step", "counted_bytes_per_node_and_step")
        )
        ratios = [row["seconds_per_step"] / base["seconds_per_step"] for row, base in found]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cells = [f"{sent / 1e6:.2f}", f"{counted / sent:.3f}", f"{seconds:.3f}", spread]
        lines.append([rate or "unlimited", length, delay, name, *cells])
    headings = ["rate", "sequence", "delay, ms", "setting", "MB a node", "counted / interface", "s a step"]
    return markdown_table([*headings, "over differences"], lines)


def measure_or_show(
    doc: str | None, commit: str, measure: Callable[[Path], None], print_table: Callable[[], None]
) -> None:
    """Run a benchmark of this tree beside a worktree of an older ``commit``, by the command line."""
    parser = new_parser(doc)
    parser.add_argument("--before", type=Path, help=f"a built worktree of commit {commit}")
    parser.add_argument("--table", action="store_true", help="print the table of what was measured")
    arguments = parser.parse_args()
    if arguments.before:
        measure(arguments.before)
    elif not arguments.table:
        parser.error("give --before FOLDER or --table")
    print_table()


if __name__ == "__main__":
    measure_or_show(__doc__, "cdc7657", measure, lambda: print(table(DELAYS)))
