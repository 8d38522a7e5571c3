"""Measure, on the cluster in a box, the bytes between nodes and the speed of each technique: ZeRO-3 beside ZeRO++.

    sudo .venv/bin/python benchmarks/between_nodes.py bytes  # bytes per parameter and step, several settings
    sudo .venv/bin/python benchmarks/between_nodes.py techniques  # seconds of a step by technique, in turns

Results are appended to ``benchmarks/results/between_nodes_{bytes,techniques}.jsonl``, one line a run with
its command; what is there already is not run again. Bytes are read from the nodes' interfaces; every rank
runs the real trainer. ``benchmarks/reproduce.py --write`` writes the tables into pages.
"""

import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from cluster_in_a_box import run
from common import RESULTS, ROOT, markdown_table, measure_once, read_rows, run_choice

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT

BYTES, TECHNIQUES = (RESULTS / f"between_nodes_{what}.jsonl" for what in ("bytes", "techniques"))
# 26M parameters, and hardly any tokens: the network is what is measured.
MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 32 --micro-batch-size 1 --mock-data "
    "--vocab-size 1024 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --bf16 --grad-reduce-in-bf16"
)
VOCABULARY = 1152  # NullTokenizer's 1024 and the end of a document, padded to a multiple of 128
QUANTIZED = "--zero-quantized-weights --zero-quantized-gradients"
SETTINGS = {
    "ZeRO-3 bf16": "",
    "HSDP bf16": "--num-distributed-optimizer-instances {N}",
    "hierarchy alone: hpZ, gradients once per step, bf16": "--zero-hpz-partition-size {P} --zero-quantized-gradients "
    "--zeropp-gradient-bits 0 --zeropp-gradient-intra-bits 0",
    "qwZ alone": "--zero-quantized-weights --zeropp-ranks-per-node {P}",
    "hpZ alone": "--zero-hpz-partition-size {P}",
    "qgZ alone": "--zero-quantized-gradients --zeropp-ranks-per-node {P}",
    "all flags": f"{QUANTIZED} --zero-hpz-partition-size {{P}}",
    "all flags, LoCo": f"{QUANTIZED} --zero-hpz-partition-size {{P}} --zeropp-loco",
    "all flags, LoCo, moved codes": f"{QUANTIZED} --zero-hpz-partition-size {{P}} --zeropp-loco --zeropp-weight-moves",
    "all flags, LoCo, moved 6-bit codes, 2-bit gradients": f"{QUANTIZED} --zero-hpz-partition-size {{P}} "
    "--zeropp-loco --zeropp-weight-moves --zeropp-weight-bits 6 --zeropp-gradient-bits 2 "
    "--zeropp-gradient-element-scales --zeropp-gradient-bits-warmup 1:4",
}
INT6 = "all flags, LoCo, moved 6-bit codes, 2-bit gradients"
NAMES = {  # in tables
    "ZeRO-3 bf16": "ZeRO-3 (FSDP2's own collectives)",
    "HSDP bf16": "HSDP, a replica on each node",
    "hierarchy alone: hpZ, gradients once per step, bf16": "the hierarchy alone, unquantized",
    "all flags, LoCo, moved codes": "all flags, LoCo, moved int8 codes",
    INT6: "all flags, LoCo, moved int6 codes, 2-bit gradients",
}
WITHOUT_TENSOR_PARALLELISM = list(SETTINGS)
SETTINGS |= {
    f"{name}, tensor parallel 2": f"{SETTINGS[name]} --tensor-model-parallel-size 2 --sequence-parallel"
    for name in ("all flags", "all flags, LoCo")
}
# One stage on each node: only hidden states cross, large enough that messages' own bytes hardly count. The output layer
# is apart from the embeddings, whose gradients would cross too.
STAGES = "pipeline of 2, one stage a node"
SETTINGS[STAGES] = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --seq-length 256"
BYTES_SHAPES = {  # (nodes, ranks of a node)
    (2, 2): WITHOUT_TENSOR_PARALLELISM,
    (3, 2): WITHOUT_TENSOR_PARALLELISM[-4:],
    (2, 3): WITHOUT_TENSOR_PARALLELISM[-4:],
    (2, 4): ["all flags, tensor parallel 2", "all flags, LoCo, tensor parallel 2"],
}
PIPELINE_MICRO_BATCHES = (2, 8)
TECHNIQUE_RATES = ["300mbit", "1gbit"]
TECHNIQUE_SETTINGS = [  # name, whether its kernels are used
    ("ZeRO-3 bf16", True),
    ("qwZ alone", True),
    ("hpZ alone", True),
    ("qgZ alone", True),
    ("all flags", True),
    ("all flags, LoCo", True),
    ("all flags", False),
    ("all flags, LoCo", False),
]
TECHNIQUE_ROUNDS = 3


def measure_bytes() -> None:
    for (nodes, ranks_per_node), names in BYTES_SHAPES.items():
        for name in names:
            for micro_batches in (1, 8):
                measure(BYTES, name, nodes, ranks_per_node, micro_batches, None, steps=16)
    for micro_batches in PIPELINE_MICRO_BATCHES:
        measure(BYTES, STAGES, 2, 2, micro_batches, None, steps=16)


