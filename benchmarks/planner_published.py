"""The planner's predictions beside public measurements of others' programs. ``planner.py published`` prints them.

Of programs with FSDP, ZeRO-3, HSDP and ZeRO-1 in 16 bit, some with tensor parallelism or pipelines; each row has its
source.
It fits two constants for each kind of GPU, the shares of its peak that matrix products and attention reach, so that the
median error is least, and shows the error that is left, that of each program when only others' rows are fitted, all
misses, and a scatter plot.
"""

import dataclasses
import itertools
import shlex
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, markdown_table, read_rows

from megatron_zpp.arguments.parse import parse_settings, stated_flags
from megatron_zpp.families import GPT, LLAMA, Architecture
from megatron_zpp.planning.cluster import Cluster, default_cluster, like_program
from megatron_zpp.planning.predict import Estimate, estimate_on, predict
from megatron_zpp.planning.search import RECOMPUTE_ALL, complete
from megatron_zpp.settings.resolved import ResolvedSettings

PUBLISHED = RESULTS / "published_throughput.jsonl"
SCATTER = RESULTS / "planner_published.png"
RECOMPUTATIONS = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "selective (every n-th block)": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
}
MISS = 0.3  # of the measured rate
SHARES_OF_ATTENTION = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
# Names of LIKE by part of the source
LIKE_OF = {"JingchaoZhang": "huggingface", "torchtitan": "torchtitan", "bigscience": "megatron"}
Shares = tuple[float, float]  # of the peak: matrix products, attention


@dataclass(frozen=True)
class Published:
    """A row, and what predicts it."""

    row: dict[str, Any]
    gpu: str
    architecture: Architecture
    settings: ResolvedSettings
    cluster: Cluster
    needs: Estimate

    @property
    def program(self) -> str:
        return str(self.row["source"].partition("@")[0].partition(" ")[0])

    @property
    def like(self) -> str | None:
        return next((LIKE_OF[part] for part in LIKE_OF if part in self.program), None)

    def ratio(self, shares: Shares, like: str | None = None) -> float:
        """Tokens per second and GPU, predicted over measured."""
        cluster = dataclasses.replace(self.cluster, efficiency=shares[0], attention_efficiency=shares[1])
        cluster = cluster if like is None else like_program(cluster, like)
        return predict(cluster, self.needs).tokens_per_second / cluster.world_size / float(self.row["tokens_s_gpu"])


def tables() -> str:
    """Draw the scatter plot, and return what it says."""
    rows = [read_row(row) for row in read_rows(PUBLISHED)]
    by_gpu: dict[str, list[Published]] = defaultdict(list)
    by_program: dict[tuple[str, str], list[Published]] = defaultdict(list)
    for row in rows:
        by_gpu[row.gpu].append(row)
        by_program[row.gpu, row.program].append(row)
    fitted = {gpu: fit(rows_of_gpu) for gpu, rows_of_gpu in by_gpu.items()}
    ratios = {id(row): row.ratio(fitted[row.gpu]) for row in rows}
    lines = []
    for gpu, some in {**by_gpu, "all": rows}.items():
        errors = sorted(abs(ratios[id(row)] - 1) for row in some)
        products_and_attention = [f"{share:.2f}" for share in fitted[gpu]] if gpu in fitted else ["", ""]
        lines.append(
            [gpu, len(some), *products_and_attention, f"{statistics.median(errors):.1%}", f"{at(errors, 0.9):.1%}"]
        )
    headings = ["GPU", "rows", "products", "attention", "median error", "90 % of rows within"]
    said = [markdown_table(headings, lines)]
    lines, held_out = [], []
    for (gpu, program), some in sorted(by_program.items(), key=lambda item: item[0]):
        cells = [gpu, program, len(some), *ratio_and_error([ratios[id(row)] for row in some])]
        others = [row for row in by_gpu[gpu] if row.program != program]
        shares = fit(others) if others else None
        found = [row.ratio(shares) for row in some] if shares is not None else []
        held_out += [abs(ratio - 1) for ratio in found]
        like = some[0].like
        of_like = [row.ratio(fitted[gpu], like) for row in some] if like is not None else []
        lines.append([*cells, *ratio_and_error(found), *ratio_and_error(of_like)])
    headings = ["GPU", "program", "rows", "predicted / measured", "error"]
    headings += ["fitted without it: ratio", "error", "with `--like`: ratio", "error"]
    said.append(markdown_table(headings, lines))
    median = statistics.median(held_out)
    said.append(f"Median error of {len(held_out)} rows by what other programs' rows fit: {median:.1%}")
    misses = [row for row in sorted(rows, key=lambda row: ratios[id(row)]) if abs(ratios[id(row)] - 1) > MISS]
    headings = ["row", "what", "tokens/s/GPU, measured", "predicted", "off by", "source"]
    said.append(f"Rows that are off by more than {MISS:.0%}:")
    said.append(markdown_table(headings, [miss(row, ratios[id(row)]) for row in misses]))
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        measured = row.row["tokens_s_gpu"]
        points[row.gpu].append((measured, measured * ratios[id(row)]))
    scatter(points, "tokens per second and GPU", 0.15, SCATTER)
    return "\n\n".join(said)


