"""The planner's predictions beside public measurements of others' programs. ``planner.py published`` prints them.

Rows are of FSDP, ZeRO-3, HSDP, ZeRO-1 and ZeRO++ in 16 bit, some with tensor parallelism or pipelines; each row has its
source. All constants of ``planning/cluster.py`` that data sheets do not state are fitted here: the shares of its peak
that matrix products and attention reach on each chip, what a layer and an expert take of the program itself, and
DeepSpeed's links. Errors are shown with all rows fitted, and of each program when only others' rows are.
"""

import dataclasses
import itertools
import json
import math
import shlex
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from common import RESULTS, markdown_table, read_rows

from megatron_zpp.arguments.parse import parse_settings, stated_flags
from megatron_zpp.families import GPT, LLAMA, Architecture
from megatron_zpp.planning.cluster import (
    EXPERT_MICROSECONDS,
    GPUS,
    LAYER_MICROSECONDS,
    LIKE,
    LINK_SHARE,
    Cluster,
    default_cluster,
    like_program,
)
from megatron_zpp.planning.predict import Estimate, estimate_on, predict
from megatron_zpp.planning.search import RECOMPUTE_ALL, complete
from megatron_zpp.planning.step import step_times
from megatron_zpp.settings.resolved import ResolvedSettings

PUBLISHED = RESULTS / "published_throughput.jsonl"
PAPERS = RESULTS / "papers.toml"
PARTS = RESULTS / "planner_parts.json"  # what a step takes of each constant, by row: what the fit reads
RECOMPUTATIONS = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "selective (every n-th block)": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
}
CHIPS = {"A100-40GB": "A100"}
PRIOR, PRIOR_WEIGHT = 0.3, 0.03  # attention's share where no row says anything of it, and what that counts, in all rows

HPZ = "--zero-hpz-partition-size 16"
ARMS = {
    "ZeRO-3": "",
    "qwZ": "--zero-quantized-weights --zeropp-ranks-per-node 16",
    "hpZ": HPZ,
    "qgZ": "--zero-quantized-gradients --zeropp-ranks-per-node 16",
    "ZeRO++": f"--zero-quantized-weights --zero-quantized-gradients {HPZ}",
}
PAPER_LENGTH, PAPER_VOCABULARY = 512, 50257  # the tutorial's; of the paper's runs not stated

Constants = dict[str, float]


@dataclass(frozen=True)
class Parts:
    """The parts of a row's predicted step, by the constant that scales each."""

    name: str
    gpu: str
    program: str
    like: str  # "" or a name of LIKE
    group: tuple[Any, ...]  # for the paper's rows: billions of parameters, Gbit/s, tokens
    measured: float  # seconds of a step
    # For a rank of each stage: seconds of all else, of products and of attention at the peak; passes of layers, of
    # experts, and hops between nodes; seconds of links between nodes at their nominal rate, and of those that run
    # meanwhile within nodes.
    stages: list[list[float]]

    @property
    def chip(self) -> str:
        return CHIPS.get(self.gpu, self.gpu)


