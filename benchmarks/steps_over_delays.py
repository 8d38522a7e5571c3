"""Steps with moved codes over distant links, before and after several units shared a collective between nodes.

    git worktree add ../before bc71d37  # the last commit with a collective for each unit
    (cd ../before && ../megatron_zpp/.venv/bin/python setup.py build_ext --inplace)
    sudo .venv/bin/python benchmarks/steps_over_delays.py --before ../before
    .venv/bin/python benchmarks/steps_over_delays.py --table

Both trees train in turns in the cluster in a box, 2 nodes of 2 ranks at 150 Mbit/s, so that they share the machine's
slow minutes. A row of ``benchmarks/results/steps_over_delays.jsonl`` is one run; ratios are medians over the rounds.
"""

from functools import partial
from pathlib import Path
from statistics import median

from common import RESULTS, ROOT, markdown_table, measure_once, read_rows
from steps_over_links import MODEL, MOVES, WARMUP, WIRE, measure_or_show, run_on

PATH = RESULTS / "steps_over_delays.jsonl"
RATE, STEPS, ROUNDS, DELAYS = "150mbit", 10, 3, (0, 10, 50)


def measure(before: Path) -> None:
    flags = f"{MODEL} {WIRE} {MOVES} 6 --seq-length 256 --train-iters {STEPS + WARMUP}"
    for turn in range(ROUNDS):
        for delay in DELAYS:
            for name, tree in (("before", before), ("after", ROOT))[:: 1 - 2 * (turn % 2)]:
                key = {"tree": name, "delay_ms": delay, "round": turn}
                measure_once(PATH, key, partial(run_on, tree, flags, RATE, delay))


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
    measure_or_show(__doc__, "bc71d37", measure, lambda: print(table()))