def ratio_and_error(ratios: list[float]) -> list[str]:
    """The medians of ratios and of their distance from 1, as cells."""
    if not ratios:
        return ["", ""]
    return [f"{statistics.median(ratios):.2f}", f"{statistics.median(abs(ratio - 1) for ratio in ratios):.1%}"]


def at(values: list[float], share: float) -> float:
    """A quantile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]


def fit(rows: list[Published]) -> Shares:
    """The shares of the peak at which the median error is least."""

    def error(shares: Shares) -> float:
        return statistics.median(abs(row.ratio(shares) - 1) for row in rows)

    about = min(itertools.product(range(20, 81, 6), SHARES_OF_ATTENTION), key=lambda s: error((s[0] / 100, s[1])))
    nearby = [(percent / 100, about[1]) for percent in range(about[0] - 5, about[0] + 6)]
    return min(nearby, key=error)


def read_row(row: dict[str, Any]) -> Published:
    gpu = kind_of(row["gpu_type"])
    nodes = max(1, row["gpus"] // row["gpus_per_node"])
    per_node = row["gpus"] // nodes
    cluster = default_cluster(nodes, per_node, gpu, row["network_gbps_per_node"] or 1.0)  # 1: of one node, not used
    if "collective_gbps" in row:  # what the source measured with nccl-tests
        cluster = dataclasses.replace(cluster, between_gbits=row["collective_gbps"])
    architecture, flags = flags_of(row, nodes)
    vocabulary = row["vocab"] or 50257
    given = shlex.split(flags)
    words, _ = complete(given, stated_flags(architecture, given), cluster, vocabulary)
    settings = parse_settings(architecture, words, cluster.world_size, note=lambda _: None)
    needs = estimate_on(cluster, architecture, settings, vocabulary)
    return Published(row, gpu, architecture, settings, cluster, needs)


def kind_of(name: str) -> str:
    """The planner's name of a GPU."""
    text = name.lower().replace("_", " ")
    if "40gb" in text and "a100" in text:
        return "A100-40GB"
    return next(kind for kind in ("V100", "A100", "H100") if kind.lower() in text)