@dataclass(frozen=True)
class Published:
    """A row, and what predicts it."""

    row: dict[str, Any]
    gpu: str
    settings: ResolvedSettings
    cluster: Cluster
    needs: Estimate

    @property
    def program(self) -> str:
        return str(self.row["source"].partition("@")[0].partition(" ")[0])

    @property
    def like(self) -> str:
        return "deepspeed" if "ZeRO-3" in self.row["dp_kind"] or self.row["dp_kind"] in ARMS else ""

    @property
    def step_seconds(self) -> float:
        return self.needs.tokens / self.needs.steps / self.cluster.world_size / float(self.row["tokens_s_gpu"])

    def ratio(self) -> float:
        """Predicted over measured rate, by the constants of ``planning/cluster.py``."""
        cluster = like_program(self.cluster, self.like) if self.like else self.cluster
        return self.step_seconds / predict(cluster, self.needs).time.seconds

    def parts(self) -> Parts:
        changes: dict[str, Any] = dict(efficiency=1, attention_efficiency=1)
        changes |= dict(layer_microseconds=0, expert_microseconds=0)
        if self.like:
            changes |= dict(overlaps=False, between_microseconds=0, between_gbits=1e12)

        def seconds(**more: Any) -> np.ndarray:
            times = step_times(self.needs, dataclasses.replace(self.cluster, **(changes | more)))
            return np.array([time.seconds for time in times])

        rest, nothing = seconds(), np.zeros(len(self.needs.ranks))
        found = [rest, seconds(efficiency=0.5) - rest, seconds(attention_efficiency=0.5) - rest]
        found += [seconds(layer_microseconds=1e6) - rest, seconds(expert_microseconds=1e6) - rest]
        if self.like:
            nominal = self.cluster.between_gbits / LINK_SHARE
            links = (seconds(between_gbits=1e-3) - seconds(between_gbits=2e-3)) * 2e-3 / nominal
            hidden = links - (seconds(between_gbits=nominal) - rest)
            found += [seconds(between_microseconds=1e6) - rest, links, hidden]
        else:
            found += [nothing, nothing, nothing]
        stages = [[float(f"{value:.6g}") for value in stage] for stage in np.unique(np.array(found).T, axis=0)]
        name, group = f"{self.row['id']}", tuple(self.row.get("group", ()))
        return Parts(name, self.gpu, self.program, self.like, group, self.step_seconds, stages)


def shipped() -> Constants:
    """Return the constants of ``planning/cluster.py`` by the names of ``fit``."""
    share, hop = LIKE["deepspeed"]
    found = dict(layer=1e-6 * LAYER_MICROSECONDS, expert=1e-6 * EXPERT_MICROSECONDS, link=share, hop=1e-6 * hop)
    for chip in ("V100", "A100", "H100"):
        found[f"{chip} products"], found[f"{chip} attention"] = GPUS[chip][3:]
    return found


def log_ratios(rows: Sequence[Parts], constants: Mapping[str, float]) -> np.ndarray:
    """Return the logarithms of predicted over measured seconds, one of each row."""
    starts = np.cumsum([0, *(len(row.stages) for row in rows[:-1])])
    of_row = [row for row in rows for _ in row.stages]
    rest, products, attention, layers, experts, hops, links, within = np.array([s for r in rows for s in r.stages]).T
    share, attended = (
        np.array([constants[f"{row.chip} {what}"] for row in of_row]) for what in ("products", "attention")
    )
    seconds = rest + products * (1 / share - 1) + attention * (1 / attended - 1)
    seconds += layers * constants["layer"] + experts * constants["expert"] + hops * constants["hop"]
    seconds += np.maximum(0, links / constants["link"] - within)
    slowest: np.ndarray = np.maximum.reduceat(seconds, starts)
    return np.log(slowest / [row.measured for row in rows])


def fit(rows: Sequence[Parts]) -> Constants:
    """Fit all constants by Gauss and Newton, so that the mean error is least: of far rows the first power counts."""
    chips = sorted({row.chip for row in rows})
    start = dict(layer=2e-3, expert=1e-3, link=1.0, hop=5e-4)
    start |= {f"{chip} {what}": share for chip in chips for what, share in (("products", 0.6), ("attention", PRIOR))}
    names, weight = [*start], math.sqrt(PRIOR_WEIGHT * len(rows) / len(chips))

    def constants(x: np.ndarray) -> Constants:
        return {name: float(value) for name, value in zip(names, np.exp(x), strict=True)}

    def residuals(x: np.ndarray) -> tuple[np.ndarray, float]:
        """Return weighted residuals, and the sum that is to be least."""
        found = constants(x)
        errors, prior = log_ratios(rows, found), [math.log(found[f"{c} attention"] / PRIOR) for c in chips]
        smooth = np.sqrt(errors**2 + 0.03**2)
        priors = weight * np.array(prior)
        return np.concatenate([errors / np.sqrt(smooth), priors]), float(smooth.sum() + (priors**2).sum() / 2)

    x, damping = np.log([start[name] for name in names]), 1e-2
    most = np.log([0.95 if "products" in n or "attention" in n else math.inf for n in names])
    for _ in range(200):
        now, cost = residuals(x)
        slopes = np.array([(residuals(x + 1e-5 * row)[0] - now) / 1e-5 for row in np.eye(len(x))]).T
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), -slopes.T @ now)
        there = np.minimum(x + np.clip(step, -0.5, 0.5), most)
        better = residuals(there)[1] < cost
        x, damping = (there, damping / 2) if better else (x, 4 * damping)
        if damping > 1e8:
            break
    return constants(x)


