"""Preferences and reinforcement learning under ZeRO++: what is learned, what is sent, and how long a step takes.

    make test-integrations                                  # installs the packages
    sudo .venv/bin/python benchmarks/rl.py                  # everything; appends to benchmarks/results/rl.jsonl
    .venv/bin/python benchmarks/rl.py --only learning       # TRL's trainers alone, which need no network namespaces

Learning: DPO, and GRPO with two rewards, by ``examples/library/trl_trainers.py`` on 2 nodes of 2 ranks. The race:
a step of GRPO (4 rollouts of 24 tokens, 2 epochs) with each way to have weights for the rollouts, in turns, in the
cluster in a box at ``--rate``.
"""

import json
import re
from statistics import median
from typing import Any

from cluster_in_a_box import check_requirements, cluster, programs
from common import RESULTS, ROOT, append_row, markdown_table, new_parser, read_rows, run_trainer

PATH = RESULTS / "rl.jsonl"
LEARNING = {  # by name: words of trl_trainers.py, and what must become of a figure
    "DPO": ("dpo --steps 60", "margins"),
    "GRPO, digits": ("grpo --steps 60 --lr 1e-2", "reward"),
    "GRPO, addition": ("addition --steps 800", "reward"),
}


def learn(name: str) -> dict[str, Any]:
    words, figure = LEARNING[name]
    out = run_trainer(f"examples/library/trl_trainers.py {words}", program="examples/library/on_cpus.py", cwd=ROOT)
    steps = re.findall(r"^step \d+: (.*); bytes (.*)$", out, re.MULTILINE)
    # A step that trains on the last one's rollouts logs no reward.
    values = [float(value) for logged, _ in steps for value in re.findall(rf"{figure} (-?[\d.]+)", logged)]
    sent = [[float(value) for value in of_step.split()] for _, of_step in steps]
    right = re.findall(r"^right: (\d+) of (\d+)$", out, re.MULTILINE)
    return {
        "figure": figure,
        "first": values[0],
        "last": values[-1],
        "steps": len(steps),
        "policy_bytes_per_parameter": sent[-1][:2],
        **(
            {"reference_bytes": [sent[0][2:], [max(of) for of in zip(*(s[2:] for s in sent[1:]), strict=True)]]}
            if len(sent[0]) > 2
            else {}
        ),
        **({"right": [int(count) for count in right[0]]} if right else {}),
    }


def race(rate: str, rounds: int) -> list[dict[str, Any]]:
    check_requirements()
    command = [str(ROOT / "benchmarks/rl_race.py"), "--rounds", str(rounds)]
    rows, words = [], []
    with cluster(2, rate) as namespaces, programs(command, namespaces, 2) as processes:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:  # rank 0's node
            words.append(line)
            if line.startswith("{"):
                rows.append(json.loads(line))
                print(line, end="", flush=True)
        if processes[0].wait() != 0:
            raise RuntimeError(f"the race failed:\n{''.join(words[-30:])}")
    return rows


def table_of_learning() -> str:
    """Return results: each task's last run, and the bytes of a reference per parameter, between nodes."""
    lines = []
    for name, r in {row["what"]: row for row in read_rows(PATH) if "figure" in row}.items():
        right = "{} of {}".format(*r["right"]) if "right" in r else ""
        reference = ", ".join(f"{between:g}" for between, _ in r.get("reference_bytes", ()))
        lines.append([name, r["steps"], r["figure"], f"{r['first']:.2f}", f"{r['last']:.2f}", right, reference])
    headings = ("", "steps", "figure", "first", "last", "right", "bytes of the reference, step 1 and later")
    return markdown_table(headings, lines)


def table_of_rollouts() -> str:
    """The last race."""
    race = [row for row in read_rows(PATH) if row["what"] == "race"][-1]
    steps = [row for row in race["rows"] if "setting" in row]
    names = dict.fromkeys(row["setting"] for row in steps)
    seconds = {name: sorted(row["seconds"] for row in steps if row["setting"] == name) for name in names}
    lines = []
    for name, of in seconds.items():
        sent = median(row["bytes_of_a_node"] for row in steps if row["setting"] == name)
        over = median(of) / median(seconds["resident weights"])
        lines.append([name, f"{median(of):.2f} ({of[0]:.2f} to {of[-1]:.2f})", f"{over:.1f}", f"{sent / 1e6:.2f}"])
    return markdown_table(("weights for rollouts", "s a step", "times resident", "MB a node and step"), lines)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", choices=("learning", *LEARNING, "race"))
    parser.add_argument("--rate", default="100mbit", help="of each node's link, as tc takes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="kept with the results, such as how busy the machine was")
    arguments = parser.parse_args()
    if arguments.only != "race":
        for name in [arguments.only] if arguments.only in LEARNING else LEARNING:
            append_row(PATH, {"what": name, "note": arguments.note, **learn(name)})
    if arguments.only in (None, "race"):
        rows = race(arguments.rate, arguments.rounds)
        append_row(PATH, {"what": "race", "note": arguments.note, "rate": arguments.rate, "rows": rows})


if __name__ == "__main__":
    main()
