"""Are the planner's predictions right? Compared with published measurements, and with the cluster in a box.

    .venv/bin/python benchmarks/planner.py published  # predicts the rows of results/published_throughput.jsonl
    .venv/bin/python benchmarks/planner.py table      # docs/planner.md's: models, nodes, rates
    .venv/bin/python benchmarks/planner.py islands    # docs/islands.md's: rates between two sites
    sudo .venv/bin/python benchmarks/planner.py box   # measures in the cluster in a box: on an idle machine, an hour
    .venv/bin/python benchmarks/planner.py compare    # those measurements beside what is predicted for them

``published`` fits one constant for each kind of GPU, the share of its peak that matrix products reach, so that the
median error is least, and shows the error that is left, all misses, and a scatter plot. The rows are public
measurements of others' programs with FSDP, ZeRO-3, HSDP and ZeRO-1, without tensor or pipeline parallelism, in 16 bit;
each has its source.

``box`` calibrates on 2 nodes x 2 ranks over an unlimited link with ``tools/measure_cluster.py``, then trains two models
over links of several rates with several settings. What is in ``results/planner_box.jsonl`` is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planner_islands
from rows import append_row, has_row, read_rows

from megatron_zpp.architectures import GPT, LLAMA, Architecture
from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.planning.candidates import RECOMPUTE_ALL
from megatron_zpp.planning.cluster import ClusterSpec, default_cluster, read_cluster
from megatron_zpp.planning.plan import Outcome, complete, make_plan
from megatron_zpp.planning.predict import Estimate, estimate_on, predict
from megatron_zpp.planning.table import suggested
from megatron_zpp.settings.groups import Settings

RESULTS = Path(__file__).parent / "results"
PUBLISHED, SCATTER = RESULTS / "published_throughput.jsonl", RESULTS / "planner_published.png"
RECOMPUTATIONS = {
    "none": "",
    "selective": "--recompute-activations",
    "selective (every n-th block)": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
}
MISS = 0.3  # of the measured rate


# Published measurements


@dataclass(frozen=True)
class Published:
    """A row, and what predicts it."""

    row: dict[str, Any]
    gpu: str
    architecture: Architecture
    settings: Settings
    cluster: ClusterSpec
    needs: Estimate

    def predicted(self, efficiency: float) -> float:
        """Tokens per second and GPU."""
        cluster = dataclasses.replace(self.cluster, efficiency=efficiency)
        return predict(self.architecture, self.settings, cluster, self.needs).tokens_per_second / cluster.world_size

    def ratio(self, efficiency: float) -> float:
        return self.predicted(efficiency) / self.row["tokens_s_gpu"]


def published() -> None:
    rows = [read_row(row) for row in read_rows(PUBLISHED)]
    by_gpu: dict[str, list[Published]] = defaultdict(list)
    for row in rows:
        by_gpu[row.gpu].append(row)
    fitted = {gpu: fit(of_gpu) for gpu, of_gpu in by_gpu.items()}
    print("| GPU | rows | share of the peak | median error | 90 % of rows within |\n|---|---|---|---|---|")
    for gpu, of_gpu in by_gpu.items():
        errors = sorted(abs(row.ratio(fitted[gpu]) - 1) for row in of_gpu)
        print(
            f"| {gpu} | {len(of_gpu)} | {fitted[gpu]:.2f} | {statistics.median(errors):.1%} | {at(errors, 0.9):.1%} |"
        )
    ratios = {id(row): row.ratio(fitted[row.gpu]) for row in rows}
    errors = sorted(abs(ratio - 1) for ratio in ratios.values())
    print(f"| all | {len(rows)} | | {statistics.median(errors):.1%} | {at(errors, 0.9):.1%} |\n")
    print("| GPU | program | rows | median of predicted / measured | median error |\n|---|---|---|---|---|")
    programs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        programs[row.gpu, row.row["source"].partition("@")[0].partition(" ")[0]].append(ratios[id(row)])
    for (gpu, program), of_program in sorted(programs.items()):
        error = statistics.median(abs(ratio - 1) for ratio in of_program)
        print(f"| {gpu} | {program} | {len(of_program)} | {statistics.median(of_program):.2f} | {error:.1%} |")
    print(f"\nRows that are off by more than {MISS:.0%}:\n")
    print("| row | what | tokens/s/GPU, measured | predicted | off by | source |\n|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: ratios[id(row)]):
        if abs(ratios[id(row)] - 1) > MISS:
            print(miss(row, ratios[id(row)]))
    draw(rows, ratios)


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
    told, _ = complete(shlex.split(flags), cluster, vocabulary)
    settings = parse_settings(architecture, told, cluster.world_size, note=lambda _: None)
    needs = estimate_on(architecture, settings, vocabulary, cluster)
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


def miss(row: Published, ratio: float) -> str:
    measured = row.row["tokens_s_gpu"]
    source = row.row["source"].partition(" ")[0]
    return (
        f"| {row.row['id']} | {row.gpu}: {described(row.row)} | {measured:,.0f} | {measured * ratio:,.0f} | "
        f"{ratio - 1:+.0%} | {source} |"
    )


def draw(rows: list[Published], ratios: dict[int, float]) -> None:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        measured = row.row["tokens_s_gpu"]
        points[row.gpu].append((measured, measured * ratios[id(row)]))
    scatter(points, "tokens per second and GPU", 0.15, SCATTER)


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


# The table of the docs

LLAMA_70B = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096"
)
MODELS = {
    "Llama-8B": "--preset llama-8b --seq-length 4096",
    "Llama-13B": "--preset llama-13b --seq-length 4096",
    "Llama-70B": LLAMA_70B,
}
NODES, RATES = (8, 64, 512), (25, 100, 400, 800)
TOKENS_PER_GPU = 4 * 4096  # of a step
LLAMA_3_VOCABULARY = 128256


def table() -> None:
    """Of each model, nodes and rate: MFU of the best of each kind, and what is suggested."""
    headings = ["model", "nodes", "Gbit/s", "ZeRO-3", "HSDP", "all flags", "int4 differences, int8 state", "suggested"]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for model, flags in MODELS.items():
        for nodes in NODES:
            for rate in RATES:
                cluster = default_cluster(nodes, 8, "H100", rate)
                batch = f"--global-batch-size {TOKENS_PER_GPU // 4096 * cluster.world_size}"
                plan = make_plan(LLAMA, f"{flags} {batch}".split(), LLAMA_3_VOCABULARY, cluster)
                found = {outcome.candidate.travel.name: outcome for outcome in reversed(plan.outcomes)}
                kinds = ("ZeRO-3", "HSDP", "all flags", "all flags, int4 differences, int8 state")
                cells = [cell(found.get(kind)) for kind in kinds]
                best = suggested(plan).candidate if plan.outcomes else None
                said = f"{best.travel.name}, {best.layout.name}" if best is not None else "nothing"
                print(f"| {model} | {nodes} | {rate} | {' | '.join(cells)} | {said} |", flush=True)


def cell(found: Outcome | None) -> str:
    if found is None:
        return "does not fit"
    return f"{found.prediction.mfu:.0%}, {found.prediction.time.seconds:.2f} s, {found.candidate.layout.name}"


# The cluster in a box

BOX, BOX_CLUSTER = RESULTS / "planner_box.jsonl", RESULTS / "planner_box.yaml"
BOX_SCATTER = RESULTS / "planner_box.png"
BOX_NODES, BOX_RANKS = 2, 2
BOX_COMMON = (
    "--seq-length 256 --micro-batch-size 1 --mock-data --vocab-size 1023 --attention-dropout 0 --hidden-dropout 0 "
    "--lr 1e-4 --eval-iters 0 --log-interval 1 --num-workers 0 --bf16 --grad-reduce-in-bf16"
)
BOX_MODELS = {
    "26M": f"--num-layers 8 --hidden-size 512 --num-attention-heads 8 {BOX_COMMON}",
    "7M": f"--num-layers 8 --hidden-size 256 --num-attention-heads 4 {BOX_COMMON}",
}
BOX_ALL = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"
BOX_SETTINGS = {
    "ZeRO-3": "--zero-ranks-per-node 2",
    "all flags": BOX_ALL,
    "all flags, int4 differences": f"{BOX_ALL} --zero-weight-difference-bits 4",
}
BOX_SIZES = "--hidden-size 512 --tokens 256"  # of what is measured before: those of the larger model
BOX_RATES = (300, 1000, 4000)  # Mbit/s
BOX_STEPS = {1: 14, 4: 6}  # by micro-batches, the first three of which are not measured
HEADERS = 1514 / 1448  # bytes of an Ethernet frame over those of its payload; tc counts frames
BOX_VOCABULARY = 1024  # the 1023 and the end of a document


def box() -> None:
    from cluster_in_a_box import check_requirements, cluster, programs, run

    check_requirements()
    root = Path(__file__).parents[1]
    if not BOX_CLUSTER.exists():
        tool = [str(root / "tools" / "measure_cluster.py"), "--output", str(BOX_CLUSTER)]
        tool += BOX_SIZES.split()
        with cluster(BOX_NODES, None) as namespaces, programs(tool, namespaces, BOX_RANKS) as processes:
            said = [process.communicate(timeout=900)[0] for process in processes]
        if not BOX_CLUSTER.exists():
            raise RuntimeError(f"the cluster was not measured:\n{said[0]}")
    points = itertools.product(BOX_MODELS, BOX_STEPS, BOX_RATES, BOX_SETTINGS)
    for model, micro_batches, rate, setting in points:
        key = {"model": model, "setting": setting, "micro_batches": micro_batches, "mbit": rate}
        if has_row(BOX, key):
            continue
        batch = BOX_NODES * BOX_RANKS * micro_batches
        flags = f"{BOX_MODELS[model]} {BOX_SETTINGS[setting]} --global-batch-size {batch} "
        flags += f"--train-iters {BOX_STEPS[micro_batches]}"
        command = [str(root / "pretrain_gpt.py"), *flags.split()]
        found = run(command, BOX_NODES, BOX_RANKS, f"{rate}mbit", warmup_steps=2, timeout=1800, echo=False)
        row = key | {"seconds": found.seconds_per_step, "flags": flags}
        append_row(BOX, row)
        print(f"{key}: {found.seconds_per_step:.3f} s, predicted {box_prediction(row):.3f} s", flush=True)


def box_prediction(row: dict[str, Any]) -> float:
    """Seconds of a step."""
    measured = read_cluster(BOX_CLUSTER)
    gbits = min(measured.between_gbits, row["mbit"] / 1000 / HEADERS)
    cluster = dataclasses.replace(measured, between_gbits=gbits)
    settings = parse_settings(GPT, row["flags"].split(), cluster.world_size, note=lambda _: None)
    needs = estimate_on(GPT, settings, BOX_VOCABULARY, cluster)
    return predict(GPT, settings, cluster, needs).time.seconds


def compare() -> None:
    """Errors of all points, and of pairs that differ by more than a tenth the share whose order is predicted."""
    rows = read_rows(BOX)
    if not rows:
        raise SystemExit("nothing is measured yet: run `planner.py box` first, as root on an idle machine")
    predicted = [box_prediction(row) for row in rows]
    headings = ["model", "setting", "micro-batches", "Mbit/s", "measured, s", "predicted, s", "off by"]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for row, seconds in zip(rows, predicted, strict=True):
        cells = [row["model"], row["setting"], str(row["micro_batches"]), str(row["mbit"]), f"{row['seconds']:.3f}"]
        print(f"| {' | '.join(cells)} | {seconds:.3f} | {seconds / row['seconds'] - 1:+.1%} |")
    errors = sorted(abs(seconds / row["seconds"] - 1) for row, seconds in zip(rows, predicted, strict=True))
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, seconds in zip(rows, predicted, strict=True):
        points[f"{row['model']}, {row['setting']}"].append((row["seconds"], seconds))
    scatter(points, "seconds of a step", 0.08, BOX_SCATTER)
    print(f"\n{len(rows)} points: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    same = ("model", "micro_batches", "mbit")
    pairs = [
        (a["seconds"] < b["seconds"]) == (of_a < of_b)
        for (a, of_a), (b, of_b) in itertools.combinations(zip(rows, predicted, strict=True), 2)
        if all(a[name] == b[name] for name in same)
        and max(a["seconds"], b["seconds"]) > 1.1 * min(a["seconds"], b["seconds"])
    ]
    if pairs:
        print(f"order of settings: right in {sum(pairs)} of {len(pairs)} pairs that differ by more than 10 %")


def main() -> None:
    programs: dict[str, Callable[[], None]] = {
        "published": published,
        "table": table,
        "islands": planner_islands.print_table,
        "box": box,
        "compare": compare,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=programs)
    programs[parser.parse_args().what]()


if __name__ == "__main__":
    main()
