"""Try the peers' own flags: what each changes of the bytes, the memory and the processor time of a step.

    sudo .venv/bin/python benchmarks/peer_flags.py run

Each runs as in the race of against_peers.py, but bf16 matrices are not multiplied: their products are zeros. What
remains is what flags change: communication, copies, the optimizer. Processor time says this on a busy machine, too.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from against_peers import DEEPSPEED_ZEROPP, FLAGS, MEASURED_STEPS, MEGATRON_FSDP, POWER_SGD, measure, prepare
from cluster_in_a_box import cluster, programs
from common import RESULTS, append_row, markdown_table, read_rows, run_choice
from torch import Tensor

MEASURED = RESULTS / "peer_flags.jsonl"
MICRO_BATCHES = [1, 2]  # each more adds as much
HSDP, HFSDP = MEGATRON_FSDP
UNITS: dict[str, dict[str, Any]] = {
    "one unit": {"layers_of_unit": 0},
    "units of 2 layers": {"layers_of_unit": 2},
    "prefetch 2": {"prefetch": 2},
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "no overlap": {"overlap_comm": False},
    "not contiguous": {"contiguous_gradients": False},
    "prefetch 5e6": {"stage3_prefetch_bucket_size": 5e6},
    "reduce bucket 5e6": {"reduce_bucket_size": 5e6},
    "modules whole": {"stage3_module_granularity_threshold": 1e9},
    "sequential gathers": {"stage3_allgather_sequential": True},
}
MEGATRON: dict[str, dict[str, Any]] = {
    "no overlap": {"overlap_grad_reduce": False, "overlap_param_gather": False},
    "double buffer": {"fsdp_double_buffer": True},
    "average in collective": {"average_in_collective": True},
    "no buckets": {"disable_bucketing": True},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "FSDP2": UNITS,
    "FSDP2, kept": UNITS,
    "HSDP, kept": UNITS,
    "DeepSpeed ZeRO-3": DEEPSPEED | {"parameters persist": {"stage3_param_persistence_threshold": 1e9}},
    "DeepSpeed ZeRO-3, hpZ": DEEPSPEED,
    DEEPSPEED_ZEROPP: {},
    HSDP: MEGATRON | {"optim": {"zero_dp_strategy": "optim"}},
    HFSDP: MEGATRON | {"fine-grained": {"enable_fine_grained_param_gather": True}},
    POWER_SGD: {
        "rank 1": {"matrix_approximation_rank": 1},
        "rank 2": {"matrix_approximation_rank": 2},
        "rank 8": {"matrix_approximation_rank": 8},
        "same shapes batched": {"batch_tensors_with_same_shape": True},
    },
}
DEFAULTS = "defaults"


def skip_products() -> torch.library.Library:
    """Return zeros for products of bf16 matrices on processors, while the returned object lives."""
    library = torch.library.Library("aten", "IMPL")

    def skipping(name: str) -> Any:
        multiply = getattr(torch.ops.aten, name).out

        def product(*operands: Tensor, **scales: Any) -> Tensor:
            *_, a, b = operands
            out = a.new_zeros(*a.shape[:-1], b.shape[-1])
            return out if a.dtype is torch.bfloat16 else multiply(*operands, out=out, **scales)

        return product

    for name in ("mm", "addmm", "bmm", "baddbmm"):
        library.impl(name, skipping(name), "CPU")
    return library


def train() -> None:
    """One rank: argv is train SETTING VARIANTS. The last rank prints a JSON line for each variant and cell."""
    setting, variants = sys.argv[2], json.loads(sys.argv[3])
    library = skip_products()
    MEASURED_STEPS[2] = 1
    for name, flags in variants.items():
        FLAGS[setting] = flags
        try:
            rows = list(measure(setting, [(n, None) for n in MICRO_BATCHES]))
        except (AssertionError, AttributeError, ValueError, TypeError, RuntimeError) as error:  # on all ranks
            rows = [{"error": f"{type(error).__name__}: {error}"[:300]}]
        if dist.get_rank() == dist.get_world_size() - 1:
            for row in rows:
                print(json.dumps({"variant": name, "flags": flags, **row}), flush=True)
    dist.barrier()
    del library


def run() -> None:
    """Run each peer with what is missing of its variants, in one start of the program."""
    prepare()
    for setting, flags_of in VARIANTS.items():
        done = {row["variant"] for row in read_rows(MEASURED) if row["setting"] == setting}
        variants: dict[str, dict[str, Any]] = {DEFAULTS: {}} | flags_of
        missing = {name: flags for name, flags in variants.items() if name not in done}
        if not missing:
            continue
        words = [__file__, "train", setting, json.dumps(missing)]
        with cluster(2, None) as namespaces, programs(words, namespaces, 2) as processes:
            for line in processes[-1].stdout or ():
                if line.startswith("{"):
                    append_row(MEASURED, {"setting": setting, **json.loads(line)})
                print(setting, line, end="", flush=True)


def table() -> str:
    """Bytes that leave a node per parameter, and seconds of processor time of a rank, for 1 and for 2 micro-batches."""
    lines, rows = list[list[str]](), [row for row in read_rows(MEASURED) if VARIANTS[row["setting"]]]
    for setting, variant in dict.fromkeys((row["setting"], row["variant"]) for row in rows):
        found = [row for row in rows if (row["setting"], row["variant"]) == (setting, variant)]
        if "error" in found[0]:
            lines.append([setting, variant, f"does not run: {found[0]['error']}", ""])
            continue
        sent = " / ".join(f"{row['bytes_per_parameter']:.2f}" for row in found)
        lines.append([setting, variant, sent, " / ".join(f"{row['computing'] + row['others']:.2f}" for row in found)])
    return markdown_table(["", "flags", "bytes", "processor seconds"], lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train()
    else:
        run_choice(__doc__, {"run": run})