def measure_techniques() -> None:
    for rate, turn in itertools.product(TECHNIQUE_RATES, range(TECHNIQUE_ROUNDS)):
        for name, kernels in TECHNIQUE_SETTINGS if turn % 2 else reversed(TECHNIQUE_SETTINGS):
            os.environ["ZEROPP_KERNELS"] = "" if kernels else "off"
            measure(TECHNIQUES, name, 2, 2, 1, rate, steps=6, more={"kernels": kernels, "round": turn})


def measure(
    path: Path,
    name: str,
    nodes: int,
    ranks_per_node: int,
    micro_batches: int,
    rate: str | None,
    steps: int,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Run one setting and append what was measured, unless it is there already. ``more``: of the row's key."""
    shape = {"setting": name, "nodes": nodes, "ranks_per_node": ranks_per_node}
    data_parallel = ranks_per_node // (2 if "tensor parallel 2" in name else 1)  # per node
    copies = nodes * data_parallel // (2 if name == STAGES else 1)  # copies of the model
    flags = f"{MODEL} {SETTINGS[name].format(P=data_parallel, N=nodes)} --train-iters {steps}"
    flags += f" --global-batch-size {copies * micro_batches}"

    def measured() -> dict[str, Any]:
        command = [str(ROOT / "pretrain_gpt.py"), *flags.split()]
        found = asdict(run(command, nodes, ranks_per_node, rate, warmup_steps=1, timeout=900, echo=False))
        settings = parse_settings(GPT, flags.split(), nodes * ranks_per_node, note=lambda _: None)
        parameters = GPT.num_parameters(GPT.build_config(settings.model, VOCABULARY))
        return found | {"parameters": parameters, "command": f"pretrain_gpt.py {flags}"}

    if row := measure_once(path, shape | {"rate": rate, "micro_batches": micro_batches, **(more or {})}, measured):
        print(f"    {per_parameter(row):.3f} bytes/parameter, {row['tokens_per_second']:.0f} tokens/s", file=sys.stderr)


def per_parameter(row: dict[str, Any]) -> float:
    return row["bytes_per_node_and_step"] / row["parameters"]


def bytes_table() -> str:
    """Bytes that leave a node per parameter and optimizer step, read from its interface."""
    sent, lines = bytes_sent(), []
    for (nodes, ranks), name in [(shape, name) for shape, names in BYTES_SHAPES.items() for name in names]:
        one, eight = (sent.get((nodes, ranks, name, micro_batches)) for micro_batches in (1, 8))
        if one and eight:
            lines.append([f"{nodes} x {ranks}", NAMES.get(name, name), f"{one:.3f}", f"{eight:.3f}"])
    return markdown_table(["nodes x ranks", "setting", "1 micro-batch", "8 micro-batches"], lines)


def bytes_sent() -> dict[tuple[int, int, str, int], float]:
    """Bytes per parameter by nodes, ranks of a node, setting and micro-batches."""
    key = ("nodes", "ranks_per_node", "setting", "micro_batches")
    return {tuple(row[name] for name in key): per_parameter(row) for row in read_rows(BYTES)}


def pipeline_table() -> str:
    """Bytes that leave a node per step, where each node has a stage of a pipeline."""
    lines = []
    for row in read_rows(BYTES):
        if row["setting"] == STAGES:
            hidden = 2 * row["micro_batches"] * 256 * 512 * 2  # data-parallel ranks * micro-batches * S * H, in bf16
            measured = row["bytes_per_node_and_step"]
            lines.append(
                [row["micro_batches"], f"{measured:,.0f}", f"{hidden:,}", f"{100 * (measured / hidden - 1):+.1f} %"]
            )
    return markdown_table(["micro-batches", "measured", "formula", "headers, and the sums of loss and norm"], lines)


def techniques_table() -> str:
    """Seconds of a step by technique, medians over rounds; in brackets ZeRO-3's over it, least and most."""
    timed = {(r["rate"], r["setting"], r["kernels"], r["round"]): r for r in read_rows(TECHNIQUES)}
    lines = []
    for name, kernels in TECHNIQUE_SETTINGS:
        cells = []
        for rate in TECHNIQUE_RATES:
            pairs = [
                (timed[rate, name, kernels, t], timed[rate, *TECHNIQUE_SETTINGS[0], t]) for t in range(TECHNIQUE_ROUNDS)
            ]
            ratios = sorted(base["seconds_per_step"] / row["seconds_per_step"] for row, base in pairs)
            step = median(row["seconds_per_step"] for row, _ in pairs)
            cells.append(f"{step:.2f} ({median(ratios):.2f} x, {ratios[0]:.2f} to {ratios[-1]:.2f})")
        sent = per_parameter(pairs[0][0])
        lines.append([NAMES.get(name, name), "yes" if kernels else "no", f"{sent:.2f}", *cells])
    return markdown_table(["", "kernels", "bytes per parameter", *map(in_words, TECHNIQUE_RATES)], lines)


def in_words(rate: str | None) -> str:
    return (rate or "unlimited").replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


# The tables of pages, by page and place: benchmarks/reproduce.py writes and checks them.
BLOCKS = {
    ROOT / "docs" / "evidence" / "bytes-and-speed.md": {
        "bytes": bytes_table,
        "techniques": techniques_table,
    },
    ROOT / "docs" / "reference" / "parallelism.md": {"stages": pipeline_table},
}


if __name__ == "__main__":
    run_choice(__doc__, {"bytes": measure_bytes, "techniques": measure_techniques})
