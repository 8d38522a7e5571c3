"""Tables as tools/estimate.py says them: in docs/reference/memory.md what a GPU needs on 64 nodes x 8, in GB.

Estimates of three models with all flags and LoCo, bf16, one sample per micro-batch, full recomputation. In brackets:
host memory for each GPU. Then what saves keep in host memory, by recipe. In docs/how-to/choose-settings.md a Llama-8B
on 8 nodes, for 1 and for 8 micro-batches.
"""

import shlex
from collections.abc import Iterable

from common import markdown_table
from planner import LLAMA_70B

from megatron_zpp.commands import estimate
from megatron_zpp.zeropp.recipes import RECIPES

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
SAVES = "--save checkpoints --save-interval 1000 --zeropp-ranks-per-node 8"
INT8 = "--zeropp-gradient-sum-dtype int8 --zeropp-weight-moves"
COLUMNS = {
    "ZeRO-3": "",
    "2 errors": f"{ALL_FLAGS} --loss-spike-factor 2",
    "default": ALL_FLAGS,
    "bf16 sums": f"{ALL_FLAGS} --zeropp-gradient-sum-dtype bf16",
    "int8": f"{ALL_FLAGS} {INT8}",
    "int8, weights kept": f"{ALL_FLAGS} {INT8} --zero-stage 2",
    "int8, copies on the host": f"{ALL_FLAGS} {INT8} --zeropp-offload copies",
    "all on the host": f"{ALL_FLAGS} {INT8} --zeropp-offload all",
}

WAYS = {
    "ZeRO-3": "",
    "HSDP": "--num-distributed-optimizer-instances 8",
    "all four flags of ZeRO++": ALL_FLAGS,
    "and moved codes of weights": f"{ALL_FLAGS} --zeropp-weight-moves",
    "the same, weights kept": f"{ALL_FLAGS} --zeropp-weight-moves --zero-stage 2",
}
GBITS = (100, 400, 3200)
FLOPS = 64 * 989e12 * 0.4  # 64 H100 at 40 % of their peak


def table_of_ways() -> str:
    cluster = f"{CLUSTER} --vocabulary 128256".replace("--nodes 64", "--nodes 8")
    program = "pretrain_llama.py --preset llama-8b --seq-length 8192 --vocab-size 128256"
    lines = []
    for way, flags in WAYS.items():
        pair = []
        for micro_batches in (1, 8):
            command = f"{cluster} {program} {COMMON} --global-batch-size {64 * micro_batches} {flags}"
            pair.append(estimate.run(estimate.parse_arguments(shlex.split(command))))
        computing = [time.needs.tokens / time.needs.steps * time.needs.flops_per_token / FLOPS for time in pair]
        gigabytes = [time.needs.sent_per_node / 1e9 for time in pair]
        seconds = ([8 * sent / gbits for sent in gigabytes] for gbits in GBITS)
        lines.append([way, *map(of_both, ([time.needs.memory / 1e9 for time in pair], gigabytes, *seconds))])
    lines.insert(0, ["computing, at 40 % of the peak", "", "", *[of_both(computing)] * len(GBITS)])
    return markdown_table(
        ["", "GB of a GPU", "GB that a node sends per step", *(f"seconds at {g} Gbit/s" for g in GBITS)], lines
    )


def of_both(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values)


def table() -> str:
    rows = []
    for model, (vocabulary, program) in MODELS.items():
        for micro_batches in (1, 4):
            common = f"{CLUSTER} --vocabulary {vocabulary} {program} {COMMON} --global-batch-size {512 * micro_batches}"
            rows.append([model, micro_batches, *(memory(f"{common} {flags}") for flags in COLUMNS.values())])
    return markdown_table(["model", "micro-batches", *COLUMNS], rows)


def table_of_saves() -> str:
    rows = []
    for model, (vocabulary, program) in MODELS.items():
        common = f"{CLUSTER} --vocabulary {vocabulary} {program} {COMMON} --global-batch-size 512 {SAVES}"
        rows.append([model, *(saved(f"{common} --zeropp {recipe}") for recipe in RECIPES)])
    return markdown_table(["host memory of saves", *RECIPES], rows)


def saved(command: str) -> str:
    (nbytes,) = estimate.run(estimate.parse_arguments(shlex.split(command))).needs.largest.host.values()
    return f"{nbytes / 1e9:.1f}"


def memory(command: str) -> str:
    found = estimate.run(estimate.parse_arguments(shlex.split(command))).needs
    of_host = found.largest.host
    host = f" ({sum(of_host.values()) / 1e9:.1f})" if of_host else ""
    return f"{found.memory / 1e9:.1f}{host}"
