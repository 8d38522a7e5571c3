"""The table of docs/reference/memory.md: what a GPU needs on 64 nodes x 8, in GB, as tools/estimate.py says it.

Estimates of three models with all flags and LoCo, bf16, one sample per micro-batch, full recomputation. In brackets:
host memory for each GPU.
"""

from __future__ import annotations

import shlex

from common import markdown_table
from planner import LLAMA_70B

from megatron_zpp.commands import estimate

CLUSTER = "--nodes 64 --ranks-per-node 8 --gpu H100"
COMMON = (
    "--bf16 --micro-batch-size 1 --train-iters 1000 --lr 1e-4 --mock-data --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
)
MODELS = {
    "GPT-13B": (50257, "pretrain_gpt.py --preset gpt-13b --vocab-size 50257"),
    "Llama-8B": (128256, "pretrain_llama.py --preset llama-8b --seq-length 4096 --vocab-size 128256"),
    "Llama-70B": (128256, f"pretrain_llama.py {LLAMA_70B} --vocab-size 128256"),
}
ALL_FLAGS = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 8 --zeropp-loco"
INT8 = "--zero-gradient-sum-dtype int8 --zeropp-weight-moves"
COLUMNS = {
    "ZeRO-3": "",
    "2 errors": f"{ALL_FLAGS} --loss-spike-factor 2",
    "default": ALL_FLAGS,
    "bf16 sums": f"{ALL_FLAGS} --zero-gradient-sum-dtype bf16",
    "int8": f"{ALL_FLAGS} {INT8}",
    "int8, on the host": f"{ALL_FLAGS} {INT8} --zero-offload-gradient-sums",
}


def table() -> str:
    rows = []
    for model, (vocabulary, program) in MODELS.items():
        for micro_batches in (1, 4):
            common = f"{CLUSTER} --vocabulary {vocabulary} {program} {COMMON} --global-batch-size {512 * micro_batches}"
            rows.append([model, micro_batches, *(memory(f"{common} {flags}") for flags in COLUMNS.values())])
    return markdown_table(["model", "micro-batches", *COLUMNS], rows)


def memory(command: str) -> str:
    found = estimate.run(estimate.parse_arguments(shlex.split(command))).needs
    of_host = found.largest.host
    host = f" ({sum(of_host.values()) / 1e9:.1f})" if of_host else ""
    return f"{found.memory / 1e9:.1f}{host}"
