"""Compare ZeRO++'s paper with what this program counts and predicts: rows of docs/evidence/zeropp-paper.md.

Published values, their addresses and the thresholds of verdicts stand in ``results/papers.toml``.
`examples/reproduce.sh --write` writes the page. Rates are the planner's for DeepSpeed, without their own rows.
"""

import statistics
import tomllib
from collections.abc import Sequence

import planner_published
from planner_published import PAPERS, Published, kept_parts, paper_rows, read_row

from megatron_zpp.planning.cluster import like_program
from megatron_zpp.planning.predict import predict

PAPER = tomllib.loads(PAPERS.read_text())
Row = tuple[str, str, str, str]  # published, ours, how, verdict


def verdict(published: Sequence[float], ours: Sequence[float], compared: Sequence[tuple[float, float]] = ()) -> str:
    """Judge ours by the thresholds of ``papers.toml``.

    compared: ratios, published and ours, whose side of 1 says the direction; default the values themselves.
    """
    bounds, both = PAPER["verdicts"], [*zip(published, ours, strict=True)]
    if statistics.median(abs(b / a - 1) for a, b in both) <= bounds["reproduced"]:
        return "reproduced"
    agree = [(a > 1) == (b > 1) for a, b in compared or both]
    return "same direction" if sum(agree) >= bounds["direction"] * len(agree) else "not seen"


def run_of(gpus: int, billions: float, gbits: float, tokens: int, arm: str) -> Published:
    """Describe a run as the paper's rows do."""
    layers, hidden = PAPER["zeropp"]["shapes"][str(billions)]
    changes = dict(layers=layers, hidden=hidden, heads=hidden // 128)
    changes |= dict(gpus=gpus, network_gbps_per_node=gbits, micro_batch_per_gpu=max(1, tokens // 512), dp_kind=arm)
    return read_row(paper_rows()[0] | changes)


def seconds(run: Published) -> float:
    return predict(like_program(run.cluster, "deepspeed"), run.needs).time.seconds


def rows() -> list[Row]:
    """Return the rows that are counted or predicted."""
    unseen, found = planner_published.held_out(kept_parts()), list[Row]()
    rates = {row["id"]: row["tflops"] for row in paper_rows()}

    def add(
        published: str,
        values: Sequence[float],
        ours: str,
        counted: Sequence[float],
        how: str,
        compared: Sequence[tuple[float, float]] = (),
    ) -> None:
        found.append((published, ours, how, verdict(values, counted, compared)))

    both = "ZeRO-3", "ZeRO++"
    runs = [run_of(384, 18, 100, 1024, arm) for arm in both]
    sent = [run.needs.sent_per_node / 2 / run.needs.parameters for run in runs]
    said = "bytes between nodes over the model's: 3 and 0.75 (Table 1)"
    add(said, (3, 0.75), f"{sent[0]:.2f} and {sent[1]:.2f}", sent, "counted, 18B on 384 GPUs")
    held_out = "predicted, held out"
    for table, what in (("table-2", "49 to 138B"), ("figure-11", "18B"), ("figure-13", "each technique alone, 18B")):
        names = [name for name in rates if name.startswith(table)]
        values, off = [rates[name] for name in names], [unseen[name] for name in names]
        said = f"{len(names)} rates of {what} ({PAPER['zeropp'][table]['address'].partition(',')[0]})"
        median = statistics.median(abs(each - 1) for each in off)
        add(
            said, values, f"{median:.1%} off in the median", [a * b for a, b in zip(values, off, strict=True)], held_out
        )
    speedups = planner_published.speedups_of(unseen)
    published, ours = ([pair[i] for pair in speedups.values()] for i in (0, 1))
    said = f"18B is {min(published):.2f} to {max(published):.2f} times as fast as with ZeRO-3 (Figure 11)"
    add(said, published, f"{min(ours):.2f} to {max(ours):.2f}", ours, held_out)
    fewer = paper_rows(["figure-1"])
    values = [row["tflops"] for row in fewer]
    ours = [row["tflops"] * read_row(row).ratio() for row in fewer]
    most = [rates[f"figure-11 18B {row['gpus']} 800 2048 ZeRO-3"] for row in fewer]
    slower = [(a / c, b / c) for a, b, c in zip(values, ours, most, strict=True)]
    median = statistics.median(abs(b / a - 1) for a, b in zip(values, ours, strict=True))
    said = "ZeRO-3 at 200 and 400 Gbit/s, and with 512 tokens (Figure 1)"
    add(said, values, f"{median:.1%} off in the median", ours, "predicted; not among the fitted rows", slower)
    ratio = seconds(run_of(384, 18, 800, 2048, "ZeRO-3")) / seconds(run_of(384, 18, 200, 2048, "ZeRO++"))
    said = "ZeRO++ at 200 Gbit/s is 1.06 times as fast as ZeRO-3 at 800, 18B (Figure 12)"
    add(said, [1.06], f"{ratio:.2f} times", [ratio], "predicted, 2,048 tokens on 384 GPUs")
    shares = [sum(run_of(1024, 100, 100, 512, arm).needs.largest.states.values()) for arm in ("hpZ", "ZeRO-3")]
    said = "hpZ needs 8.9 times ZeRO-3's memory, 100B on 1,024 GPUs (Figure 4)"
    add(said, [8.9], f"{shares[0] / shares[1]:.1f} times", [shares[0] / shares[1]], "estimated, fp32 gradients")
    fits = PAPER["zeropp"]["table-4"]["fits"]
    needed = {}
    for name in fits:
        size, kind = name.split()
        arm = "hpZ" if kind == "hpZ" else "HSDP"  # MiCS shards in a node alone, as HSDP does
        needed[name] = run_of(64, float(size) if "." in size else int(size), 800, 1024, arm).needs.memory / 1e9
    said = "hpZ fits in 32 GB at 7.5B and 18B, MiCS at 7.5B alone (Table 4)"
    cells = ", ".join(f"{name.replace(' ', 'B ')} {nbytes:.0f} GB" for name, nbytes in needed.items())
    agrees = all((needed[name] < 32) == fits[name] for name in fits)
    found.append((said, cells, "estimated", "reproduced" if agrees else "not seen"))
    runs = [run_of(64, 18, 100, 512, arm) for arm in both]
    ratio = seconds(runs[0]) / seconds(runs[1])
    said = "18B on 64 V100: 9,956 and 3,681 ms, 2.71 times as fast (tutorial's log)"
    times = " and ".join(f"{1000 * seconds(run):,.0f}" for run in runs)
    add(said, [9956 / 3681], f"{times} ms, {ratio:.2f} times", [ratio], "predicted at 100 Gbit/s, which is not stated")
    memory = [run.needs.memory / 1e6 for run in runs]
    said = "at most 8,285 and 10,258 MB allocated (tutorial's log)"
    more = [(10258 / 8285, memory[1] / memory[0])]
    add(said, (8285, 10258), f"{memory[0]:,.0f} and {memory[1]:,.0f} MB", memory, "estimated", more)
    return found
