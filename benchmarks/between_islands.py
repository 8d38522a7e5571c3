"""What islands save over a slow link: two clusters in a box, trained as one by ZeRO-3 and ZeRO++, and as two islands.

    sudo .venv/bin/python benchmarks/between_islands.py measure  # on an idle machine, half an hour
    .venv/bin/python benchmarks/between_islands.py table         # the measurements, as Markdown

Two network namespaces of two ranks each stand for the two clusters, joined by a link of 20 Mbit/s. Islands synchronize
every 100 steps: at once, or as two fragments that are in flight for 20 steps. Two whole intervals are measured after
the first. Results are appended to ``benchmarks/results/between_islands.jsonl``, one line a run with its command; what
is there already is not run again. Bytes are read from the namespaces' interfaces; every rank runs the real trainer.
"""

from dataclasses import asdict, dataclass

import common
from cluster_in_a_box import run
from common import ROOT, markdown_table, measure_once, read_rows, run_choice

RESULTS = common.RESULTS / "between_islands.jsonl"
# 1.1 million parameters, so that ZeRO-3 ends in minutes.
MODEL = (
    "--num-layers 2 --hidden-size 192 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4 --mock-data "
    "--vocab-size 1023 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --eval-iters 0 --num-workers 0 --bf16 "
    "--grad-reduce-in-bf16 --zeropp-ranks-per-node 2"
)
NODES, RANKS_PER_NODE, RATE = 2, 2, "20mbit"
TOKENS = NODES * RANKS_PER_NODE * 4 * 128  # per step
INTERVAL = 100
AT_ONCE = f"--islands 2 --island-sync-interval {INTERVAL}"
STREAMING = f"{AT_ONCE} --island-fragments 2 --island-sync-delay 20 --island-merge-alpha 0.5"
WIRES = {"fp32": "", "4 bits, LoCo": "--island-bits 4 --island-loco", "2 bits, LoCo": "--island-bits 2 --island-loco"}


@dataclass(frozen=True)
class Setting:
    """How the two clusters train one model."""

    flags: str
    steps: int  # islands take one more than is measured: after the last they also synchronize the steps of no interval
    warmup_steps: int
    log_interval: int  # islands meet at log lines


SETTINGS = {
    "ZeRO-3": Setting("", 10, 2, 1),
    "ZeRO++ with LoCo, moved codes": Setting(
        "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco "
        "--zeropp-weight-moves",
        22,
        2,
        1,
    ),
} | {
    f"2 islands, {wire}, {how}": Setting(f"{flags} {bits}".strip(), 3 * INTERVAL + 1, INTERVAL - 1, INTERVAL)
    for how, flags in {"at once": AT_ONCE, "streaming": STREAMING}.items()
    for wire, bits in WIRES.items()
}


def measure_all() -> None:
    for name in SETTINGS:
        measure(name)
    print(table())


def measure(name: str) -> None:
    """Run one setting and append what was measured, unless it is there already."""
    setting = SETTINGS[name]
    flags = f"{MODEL} {setting.flags} --train-iters {setting.steps} --log-interval {setting.log_interval} "
    flags += f"--global-batch-size {TOKENS // 128}"
    key = {"setting": name, "rate": RATE, "command": f"pretrain_gpt.py {' '.join(flags.split())}"}
    command, shape = [str(ROOT / "pretrain_gpt.py"), *flags.split()], (NODES, RANKS_PER_NODE, RATE)
    measure_once(RESULTS, key, lambda: asdict(run(command, *shape, setting.warmup_steps, timeout=1800, echo=False)))


def table() -> str:
    """Speed, and bytes out of a cluster, of each setting."""
    rows = {row["setting"]: row for row in read_rows(RESULTS)}
    base = rows.get("ZeRO-3")
    lines = []
    for name, row in rows.items():
        ratio = f"{base['seconds_per_step'] / row['seconds_per_step']:.2f} x" if base else ""
        sent = (f"{row[f'{kind}bytes_per_node_and_step'] / 1e3:,.1f}" for kind in ("", "counted_"))
        lines.append([name, f"{TOKENS / row['seconds_per_step']:,.0f}", ratio, *sent])
    return markdown_table(("setting", "tokens/s", "over ZeRO-3", "kB a step out of a cluster", "counted"), lines)


if __name__ == "__main__":
    run_choice(__doc__, {"measure": measure_all, "table": lambda: print(table())})
