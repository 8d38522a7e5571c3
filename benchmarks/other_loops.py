"""ZeRO++ under models and loops that others wrote: losses against plain FSDP2, and bytes between nodes.

    make test-integrations                        # installs the packages
    .venv/bin/torchrun --nproc-per-node 4 examples/library/on_cpus.py benchmarks/other_loops.py [CASE ...]

Two nodes, on one machine. Every case trains from the same weights on the same batches with each setting, once with one
micro-batch to a step and once with four.
"""

import gc
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import RESULTS as FOLDER
from common import ROOT, append_row, new_parser

from megatron_zpp.zeropp import ZeroPP, ZeroPPConfig

RESULTS = FOLDER / "other_loops.jsonl"
NODES, RANKS_PER_NODE = 2, 2  # ranks of a node that share parameters
SETTINGS: dict[str, ZeroPPConfig | None] = {
    "plain FSDP2": None,
    "off": ZeroPPConfig(ranks_per_node=RANKS_PER_NODE),
    "hierarchy": ZeroPPConfig(
        hpz_partition_size=RANKS_PER_NODE, quantized_gradients=True, gradient_bits=None, gradient_intra_bits=None
    ),
    "all flags": ZeroPPConfig(quantized_weights=True, hpz_partition_size=RANKS_PER_NODE, quantized_gradients=True),
}


@dataclass
class Trained:
    """What a case records while it trains."""

    parameters: int  # parameters of the whole model
    losses: list[float] = field(default_factory=list)  # this rank's, one per micro-batch
    sent: list[int] = field(default_factory=list)  # bytes from this rank to the other node in each step; none if plain

    def end_step(self, zeropp: ZeroPP | None) -> None:
        self.sent.append(0 if zeropp is None else zeropp.traffic.take().inter_node)


# Trains under a configuration, or plain FSDP2 for None: micro-batches of a step, and steps.
Case = Callable[[ZeroPPConfig | None, int, int], Trained]

CASES = {  # by name: module and function
    "Llama, fp16 and GradScaler": "other_loops_models:grad_scaler",
    "Llama, torchao AdamW8bit": "other_loops_models:adamw_8bit",
    "accelerate": "other_loops_trainers:accelerate_loop",
    "Hugging Face Trainer": "other_loops_trainers:huggingface_trainer",
    "Lightning Trainer": "other_loops_trainers:lightning_trainer",
    "torchtitan, chunked loss": "other_loops_trainers:torchtitan",
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to add rows to")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    dist.init_process_group("gloo")
    sys.path.append(str(ROOT / "examples" / "library"))
    for name in arguments.cases or CASES:
        module, function = CASES[name].split(":")
        case: Case = getattr(importlib.import_module(module), function)
        for accumulation in (1, 4):
            measure(name, case, accumulation, arguments.steps, arguments.results)
    dist.destroy_process_group()


def measure(name: str, case: Case, accumulation: int, steps: int, results: Path) -> None:
    """Train one case with every setting, and add a row for each but plain FSDP2."""
    plain: list[float] = []
    for setting, config in SETTINGS.items():
        trained = case(config, accumulation, steps)
        gc.collect()
        plain = plain or trained.losses
        difference = max(abs(a - b) for a, b in zip(trained.losses, plain, strict=True))
        of_ranks: list[Any] = [None] * dist.get_world_size()
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
        }
        if config is not None and dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            append_row(results, row)


if __name__ == "__main__":
    main()
