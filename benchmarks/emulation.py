"""What emulating ranks costs: tokens/s of --emulate-ranks beside plain training on one rank, on the same batches.

    python benchmarks/emulation.py --output benchmarks/results/emulation.jsonl
    python benchmarks/emulation.py --model gpt-350m --bf16 --output benchmarks/results/emulation.jsonl  # on a GPU

Both sides are the trainer, with the same weights, micro-batches and global batches, and take turns; the plain side
accumulates over as many micro-batches as the other has ranks. The emulated side runs with all flags of ZeRO++ and LoCo.
The bar of the project is a ratio of 0.70.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import append_row

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.data.loader import Batch, build_loader
from megatron_zpp.families import GPT
from megatron_zpp.parallel.distributed import init_distributed
from megatron_zpp.training.run import Run
from megatron_zpp.training.setup import build_run
from megatron_zpp.training.step import train_step

MODELS = {  # shape, vocabulary
    "gpt-tiny": ("--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64", 512),
    "gpt-25m": ("--num-layers 8 --hidden-size 448 --num-attention-heads 7 --seq-length 256", 8192),
    "gpt-125m": ("--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024", 50257),
    "gpt-350m": ("--preset gpt-350m --seq-length 2048", 50257),
}
ZERO = (
    "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size {per_node} --zeropp-loco "
    "--emulate-ranks {ranks} --emulate-nodes {nodes}"
)


class Side:
    """One run, and the seconds that its turns took."""

    def __init__(self, flags: str, vocab_size: int, device: torch.device) -> None:
        data = f"--mock-data --vocab-size {vocab_size} --num-workers 0 --lr 3e-4 --train-iters 100000 --eval-iters 0"
        settings = parse_settings(GPT, f"{flags} {data}".split(), note=lambda text: None)
        self.run: Run = build_run(GPT, settings, device)
        self.num_micro_batches = self.run.batches.num_micro_batches(0)
        self.batches = self._batches()
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def _batches(self) -> Iterator[Batch]:
        mesh, training = self.run.mesh, self.run.settings.training
        assert self.run.datasets.train is not None and training.micro_batch_size
        return build_loader(
            self.run.datasets.train,
            consumed_samples=0,
            micro_batch_size=training.micro_batch_size,
            dp_rank=mesh.dp_rank if mesh.emulated_ranks == 1 else None,
            dp_size=mesh.dp_size,
            num_workers=0,
            device=self.run.device,
        )

    def steps(self, number: int) -> None:
        begun = time.perf_counter()
        for _ in range(number):
            (result,) = train_step(self.run, self.batches, self.num_micro_batches, stop=False)
            self.losses.append(result.loss)
        if self.run.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - begun)


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    shape, vocab_size = MODELS[args.model]
    batch = args.micro_batch_size * args.ranks
    common = f"{shape} --micro-batch-size {args.micro_batch_size} --global-batch-size {batch}"
    common += (" --bf16" if args.bf16 else "") + (" --compile" if args.compile else "")
    zero = ZERO.format(ranks=args.ranks, nodes=args.nodes, per_node=args.ranks // args.nodes)
    sides = {
        "plain": Side(f"{common} --zero-stage 0", vocab_size, device),
        "emulated": Side(f"{common} {zero}", vocab_size, device),
    }
    for turn in range(args.rounds + 1):
        # Who begins alternates, lest one side always meets the machine as the other left it.
        for side in ("plain", "emulated") if turn % 2 else ("emulated", "plain"):
            sides[side].steps(args.steps)
    run = sides["plain"].run
    assert run.settings.training.seq_length
    tokens = args.steps * batch * run.settings.training.seq_length
    seconds = {name: side.seconds[1:] for name, side in sides.items()}  # the first turn warms up
    ratios = [plain / emulated for plain, emulated in zip(seconds["plain"], seconds["emulated"], strict=True)]
    return {
        "model": args.model,
        "parameters": run.architecture.num_parameters(run.model.config),
        "seq_length": run.settings.training.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "ranks": args.ranks,
        "nodes": args.nodes,
        "precision": "bf16" if args.bf16 else "fp32",
        "compiled": args.compile,
        "tokens_per_second_plain": round(tokens / statistics.median(seconds["plain"])),
        "tokens_per_second_emulated": round(tokens / statistics.median(seconds["emulated"])),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_each_turn": [round(ratio, 3) for ratio in ratios],
        "loss_of_first_step": {name: side.losses[0] for name, side in sides.items()},
        "loss_of_last_step": {name: side.losses[-1] for name, side in sides.items()},
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed of emulated ranks beside plain training.")
    parser.add_argument("--model", choices=MODELS, default="gpt-25m")
    parser.add_argument("--ranks", type=int, default=8, metavar="W", help="default 8")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="B", help="of each rank; default 4")
    parser.add_argument("--steps", type=int, default=1, metavar="K", help="optimizer steps of a turn; default 1")
    parser.add_argument("--rounds", type=int, default=4, metavar="K", help="turns after the one that warms up")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also append the result there, as a JSON line")
    args = parser.parse_args()
    device = init_distributed(None, 10)
    result = measure(args, device)
    dist.destroy_process_group()
    print(json.dumps(result, indent=1))
    if args.output is not None:
        append_row(args.output, result)


if __name__ == "__main__":
    main()
