"""Compare ZeRO++'s paper with what this program counts, predicts and trained: rows of docs/evidence/zeropp-paper.md.

Published values, their addresses and the thresholds of verdicts stand in ``results/papers.toml``.
`examples/reproduce.sh --write` writes the page. Rates are the planner's for DeepSpeed, without their own rows.
"""

import json
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import planner_published
import study_tables
from between_nodes import TECHNIQUES
from common import markdown_table, read_rows
from kernels import MEASURED as KERNELS
from planner_published import PAPERS, Published, kept_parts, paper_rows, read_row
from study_experiments import EXPERIMENTS

from megatron_zpp.planning.cluster import like_program
from megatron_zpp.planning.predict import predict

PAPER = tomllib.loads(PAPERS.read_text())
BOTH = "ZeRO-3", "ZeRO++"
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


def verdict_of_loss(published: float, differences: Sequence[float]) -> str:
    """Judge paired differences in percent: their interval holds the published one, or excludes 0, or is too wide."""
    mean, half = statistics.mean(differences), study_tables.half_width(differences)
    if half > max(study_tables.NO_LOSS, abs(published)):
        return "not resolved"
    if abs(published - mean) <= half:
        return "reproduced"
    return "same direction" if published * mean > 0 and abs(mean) > half else "not seen"


