"""What islands save over a slow link: two clusters in a box, trained as one by ZeRO-3 and ZeRO++, and as two islands.

    sudo .venv/bin/python benchmarks/between_islands.py measure  # on an idle machine, half an hour
    .venv/bin/python benchmarks/between_islands.py table         # what was measured, as Markdown
    sudo .venv/bin/python benchmarks/between_islands.py unequal  # the same losses from islands that are far or slow?

Two network namespaces of two ranks each stand for the two clusters, joined by a link of 20 Mbit/s. Islands synchronize
every 100 steps: at once, or as two fragments that are in flight for 20 steps. Two whole intervals are measured after
the first. Results are appended to ``benchmarks/results/between_islands.jsonl``, one line a run with its command; what
is there already is not run again. Bytes are read from the namespaces' interfaces; every rank runs the real trainer.
"""

import itertools
import json
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from cluster_in_a_box import SUBNET, cluster, programs, run
from common import ROOT, append_row, markdown_table, measure_once, read_rows, run_choice

RESULTS = common.RESULTS / "between_islands.jsonl"
# 1.1 million parameters, so that ZeRO-3 ends in minutes.
MODEL = (
    "--num-layers 2 --hidden-size 192 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4 --mock-data "
    "--vocab-size 1023 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --eval-iters 0 --num-workers 0 --bf16 "
    "--grad-reduce-in-bf16 --zeropp-ranks-per-node 2"
)
NODES, RANKS_PER_NODE, RATE = 2, 2, "20mbit"
LIGHTHOUSE = f"{SUBNET}.1:29510"
TOKENS = NODES * RANKS_PER_NODE * 4 * 128  # of a step
INTERVAL = 100
AT_ONCE = f"--islands 2 --island-sync-interval {INTERVAL}"
STREAMING = f"{AT_ONCE} --island-fragments 2 --island-sync-delay 20 --island-merge-alpha 0.5"
WIRES = {"fp32": "", "4 bits, LoCo": "--island-bits 4 --island-loco", "2 bits, LoCo": "--island-bits 2 --island-loco"}


@dataclass(frozen=True)
class Setting:
    """How the two clusters train one model."""

    flags: str
    steps: int  # of islands one more than are measured: after the last they also synchronize the steps of no interval
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


def unequal() -> None:
    """Train islands side by side, then 50 ms apart, then with one that stands still half of the time."""
    losses = {}
    for name, delay_ms, is_slow in (("equal", 0.0, False), ("50 ms apart", 50.0, False), ("one slow", 0.0, True)):
        for kind in ("one job", "jobs that may leave"):
            begin = time.monotonic()
            losses[kind, name] = final_losses(kind, delay_ms, is_slow)
            row: dict[str, Any] = {"islands": kind, "case": name, "seconds": round(time.monotonic() - begin, 1)}
            row |= {"validation_losses": losses[kind, name], "alike": losses[kind, name] == losses[kind, "equal"]}
            append_row(RESULTS.with_stem("unequal_islands"), row)
            print(json.dumps(row), flush=True)


def final_losses(kind: str, delay_ms: float, is_slow: bool) -> list[str]:
    """The last validation loss that each island's job prints."""
    flags = f"{MODEL} --eval-iters 4 --train-iters 40 --log-interval 10 --global-batch-size {TOKENS // 128} "
    flags += "--islands 2 --island-sync-interval 10 --island-bits 4 --island-loco"
    with cluster(NODES, RATE, delay_ms) as namespaces, tempfile.TemporaryDirectory() as folder:
        if kind == "one job":
            jobs = programs([str(ROOT / "pretrain_gpt.py"), *flags.split()], namespaces, RANKS_PER_NODE)
        else:
            jobs = elastic_jobs(flags, namespaces, Path(folder) / "secret")
        with jobs as processes:
            if is_slow:
                threading.Thread(target=stop_and_go, args=(namespaces[1], processes), daemon=True).start()
            outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(outputs))
    return [loss for output in outputs for loss in re.findall(r"validation loss at.*?(\d+\.\d+)", output)[-1:]]


@contextmanager
def elastic_jobs(flags: str, namespaces: list[str], secret: Path) -> Iterator[list[subprocess.Popen]]:
    """A lighthouse on the first node, and on each node the job of one island."""
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    at_home = ["ip", "netns", "exec", namespaces[0], sys.executable, "-m", "megatron_zpp", "lighthouse"]
    at_home += ["--bind", LIGHTHOUSE, "--min-islands", str(NODES), "--secret-file", str(secret)]
    with ExitStack() as stack:
        stack.callback(subprocess.Popen(at_home, cwd=ROOT, stdout=subprocess.DEVNULL).kill)
        jobs = []
        for number, namespace in enumerate(namespaces):
            more = f"--islands-may-leave --island-number {number} --island-lighthouse {LIGHTHOUSE} "
            more += f"--island-secret-file {secret} --save {secret.parent}/saved --save-interval 20"
            command = [str(ROOT / "pretrain_gpt.py"), *flags.split(), *more.split()]
            jobs += stack.enter_context(programs(command, [namespace], RANKS_PER_NODE, f"{SUBNET}.{number + 1}"))
        yield jobs


def stop_and_go(namespace: str, processes: list[subprocess.Popen]) -> None:
    """Let the programs of a namespace stand still for 0.2 of every 0.4 seconds."""
    for number in itertools.cycle((signal.SIGSTOP, signal.SIGCONT)):
        if all(process.poll() is not None for process in processes):
            return
        subprocess.run(f"ip netns pids {namespace} | xargs -r kill -{int(number)}", shell=True, capture_output=True)
        time.sleep(0.2)


if __name__ == "__main__":
    run_choice(__doc__, {"measure": measure_all, "table": lambda: print(table()), "unequal": unequal})
