"""How much of the network's time hides behind computation: steps over the least time that they could take.

    git worktree add ../before COMMIT && make -C ../before .venv/.ready
    sudo .venv/bin/python benchmarks/overlap.py measure [--before ../before] [--steps 5] [--repetitions 3]
    .venv/bin/python benchmarks/overlap.py table

A GPT of 26M parameters, sequences of 256, trains with all flags, LoCo and moved codes on the cluster in a
box, 2 nodes x 2 ranks. The bound of a step of m micro-batches is

    max(T_f, T_w) + max(T_b, T_g) + (m - 1) (T_f + T_b) + T_opt

T_f is the time in the model's forward pass and the loss, T_b that in ``backward()``, T_opt the rest of a step: data,
clipping, the optimizer, logging. They are wall-clock medians of the last rank, of a run with one micro-batch over an
unlimited link, so gathers and reductions within the node, encoding, decoding and gloo's own work between the nodes are
in them. T_w and T_g are the link's time for the weights and for the gradients that leave a node per step: bytes as the
program counts them, and the headers that Ethernet, IP and TCP add, over the rate of the link. The rates are those at
which (T_w + T_g) / (T_f + T_b) without headers is 0.25, 0.5, 1, 2 and 4; 0 is an unlimited link.

Beside it run ZeRO-3 of FSDP2, which takes minutes a step at the slowest link, and with --before the same flags in
another checkout, against the same bound. All repetitions go to
``benchmarks/results/overlap.jsonl``; what is there already is not measured again. Each repetition measures the parts of
a step again, and the table shows medians.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import ALL_FLAGS as FLAGS
from common import RESULTS as FOLDER
from common import ROOT, markdown_table, measure_once, new_parser, read_rows

RESULTS = FOLDER / "overlap.jsonl"
NODES, RANKS_PER_NODE = 2, 2
MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 1 --mock-data "
    "--vocab-size 1024 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --bf16 --grad-reduce-in-bf16"
)
ALL_FLAGS = f"{FLAGS} --zeropp-weight-moves"
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the link's time to that of a forward and a backward pass
MICRO_BATCHES = (1, 4)
SETTINGS = ("this checkout", "FSDP2", "before")
WARM_UP_STEPS = 2
HEADERS = 1514 / 1448  # bytes of an Ethernet frame over those of its payload, with TCP's timestamps; tc counts frames
TIMEOUT = 3600.0  # seconds of one run
PARTS = "parts of a step: "  # begins the line that the last rank prints


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--steps", type=int, default=5, help="that are timed in each run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    arguments = parser.parse_args()
    if arguments.what == "table":
        print(table())
        return
    checkouts = {"this checkout": (ROOT, ALL_FLAGS), "FSDP2": (ROOT, "")}
    if arguments.before is not None:
        checkouts["before"] = (arguments.before.resolve(), ALL_FLAGS)
    for repetition in range(arguments.repetitions):
        measure(checkouts, repetition, arguments.steps, arguments.ratios, arguments.micro_batches)


def measure(
    checkouts: dict[str, tuple[Path, str]], repetition: int, steps: int, ratios: list[float], counts: list[int]
) -> None:
    """One repetition: the parts of a step, then each checkout for each rate and number of micro-batches."""
    key: dict[str, Any] = {"setting": "parts", "repetition": repetition}
    measure_once(RESULTS, key, partial(run, ROOT, ALL_FLAGS, 1, None, steps))
    parts = next(row for row in read_rows(RESULTS) if key.items() <= row.items())
    for ratio in ratios:
        rate = parts_rate(parts, ratio)
        for micro_batches in counts:
            for setting, (checkout, flags) in checkouts.items():
                key = {"setting": setting, "repetition": repetition, "ratio": ratio, "micro_batches": micro_batches}
                row = measure_once(RESULTS, key, partial(run, checkout, flags, micro_batches, rate, steps))
                if row is not None:
                    over = row["step_s"] / bound(parts, rate, micro_batches)
                    print(f"    {row['step_s']:.3f} s, {over:.2f} x the bound", file=sys.stderr)


def parts_rate(parts: dict[str, Any], ratio: float) -> int | None:
    """Bits per second at which the link is busy ``ratio`` times as long as a forward and a backward pass take."""
    if ratio == 0:
        return None
    return round(8 * (parts["weight_bytes"] + parts["gradient_bytes"]) / (ratio * (parts["t_f"] + parts["t_b"])))


def bound(parts: dict[str, Any], rate: int | None, micro_batches: int) -> float:
    """Seconds that a step takes at least; see above."""
    per_byte = 8 * HEADERS / rate if rate is not None else 0.0
    t_f, t_b = parts["t_f"], parts["t_b"]
    t_w, t_g = per_byte * parts["weight_bytes"], per_byte * parts["gradient_bytes"]
    return max(t_f, t_w) + max(t_b, t_g) + (micro_batches - 1) * (t_f + t_b) + parts["t_opt"]


def run(checkout: Path, flags: str, micro_batches: int, rate: int | None, steps: int) -> dict[str, Any]:
    """Train ``steps`` and some more on the cluster in a box, with the code of ``checkout``."""
    from cluster_in_a_box import check_requirements, cluster, programs

    check_requirements()
    batch = NODES * RANKS_PER_NODE * micro_batches
    command = [__file__, "train", *f"{MODEL} {flags} --global-batch-size {batch}".split()]
    command += ["--train-iters", str(WARM_UP_STEPS + steps + 1)]  # a step is over when the next one begins
    os.environ["PYTHONPATH"] = str(checkout)
    tc_rate = f"{rate}bit" if rate is not None else None
    with cluster(NODES, tc_rate) as namespaces, programs(command, namespaces, RANKS_PER_NODE) as processes:
        deadline = time.monotonic() + TIMEOUT
        statuses: list[int | None] = [None]
        while None in statuses and not any(statuses) and time.monotonic() < deadline:
            time.sleep(0.1)
            statuses = [process.poll() for process in processes]
        done = [process for process, status in zip(processes, statuses, strict=True) if status is not None]
        output = "".join(process.stdout.read() for process in done if process.stdout is not None)
    lines = [line for line in output.splitlines() if line.startswith(PARTS)]
    if any(status != 0 for status in statuses) or len(lines) != 1:
        raise RuntimeError(f"a run failed, or took longer than {TIMEOUT} s:\n{output[-8000:]}")
    command[0] = Path(__file__).name
    measured = {"rate_bit_per_s": rate, "command": " ".join(command), "steps": steps}
    return json.loads(lines[0].removeprefix(PARTS)) | measured


def train(flags: list[str]) -> None:
    """The trainer on one rank, with a stopwatch; the last rank prints medians over the steps after the first few."""
    import torch

    from megatron_zpp.commands.pretrain import pretrain as program
    from megatron_zpp.families import GPT
    from megatron_zpp.models.transformer import Transformer
    from megatron_zpp.parallel.distributed import exit_process
    from megatron_zpp.training import pretrain
    from megatron_zpp.training.loss import LossTotals
    from megatron_zpp.zeropp import Traffic

    seconds = {"forward": 0.0, "backward": 0.0}
    sent = {"weights": 0, "gradients": 0}
    begins: list[float] = []
    of_run: list[Traffic] = []
    of_steps: list[dict[str, float]] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **options)
            seconds[part] += time.perf_counter() - begin
            return result

        return wrapped

    def counted(traffic: Traffic, intra_node: int = 0, inter_node: int = 0, **stays: bool) -> None:
        if any(traffic is other for other in of_run):  # not the logger's sums
            # What stays, until parameters change, are weights. Another checkout may not tell.
            sent["weights" if stays.get("stays") else "gradients"] += inter_node
        add(traffic, intra_node=intra_node, inter_node=inter_node, **stays)

    def timed_step(run: Any, *args: Any, **options: Any) -> Any:
        now, of_run[:] = time.perf_counter(), [run.zeropp.traffic]
        if begins:  # from the beginning of one step to that of the next one
            of_steps.append({**seconds, **sent, "step": now - begins[-1]})
        begins.append(now)
        seconds.update(forward=0.0, backward=0.0)
        sent.update(weights=0, gradients=0)
        return train_step(run, *args, **options)

    add, train_step = Traffic.add, pretrain.train_step
    sys.argv[1:] = [*flags]
    with (
        patch.object(Traffic, "add", counted),
        patch.object(pretrain, "train_step", timed_step),
        patch.object(Transformer, "__call__", timed("forward", Transformer.__call__)),
        patch.object(LossTotals, "add", timed("forward", LossTotals.add)),
        patch.object(torch.Tensor, "backward", timed("backward", torch.Tensor.backward)),
    ):
        program(GPT)
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        steady = {key: statistics.median(of_step[key] for of_step in of_steps[WARM_UP_STEPS:]) for key in of_steps[0]}
        parts = {
            "t_f": steady["forward"],
            "t_b": steady["backward"],
            "t_opt": steady["step"] - steady["forward"] - steady["backward"],
            "step_s": steady["step"],
            # With all flags, every rank of a node sends as much.
            "weight_bytes": RANKS_PER_NODE * steady["weights"],
            "gradient_bytes": RANKS_PER_NODE * steady["gradients"],
        }
        print(PARTS + json.dumps(parts), flush=True)
    exit_process(0)  # gloo's threads may abort a process that ends otherwise


def table() -> str:
    """Seconds of a step, and over the bound, by the share of computing that the link takes."""
    rows = read_rows(RESULTS)
    parts = {row["repetition"]: row for row in rows if row["setting"] == "parts"}
    rows = [row for row in rows if row["setting"] != "parts"]
    settings = [setting for setting in SETTINGS if any(row["setting"] == setting for row in rows)]
    lines = []
    for micro_batches, ratio in sorted({(row["micro_batches"], row["ratio"]) for row in rows}):
        case = [row for row in rows if (row["micro_batches"], row["ratio"]) == (micro_batches, ratio)]
        rates = {row["repetition"]: row["rate_bit_per_s"] for row in case}
        bounds = {i: bound(parts[i], rate, micro_batches) for i, rate in rates.items()}
        cells = []
        for setting in settings:
            step = {row["repetition"]: row["step_s"] for row in case if row["setting"] == setting}
            over = [seconds / bounds[i] for i, seconds in step.items()]
            cells.append(f"{statistics.median(step.values()):.3f} s ({statistics.median(over):.2f} x)" if over else "-")
        lines.append([micro_batches, f"{ratio:g}", f"{statistics.median(bounds.values()):.3f}", *cells])
    return markdown_table(["micro-batches", "link / compute", "bound, s", *settings], lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2:])
    else:
        main()