def held_out(rows: Sequence[Parts]) -> dict[str, float]:
    """Return predicted over measured rate of each row, by what rows of other programs fit.

    The paper's rows of 18 billion parameters are predicted without rows of their links and tokens, larger models by
    the rows of 18 billion: its program is the only one of its kind.
    """
    found: dict[str, float] = {}
    paper = [row for row in rows if row.group and row.group[0] == 18]
    others = [row for row in rows if not row.group]
    left_out = [[row for row in others if row.program == program] for program in {row.program for row in others}]
    left_out += [[row for row in paper if row.group == group] for group in {row.group for row in paper}]
    left_out.append([row for row in rows if row.group and row.group[0] != 18])
    for some in left_out:
        names = {row.name for row in some}
        constants = fit([row for row in [*others, *paper] if row.name not in names])
        found |= dict(zip([row.name for row in some], np.exp(-log_ratios(some, constants)).tolist(), strict=True))
    return found


@cache
def kept_parts() -> list[Parts]:
    """Return the parts of all rows, as ``keep_parts`` has kept them."""
    rows = [Parts(*row) for row in json.loads(PARTS.read_text())]
    return [dataclasses.replace(row, group=tuple(row.group)) for row in rows]


def keep_parts() -> str:
    """Compute and keep the parts of all rows; return the constants that they fit, and the shipped ones."""
    rows = [dataclasses.astuple(row.parts()) for row in read_published()]
    PARTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    kept_parts.cache_clear()
    fitted, present = fit(kept_parts()), shipped()
    return markdown_table(["constant", "fitted", "shipped"], [[n, f"{fitted[n]:.3g}", present[n]] for n in fitted])


def unseen_rates(arm: str) -> list[list[tuple[float, float]]]:
    """Return rates of SDP4Bit's or DUO's rows by a step's sum, and as measured, of each length of sequence.

    A step is n micro-batches and bytes over the link's rate. Two of nine rows, the fastest and the slowest, give both,
    since the source states no model. The planner itself needs a model, so it predicts none of these rows.
    """
    found = []
    for name, by_gbits in tomllib.loads(PAPERS.read_text())["sdp4bit"]["table-3"].items():
        rates = [
            (n, 1 / float(g), rate) for g, line in by_gbits.items() for n, rate in zip((32, 16, 8), line, strict=True)
        ]
        ends = rates[0], rates[-1]
        work = np.linalg.solve([[n, link] for n, link, _ in ends], [n / rate for n, _, rate in ends])
        pairs = [(float(n / (work @ [n, link])), rate) for n, link, rate in rates[1:-1]]
        found += [pairs] if name.endswith(arm) else []
    return found


def read_published() -> list[Published]:
    return [read_row(row) for row in [*read_rows(PUBLISHED), *paper_rows()]]