def flags_of(row: dict[str, Any], nodes: int) -> tuple[Architecture, str]:
    """The trainer's flags that come nearest to what the row says."""
    name, precision, kind = row["model_name"].lower(), row["precision"], row["dp_kind"]
    is_llama = any(word in name for word in ("llama", "intern", "qwen", "mixtral"))
    words = f"--num-layers {row['layers']} --hidden-size {row['hidden']} --num-attention-heads {row['heads']} "
    words += f"--seq-length {row['seq']} --micro-batch-size {row['micro_batch_per_gpu']} "
    tensor, pipeline = row.get("tp") or 1, row.get("pp") or 1
    data = row["gpus"] // tensor // pipeline
    words += f"--global-batch-size {data * row['micro_batch_per_gpu'] * (row['grad_accum'] or 1)} "
    if tensor * pipeline > 1:
        words += f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
    if row["layers"] % pipeline:  # BLOOM's: embedding and output layer count as a layer each
        ends = (row["layers"] + 2) // pipeline - 1
        words += f"--decoder-first-pipeline-num-layers {ends} --decoder-last-pipeline-num-layers {ends} "
    if tensor > 1 and "torchtitan" in row["source"]:
        words += "--sequence-parallel "
    if row["ffn"]:
        words += f"--ffn-hidden-size {row['ffn']} "
    if row["kv_heads"] and row["kv_heads"] != row["heads"]:
        words += f"--group-query-attention --num-query-groups {row['kv_heads']} "
    if "mixtral" in name:
        words += "--num-experts 8 --moe-router-topk 2 "
    words += "--fp16 " if "fp16" in precision else "--bf16 "
    # llm-foundry's DEFAULT and torchtitan reduce gradients in fp32, the others in 16 bit.
    if "fp16" not in precision and not any(word in precision + kind for word in ("DEFAULT", "FSDP2", "fp32 gradient")):
        words += "--grad-reduce-in-bf16 "
    if "ZeRO-1" in kind or kind == "none":  # what shards nothing is not planned
        words += "--zero-stage 1 "
    if "HSDP" in kind or "Hybrid" in kind:
        words += f"--num-distributed-optimizer-instances {nodes} " if nodes > 1 else ""
    checkpointing = row["activation_checkpointing"]
    words += RECOMPUTATIONS.get(checkpointing, RECOMPUTE_ALL)
    return LLAMA if is_llama else GPT, words


def described(row: dict[str, Any]) -> str:
    network = f" at {row['network_gbps_per_node']:g} Gbit/s" if row["gpus"] > row["gpus_per_node"] else ""
    divided = "".join(f", {kind.upper()}{row[kind]}" for kind in ("tp", "pp") if (row.get(kind) or 1) > 1)
    return (
        f"{row['model_name']}, {row['gpus']} GPUs{network}, {row['dp_kind'].partition(' (')[0]}{divided}, "
        f"{row['micro_batch_per_gpu']} x {row['seq']} tokens"
    )


def miss(row: Published, ratio: float) -> list[str]:
    measured, source = row.row["tokens_s_gpu"], row.row["source"].partition(" ")[0]
    what = f"{row.gpu}: {described(row.row)}"
    return [row.row["id"], what, f"{measured:,.0f}", f"{measured * ratio:,.0f}", f"{ratio - 1:+.0%}", source]


def scatter(points: Mapping[str, list[tuple[float, float]]], what: str, bar: float, path: Path) -> None:
    """What was measured and what is predicted, by the name of a group."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 6), layout="constrained")
    for (name, of_name), marker in zip(points.items(), itertools.cycle("os^Dv")):
        measured, predicted = zip(*of_name, strict=True)
        axes.scatter(measured, predicted, s=16, alpha=0.7, marker=marker, label=f"{name}, {len(of_name)} points")
    all_measured = [point[0] for of_name in points.values() for point in of_name]
    ends = [min(all_measured) / 2, max(all_measured) * 2]
    axes.plot(ends, ends, color="0.4", linewidth=1, label="as measured")
    below, above = ([(1 + sign * bar) * x for x in ends] for sign in (-1, 1))
    axes.fill_between(ends, below, above, color="0.4", alpha=0.15, label=f"± {bar:.0%}")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel=f"measured, {what}", ylabel=f"predicted, {what}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
