"""The planner's predictions beside public measurements of others' programs. ``planner.py published`` prints them.

Of programs with FSDP, ZeRO-3, HSDP and ZeRO-1 in 16 bit, some with tensor parallelism or pipelines; each row has its
source.
It fits one constant for each kind of GPU, the share of its peak that matrix products reach, so that the median error is
least, and shows the error that is left, all misses, and a scatter plot.
"""

from __future__ import annotations

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

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT, LLAMA, Architecture
from megatron_zpp.planning.cluster import Cluster, default_cluster
from megatron_zpp.planning.predict import Estimate, estimate_on, predict
from megatron_zpp.planning.search.candidates import RECOMPUTE_ALL
from megatron_zpp.planning.search.plan import complete
from megatron_zpp.settings.resolved import ResolvedSettings

PUBLISHED = RESULTS / "published_throughput.jsonl"
SCATTER = RESULTS / "planner_published.png"
RECOMPUTATIONS = {
    "none": "",
    "selective": "--recompute-activations",
    "selective (every n-th block)": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
}
MISS = 0.3  # of the measured rate


@dataclass(frozen=True)
class Published:
    """A row, and what predicts it."""

    row: dict[str, Any]
    gpu: str
    architecture: Architecture
    settings: ResolvedSettings
    cluster: Cluster
    needs: Estimate

    def predicted(self, efficiency: float) -> float:
        """Tokens per second and GPU."""
        cluster = dataclasses.replace(self.cluster, efficiency=efficiency)
        return predict(cluster, self.needs).tokens_per_second / cluster.world_size

    def ratio(self, efficiency: float) -> float:
        return self.predicted(efficiency) / self.row["tokens_s_gpu"]


def print_errors() -> None:
    rows = [read_row(row) for row in read_rows(PUBLISHED)]
    by_gpu: dict[str, list[Published]] = defaultdict(list)
    for row in rows:
        by_gpu[row.gpu].append(row)
    fitted = {gpu: fit(rows_of_gpu) for gpu, rows_of_gpu in by_gpu.items()}
    ratios = {id(row): row.ratio(fitted[row.gpu]) for row in rows}
    lines = []
    for gpu, some in {**by_gpu, "all": rows}.items():
        errors = sorted(abs(ratios[id(row)] - 1) for row in some)
        share = f"{fitted[gpu]:.2f}" if gpu in fitted else ""
        lines.append([gpu, len(some), share, f"{statistics.median(errors):.1%}", f"{at(errors, 0.9):.1%}"])
    print(markdown_table(("GPU", "rows", "share of the peak", "median error", "90 % of rows within"), lines))
    programs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        programs[row.gpu, row.row["source"].partition("@")[0].partition(" ")[0]].append(ratios[id(row)])
    lines = []
    for (gpu, program), found in sorted(programs.items()):
        error = statistics.median(abs(ratio - 1) for ratio in found)
        lines.append([gpu, program, len(found), f"{statistics.median(found):.2f}", f"{error:.1%}"])
    print("\n" + markdown_table(("GPU", "program", "rows", "median of predicted / measured", "median error"), lines))
    misses = [row for row in sorted(rows, key=lambda row: ratios[id(row)]) if abs(ratios[id(row)] - 1) > MISS]
    headings = ("row", "what", "tokens/s/GPU, measured", "predicted", "off by", "source")
    print(f"\nRows that are off by more than {MISS:.0%}:\n")
    print(markdown_table(headings, [miss(row, ratios[id(row)]) for row in misses]))
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        measured = row.row["tokens_s_gpu"]
        points[row.gpu].append((measured, measured * ratios[id(row)]))
    scatter(points, "tokens per second and GPU", 0.15, SCATTER)


def at(values: list[float], share: float) -> float:
    """A quantile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]


def fit(rows: list[Published]) -> float:
    """The share of the peak, to a percent, at which the median error is least."""

    def error(efficiency: float) -> float:
        return statistics.median(abs(row.ratio(efficiency) - 1) for row in rows)

    about = min(range(10, 91, 5), key=lambda percent: error(percent / 100))
    return min((percent / 100 for percent in range(about - 4, about + 5)), key=error)


def read_row(row: dict[str, Any]) -> Published:
    gpu = kind_of(row["gpu_type"])
    nodes = max(1, row["gpus"] // row["gpus_per_node"])
    per_node = row["gpus"] // nodes
    cluster = default_cluster(nodes, per_node, gpu, row["network_gbps_per_node"] or 1.0)  # 1: of one node, not used
    architecture, flags = flags_of(row, nodes)
    vocabulary = row["vocab"] or 50257
    words, _ = complete(shlex.split(flags), cluster, vocabulary)
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