def paper_rows(tables: Iterable[str] = ("figure-11", "figure-13", "table-2")) -> list[dict[str, Any]]:
    """Return lines of the tables of ZeRO++'s paper as rows like the others."""
    paper, rows = tomllib.loads(PAPERS.read_text())["zeropp"], []
    for table in tables:
        for gpus, billions, gbits, tokens, *rates in paper[table]["lines"]:
            layers, hidden = paper["shapes"][str(billions)]
            for arm, rate in zip(paper[table]["arms"], rates, strict=True):
                row = dict(layers=layers, hidden=hidden, heads=hidden // 128, seq=PAPER_LENGTH, vocab=PAPER_VOCABULARY)
                row |= dict(gpu_type="v100", gpus=gpus, gpus_per_node=16, network_gbps_per_node=gbits, dp_kind=arm)
                row |= dict(id=f"{table} {billions}B {gpus} {gbits} {tokens} {arm}", source="ZeRO++ paper", ffn=None)
                row |= dict(model_name=f"GPT-{billions}B", precision="fp16", activation_checkpointing="full")
                row |= dict(micro_batch_per_gpu=tokens // PAPER_LENGTH, grad_accum=1, kv_heads=None)
                row |= dict(tokens_s_gpu=rate * 1e12 / flops_with_recomputation(layers, hidden), tflops=rate)
                rows.append(row | dict(group=(billions, gbits, tokens)))
    return rows


def flops_with_recomputation(layers: int, hidden: int) -> float:
    """Return FLOPs of a token as Megatron's formula and the tutorial count them."""
    rest = 1 + PAPER_LENGTH / (6 * hidden) + PAPER_VOCABULARY / (16 * layers * hidden)
    return 96 * layers * hidden**2 * rest


def tables() -> str:
    """Return the errors of all rows, with all fitted and held out, and the speedups of ZeRO++ that are predicted."""
    rows = kept_parts()
    ratios = dict(zip([row.name for row in rows], np.exp(-log_ratios(rows, shipped())).tolist(), strict=True))
    predictions = ratios, held_out(rows)
    programs: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        size = "49 to 138 billion" if row.group and row.group[0] > 18 else "18 billion"
        programs[f"ZeRO++'s paper, {size}" if row.group else row.program].append(row.name)
        programs[f"all of {row.chip}"].append(row.name)
    lines = [
        [
            program,
            len(names),
            *itertools.chain.from_iterable(errors([of[name] for name in names]) for of in predictions),
        ]
        for program, names in [*sorted(programs.items(), key=lambda item: item[0].lower()), ("all", [*ratios])]
    ]
    kinds = ["predicted / measured", "median error", "90 % of rows within"]
    said = markdown_table(["program", "rows", *kinds, *(f"held out: {kind}" for kind in kinds)], lines)
    unseen = {arm: itertools.chain.from_iterable(unseen_rates(arm)) for arm in ("SDP4Bit", "DUO4Bit")}
    off = {arm: errors([predicted / rate for predicted, rate in rates]) for arm, rates in unseen.items()}
    of_links = "; ".join(
        f"{arm} {median} off in the median, 90 % within {most}" for arm, (_, median, most) in off.items()
    )
    return f"{said}\n\n{speedups(*predictions)}\n\nSlow links, two rows of nine solved for: {of_links}."


def errors(ratios: list[float]) -> list[str]:
    """Return the median, the median error, and the error within which 90 % lie, as cells."""
    found = sorted(abs(ratio - 1) for ratio in ratios)
    most = found[min(len(found) - 1, int(0.9 * len(found)))]
    return [f"{statistics.median(ratios):.2f}", f"{statistics.median(found):.1%}", f"{most:.1%}"]


def speedups_of(predicted: Mapping[str, float], table: str = "figure-11") -> dict[str, tuple[float, float]]:
    """Return how many times as fast as ZeRO-3 ZeRO++ is in a table of the paper: published, and predicted."""
    rates, found = {row["id"]: row["tflops"] for row in paper_rows([table])}, {}
    for zero3 in [name for name in rates if name.endswith("ZeRO-3")]:
        zeropp = zero3.replace("ZeRO-3", "ZeRO++")
        published = rates[zeropp] / rates[zero3]
        found[zero3] = published, published * predicted[zeropp] / predicted[zero3]
    return found


def speedups(*predictions: Mapping[str, float]) -> str:
    """Return the speedups as a table: published, predicted, held out."""
    lines = []
    for name, (published, fitted) in speedups_of(predictions[0]).items():
        unseen = speedups_of(predictions[1])[name][1]
        _, _, gpus, gbits, tokens, _ = name.split()
        cells = [f"{each:.2f}" for each in (published, fitted, unseen)]
        lines.append([gbits, tokens, gpus, *cells, f"{unseen / published - 1:+.0%}"])
    said = ["ZeRO++ / ZeRO-3: published", "predicted", "held out", "off by"]
    return markdown_table(["Gbit/s", "tokens of a GPU", "V100", *said], lines)


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
    return Published(row, gpu, settings, cluster, needs)


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
    words += f"{ARMS.get(kind, '')} "
    checkpointing = row["activation_checkpointing"]
    words += RECOMPUTATIONS.get(checkpointing, RECOMPUTE_ALL)
    return LLAMA if is_llama else GPT, words
