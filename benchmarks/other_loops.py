"""ZeRO++ under models and loops that others wrote: losses against plain FSDP2, and bytes between nodes.

    make test-integrations                        # installs the packages
    .venv/bin/torchrun --nproc-per-node 4 examples/library/on_cpus.py benchmarks/other_loops.py [CASE ...]
    .venv/bin/torchrun --nproc-per-node 8 examples/library/on_cpus.py benchmarks/other_loops.py  # tensor parallelism
    .venv/bin/python benchmarks/other_loops.py table   # of benchmarks/results/other_loops.jsonl, as Markdown

Two nodes, on one machine. Every case trains from the same weights on the same batches with each setting, once with one
micro-batch to a step and once with four.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rows import append_row, read_rows

from megatron_zpp.zeropp import ZeroPP, ZeroPPConfig

RESULTS = Path(__file__).parent / "results" / "other_loops.jsonl"
NODES = 2


@dataclass
class Trained:
    losses: list[float]  # of this rank, of each micro-batch
    sent: list[int]  # bytes that this rank sent to the other node in each step; none under plain FSDP2
    parameters: int  # of the whole model


# Under a configuration, or plain FSDP2 for None: so many steps of so many micro-batches.
Case = Callable[[ZeroPPConfig | None, int, int], Trained]

CASES = {  # by name: its module and function, ranks, and ranks of a node that share parameters
    "Llama": ("other_loops_models:llama", 4, 2),
    "GPT-2": ("other_loops_models:gpt2", 4, 2),
    "Mixtral": ("other_loops_models:mixtral", 4, 2),
    "Qwen3": ("other_loops_models:qwen3", 4, 2),
    "ViT": ("other_loops_models:vit", 4, 2),
    "BERT": ("other_loops_models:bert", 4, 2),
    "Llama, tensor-parallel mesh": ("other_loops_models:tensor_parallel", 8, 2),
    "Llama, CPU offload": ("other_loops_models:cpu_offload", 4, 2),
    "Llama, fp16 and GradScaler": ("other_loops_models:grad_scaler", 4, 2),
    "Llama, torchao AdamW8bit": ("other_loops_models:adamw_8bit", 4, 2),
    "Llama, torch.compile": ("other_loops_models:compiled", 4, 2),
    "accelerate": ("other_loops_trainers:accelerate_loop", 4, 2),
    "Hugging Face Trainer": ("other_loops_trainers:huggingface_trainer", 4, 2),
    "Lightning Fabric": ("other_loops_trainers:fabric", 4, 2),
    "Lightning Trainer": ("other_loops_trainers:lightning_trainer", 4, 2),
    "torchtitan": ("other_loops_trainers:torchtitan", 4, 2),
    "torchtitan, chunked loss": ("other_loops_trainers:torchtitan_in_chunks", 4, 2),
}


def settings(ranks_of_node: int) -> dict[str, ZeroPPConfig | None]:
    return {
        "plain FSDP2": None,
        "off": ZeroPPConfig(ranks_per_node=ranks_of_node),
        "hierarchy": ZeroPPConfig(
            hpz_partition_size=ranks_of_node, quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None
        ),
        "all flags": ZeroPPConfig(quantized_weights=True, hpz_partition_size=ranks_of_node, quantized_gradients=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"table, or some of: {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to add rows to")
    arguments = parser.parse_args()
    if arguments.cases == ["table"]:
        print_table(arguments.results)
        return
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    dist.init_process_group("gloo")
    sys.path.append(str(Path(__file__).parents[1] / "examples" / "library"))
    for name in arguments.cases or CASES:
        where, ranks, ranks_of_node = CASES[name]
        if ranks == dist.get_world_size():
            module, function = where.split(":")
            case: Case = getattr(importlib.import_module(module), function)
            for accumulation in (1, 4):
                measure(name, case, accumulation, arguments.steps, ranks_of_node, arguments.results)
    dist.destroy_process_group()


def measure(name: str, case: Case, accumulation: int, steps: int, ranks_of_node: int, results: Path) -> None:
    """Train one case with every setting, and add a row for each but plain FSDP2."""
    plain: list[float] = []
    for setting, config in settings(ranks_of_node).items():
        trained = case(config, accumulation, steps)
        gc.collect()
        if config is None:
            plain = trained.losses
            continue
        difference = max(abs(a - b) for a, b in zip(trained.losses, plain, strict=True))
        of_ranks: list[tuple[float, list[int]]] = [(0.0, [])] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (difference, trained.sent))
        row = {
            "case": name,
            "setting": setting,
            "accumulation": accumulation,
            "steps": steps,
            "parameters": trained.parameters,
            "plain_loss": [plain[0], plain[-1]],
            "largest_loss_difference": max(difference for difference, _ in of_ranks),
            # By step, what leaves a node.
            "bytes_between_nodes": [sum(sent) // NODES for sent in zip(*(sent for _, sent in of_ranks), strict=True)],
            "torch": torch.__version__,
        }
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            append_row(results, row)


def take(zeropp: ZeroPP | None) -> int:
    """What this rank has sent to the other node since the last call."""
    return 0 if zeropp is None else zeropp.traffic.take().inter_node


def print_table(results: Path) -> None:
    rows = read_rows(results)
    rows_of = {(row["case"], row["setting"], row["accumulation"]): row for row in rows}
    print("| model or loop | loss difference, hierarchy | all flags | bytes: off | hierarchy | all flags |")
    print("|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["case"] for row in rows):

        def cells(setting: str, show: Callable[[dict], str], name: str = name) -> str:
            return ", ".join(show(rows_of[name, setting, accumulation]) for accumulation in (1, 4))

        differences = [cells(setting, show_difference) for setting in ("hierarchy", "all flags")]
        sent = [cells(setting, show_bytes) for setting in ("off", "hierarchy", "all flags")]
        print(f"| {' | '.join([name, *differences, *sent])} |")


def show_difference(row: dict) -> str:
    difference = row["largest_loss_difference"]
    return "0" if difference == 0 else f"{difference:.0e}" if difference < 1e-3 else f"{difference:.3f}"


def show_bytes(row: dict) -> str:
    """Of a step after the first, over the model's parameters."""
    return f"{math.fsum(row['bytes_between_nodes'][1:]) / (row['steps'] - 1) / row['parameters']:.2f}"


if __name__ == "__main__":
    main()
