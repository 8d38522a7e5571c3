"""Steps with moved codes over distant links, before and after several units shared a collective between nodes.

    git worktree add ../before bc71d37  # the last commit with a collective for each unit
    (cd ../before && ../megatron_zpp/.venv/bin/python setup.py build_ext --inplace)
    sudo .venv/bin/python benchmarks/steps_over_delays.py --before ../before
    .venv/bin/python benchmarks/steps_over_delays.py --table

Both trees train in turns in the cluster in a box, 2 nodes of 2 ranks at 150 Mbit/s, so that they share the machine's
slow minutes. A row of ``benchmarks/results/steps_over_delays.jsonl`` is one run; ratios are medians over the rounds.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cluster_in_a_box import run
from common import RESULTS, ROOT, markdown_table, measure_once, new_parser, read_rows

PATH = RESULTS / "steps_over_delays.jsonl"
FLAGS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 4 --mock-data "
    "--vocab-size 1024 --attention-dropout 0 --hidden-dropout 0 --lr 3e-4 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --bf16 --grad-reduce-in-bf16 --zero-quantized-weights --zero-quantized-gradients "
    "--zero-hpz-partition-size 2 --zeropp-loco --zeropp-weight-moves --zeropp-weight-bits 6 --seq-length 256"
)
WARMUP = 4  # steps; the first sends all weights in full
RATE, STEPS, ROUNDS, DELAYS = "150mbit", 10, 3, (0, 10, 50)


def measure(before: Path) -> None:
    flags = f"{FLAGS} --train-iters {STEPS + WARMUP}"
    for turn in range(ROUNDS):
        for delay in DELAYS:
            for name, tree in (("before", before), ("after", ROOT))[:: 1 - 2 * (turn % 2)]:
                key = {"tree": name, "delay_ms": delay, "round": turn}
                measure_once(PATH, key, partial(run_on, tree, flags, RATE, delay))


def run_on(tree: Path, flags: str, rate: str, delay: float) -> dict[str, Any]:
    command = [str(tree.resolve() / "pretrain_gpt.py"), *flags.split()]
    found = run(command, 2, 2, rate, warmup_steps=WARMUP, timeout=900, echo=False, delay_ms=delay)
    return asdict(found) | {"command": f"pretrain_gpt.py {flags}"}


def table() -> str:
    """Medians over the rounds as Markdown, and ratios within each round."""
    rows = {(row["tree"], row["delay_ms"], row["round"]): row["seconds_per_step"] for row in read_rows(PATH)}
    lines = []
    for delay in DELAYS:
        turns = [turn for turn in range(ROUNDS) if {("before", delay, turn), ("after", delay, turn)} <= rows.keys()]
        seconds = [[rows[tree, delay, turn] for turn in turns] for tree in ("before", "after")]
        ratios = [after / before for before, after in zip(*seconds, strict=True)]
        if turns:
            spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append([delay, *(f"{median(each):.3f}" for each in seconds), spread, len(turns)])
    return markdown_table(["delay, ms", "before, s a step", "after", "after / before", "rounds"], lines)


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--before", type=Path, help="a built worktree of commit bc71d37")
    parser.add_argument("--table", action="store_true", help="print the table of what was measured")
    arguments = parser.parse_args()
    if arguments.before:
        measure(arguments.before)
    elif not arguments.table:
        parser.error("give --before FOLDER or --table")
    print(table())