def run_of(gpus: int, billions: float, gbits: float, tokens: int, arm: str) -> Published:
    """Describe a run as the paper's rows do."""
    layers, hidden = PAPER["zeropp"]["shapes"][str(billions)]
    cluster = dict(gpus=gpus, network_gbps_per_node=gbits, micro_batch_per_gpu=max(1, tokens // 512), dp_kind=arm)
    return read_row(paper_rows()[0] | dict(layers=layers, hidden=hidden, heads=hidden // 128) | cluster)


def seconds(run: Published) -> float:
    return predict(like_program(run.cluster, "deepspeed"), run.needs).time.seconds


def differences(experiment: str, name: str, rows: study_tables.Rows, group: int = 0) -> list[float]:
    """Return an arm's paired differences from its control in percent."""
    (arm,) = (arm for arm in EXPERIMENTS[experiment].groups[group].arms if arm.name == name)
    return [*study_tables.excesses(arm, rows).values()]


def published_losses() -> dict[str, float]:
    """Return Table 5's differences from ZeRO-3 in percent."""
    table = PAPER["zeropp"]["table-5"]
    return {name: 100 * (loss / table["control"] - 1) for name, loss in table["losses"].items()}


def table_5(rows: study_tables.Rows) -> str:
    """E20 beside the paper's Table 5."""
    published, lines = published_losses(), []
    for arm in EXPERIMENTS["E20"].groups[0].arms[1:]:
        found, change = differences("E20", arm.name, rows), published.get(arm.name)
        said, judged = ("", "") if change is None else (f"{change:+.3f} %", verdict_of_loss(change, found))
        lines.append([arm.name, said, study_tables.difference(found), len(found), study_tables.verdict(found), judged])
    return markdown_table(["over ZeRO-3", "published", "ours", "seeds", "", "verdict"], lines)


def counted_and_estimated() -> list[tuple[str, Row]]:
    """Return the rows of bytes and memory, each with its experiment of ``examples/reproduce.toml``."""
    paper, found = PAPER["zeropp"], list[tuple[str, Row]]()
    published = paper["table-1"]["volume"]
    ours = [needs.sent_per_node / 2 / needs.parameters for needs in (run_of(384, 18, 100, 1024, a).needs for a in BOTH)]
    said = f"bytes between nodes over the model's: {published[0]} and {published[1]} (Table 1)"
    cells = f"{ours[0]:.2f} and {ours[1]:.2f}", "counted, 18B on 384 GPUs", verdict(published, ours)
    found.append(("zeropp-throughput", (said, *cells)))
    hpz, zero3 = (sum(run_of(1024, 100, 100, 512, arm).needs.largest.states.values()) for arm in ("hpZ", "ZeRO-3"))
    published, ours = paper["figure-4"]["memory"], [hpz / zero3, 1024 * zero3 / hpz]
    said = "hpZ needs {} times ZeRO-3's memory, {} times less than data parallelism (Figure 4, 100B, 1,024 GPUs)"
    cells = f"{ours[0]:.1f} and {ours[1]:.0f} times", "estimated, fp32 gradients", verdict(published, ours)
    found.append(("zeropp-memory", (said.format(*published), *cells)))
    fits, needed = paper["table-4"]["fits"], {}
    for name in fits:
        size, kind = name.split()
        arm = "hpZ" if kind == "hpZ" else "HSDP"  # MiCS shards in a node alone, as HSDP does
        needed[name] = run_of(64, float(size) if "." in size else int(size), 800, 1024, arm).needs.memory / 1e9
    said = "hpZ fits in 32 GB at 7.5B and 18B, MiCS at 7.5B alone (Table 4)"
    memory = ", ".join(f"{name.replace(' ', 'B ')} {nbytes:.0f} GB" for name, nbytes in needed.items())
    judged = "reproduced" if all((needed[name] < 32) == fits[name] for name in fits) else "not seen"
    found.append(("zeropp-memory", (said, memory, "estimated", judged)))
    published = paper["tutorial"]["mebibytes"]
    ours = [run_of(64, 18, 100, 512, arm).needs.memory / 2**20 for arm in BOTH]
    said = f"18B on 64 V100: at most {published[0]:,} and {published[1]:,} MiB allocated (tutorial's log)"
    judged = verdict(published, ours, [(published[1] / published[0], ours[1] / ours[0])])
    found.append(("zeropp-memory", (said, f"{ours[0]:,.0f} and {ours[1]:,.0f} MiB", "estimated, recomputing", judged)))
    return found


def predicted() -> list[tuple[str, Row]]:
    """Return the rows of rates, each with its experiment of ``examples/reproduce.toml``."""
    paper, found = PAPER["zeropp"], list[tuple[str, Row]]()
    unseen, held_out = planner_published.held_out(kept_parts()), "predicted, held out"
    rates = {row["id"]: row["tflops"] for row in paper_rows()}

    def median_off(published: Sequence[float], ours: Sequence[float]) -> str:
        return (
            f"{statistics.median(abs(b / a - 1) for a, b in zip(published, ours, strict=True)):.1%} off in the median"
        )

    def ratios(name: str, said: str, published: Sequence[float], ours: Sequence[float], how: str) -> None:
        said = said.format(*(f"{bound(published):.2f}" for bound in (min, max)))
        found.append((name, (said, f"{min(ours):.2f} to {max(ours):.2f}", how, verdict(published, ours))))

    tables = {"table-2": "49 to 138B", "figure-11": "18B", "figure-13": "each technique alone, 18B"}
    for table, what in tables.items():
        names = [name for name in rates if name.startswith(table)]
        published, ours = [rates[name] for name in names], [rates[name] * unseen[name] for name in names]
        said = f"{len(names)} rates of {what} ({paper[table]['address'].partition(',')[0]})"
        row = said, median_off(published, ours), held_out, verdict(published, ours)
        found.append(("zeropp-techniques" if table == "figure-13" else "zeropp-throughput", row))
    pairs = planner_published.speedups_of(unseen).values()
    said = "18B is {} to {} times as fast as with ZeRO-3 (Figure 11)"
    ratios("zeropp-throughput", said, [a for a, _ in pairs], [b for _, b in pairs], held_out)
    alone = [name for name in rates if name.startswith("figure-13")]
    zero3 = [f"figure-11 {' '.join(name.split()[1:-1])} ZeRO-3" for name in alone]
    published = [rates[a] / rates[b] for a, b in zip(alone, zero3, strict=True)]
    ours = [p * unseen[a] / unseen[b] for p, a, b in zip(published, alone, zero3, strict=True)]
    said = "each technique alone is {} to {} times as fast as ZeRO-3 (Figure 13)"
    ratios("zeropp-techniques", said, published, ours, held_out)
    fewer = paper_rows(["figure-1"])
    published = [row["tflops"] for row in fewer]
    ours = [row["tflops"] * read_row(row).ratio() for row in fewer]
    most = [rates[f"figure-11 18B {row['gpus']} 800 2048 ZeRO-3"] for row in fewer]
    slower = [(a / c, b / c) for a, b, c in zip(published, ours, most, strict=True)]
    said, how = "ZeRO-3 at 200 and 400 Gbit/s, and with 512 tokens (Figure 1)", "predicted, not among the fitted rows"
    found.append(("zeropp-throughput", (said, median_off(published, ours), how, verdict(published, ours, slower))))
    for size, published_ratio in paper["figure-12"]["ratio"].items():
        runs = run_of(384, int(size), 800, 2048, "ZeRO-3"), run_of(384, int(size), 200, 2048, "ZeRO++")
        ratio = seconds(runs[0]) / seconds(runs[1])
        said = f"ZeRO++ at 200 Gbit/s is {published_ratio:.2f} times as fast as ZeRO-3 at 800, {size}B (Figure 12)"
        judged = verdict([published_ratio], [ratio])
        found.append(("zeropp-links", (said, f"{ratio:.2f} times", "predicted, 2,048 tokens, 384 GPUs", judged)))
    published = [zeropp / zero3 for *_, zero3, zeropp in paper["table-4"]["rates"]]
    ours = [
        seconds(run_of(64, size, 800, tokens, "ZeRO-3")) / seconds(run_of(64, size, 800, tokens, "hpZ"))
        for size, tokens, *_ in paper["table-4"]["rates"]
    ]
    said = "hpZ alone is {} to {} times as fast as ZeRO-3, 7.5B and 18B on 64 GPUs (Table 4)"
    ratios("zeropp-techniques", said, published, ours, "predicted at 800 Gbit/s, which is not stated")
    published, ours = paper["tutorial"]["milliseconds"], [1000 * seconds(run_of(64, 18, 100, 512, arm)) for arm in BOTH]
    ratio, there = ours[0] / ours[1], published[0] / published[1]
    said = f"18B on 64 V100: {published[0]:,.0f} and {published[1]:,.0f} ms, {there:.1f} times as fast (tutorial's log)"
    shown = f"{ours[0]:,.0f} and {ours[1]:,.0f} ms, {ratio:.1f} times"
    row = said, shown, "predicted at 100 Gbit/s, which is not stated", verdict([there], [ratio])
    return [*found, ("zeropp-tutorial", row)]


def measured(study: study_tables.Rows, tuned: study_tables.Rows) -> list[tuple[str, Row]]:
    """Return the rows that small models and CPUs give, each with its experiment of ``examples/reproduce.toml``."""
    found = list[tuple[str, Row]]()
    for name, change in published_losses().items():
        ours = differences("E20", name, tuned)
        said = f"GPT-350M, 30B tokens: {name} {change:+.3f} % of loss over ZeRO-3 (Table 5)"
        shown = f"{study_tables.difference(ours)}, {len(ours)} seeds: {study_tables.verdict(ours)}"
        found.append(("zeropp-pretraining", (said, shown, "E20, a GPT of 1.3M", verdict_of_loss(change, ours))))
    name, worse = "ZeRO++, weights and gradients non-blocked", {}
    worse["a GPT"] = differences("E3", "4-4, one scale (non-blocked)", study, group=1)
    worse |= {llama: differences("E15", name, study, i) for llama, i in (("a Llama", 2), ("one with outliers", 3))}
    shown = "; ".join(f"{name} {study_tables.difference(values)}" for name, values in worse.items())
    said = "non-blocked quantization diverges at the beginning (Figure 14)"
    found.append(("zeropp-pretraining", (said, f"none diverges; {shown}", "E3 and E15, one scale", "not seen")))
    on_par = {f"int{bits}": differences("E1", f"int{bits}, blocks of 256", study, group=1) for bits in (8, 6)}
    shown = ", ".join(f"{name} {study_tables.difference(values)}" for name, values in on_par.items())
    judged = "reproduced" if {verdict_of_loss(0, each) for each in on_par.values()} == {"reproduced"} else "not seen"
    said = "13B trains on par with 8- and 6-bit gathers of the weights (abstract)"
    found.append(("zeropp-weights", (said, shown, "E1, a GPT of 1.3M", judged)))
    without, with_kernels = PAPER["zeropp"]["table-3"]["tflops"].values()
    steps = [row for row in read_rows(TECHNIQUES) if row["setting"] == "all flags"]

    def seconds_of(*key: Any) -> float:
        return statistics.median(row["seconds_per_step"] for row in steps if (row["rate"], row["kernels"]) == key)

    ratios = [seconds_of(rate, False) / seconds_of(rate, True) for rate in ("300mbit", "1gbit")]
    said = f"18B on 64 V100: with its kernels {with_kernels / without:.2f} times as fast as with torch's (Table 3)"
    alone = min(row["times_plain"] for row in json.loads(KERNELS.read_text())["kernels"] if row["megabytes"] == 64)
    shown = f"{ratios[0]:.2f} and {ratios[1]:.2f} times; [the kernels alone](kernels.md) at least {alone:.0f} times"
    judged = verdict([with_kernels / without] * 2, ratios)
    found.append(("zeropp-kernels", (said, shown, "measured on CPUs, 300 Mbit/s and 1 Gbit/s; ratio only", judged)))
    return found


def rows(study: study_tables.Rows, tuned: study_tables.Rows) -> dict[str, list[Row]]:
    """Return all rows by experiment of ``examples/reproduce.toml``."""
    found = defaultdict(list)
    for name, (published, ours, how, judged) in [*counted_and_estimated(), *predicted(), *measured(study, tuned)]:
        found[name].append((published, ours, f"{how} (`{name}`)", judged))
    return dict(found)
