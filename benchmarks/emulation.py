"""What emulating ranks costs: tokens/s of --emulate-ranks beside plain training on one rank, on the same batches.

    python benchmarks/emulation.py --output benchmarks/results/emulation.jsonl
    python benchmarks/emulation.py --model gpt-350m --bf16 --output benchmarks/results/emulation.jsonl  # on a GPU

Both sides are the trainer, with the same weights, micro-batches and global batches, and take turns; the plain side
accumulates over as many micro-batches as the other has ranks. The emulated side runs with all flags of ZeRO++ and LoCo,
or with the recipe that ``--recipe`` names.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import append_row, device_name, in_turns, new_parser, seconds_of
from side_by_side import OurTraining, our_run

from megatron_zpp.families import GPT
from megatron_zpp.parallel.distributed import init_distributed
from megatron_zpp.zeropp.recipes import RECIPES

MODELS = {  # shape, vocabulary
    "gpt-tiny": ("--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64", 512),
    "gpt-25m": ("--num-layers 8 --hidden-size 448 --num-attention-heads 7 --seq-length 256", 8192),
    "gpt-125m": ("--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024", 50257),
    "gpt-350m": ("--preset gpt-350m --seq-length 2048", 50257),
    "gpt-1.3b": ("--preset gpt-1.3b --seq-length 2048", 50257),
}
RANKS, NODES, MICRO_BATCH_SIZE = 8, 2, 4  # the last of each rank
ALL_FLAGS = (
    f"--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size {RANKS // NODES} --zeropp-loco"
)


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    shape, vocab_size = MODELS[args.model]
    batch, num_steps = MICRO_BATCH_SIZE * RANKS, (args.rounds + 1) * args.steps
    common = f"{shape} --global-batch-size {batch} --num-workers 0 --lr-warmup-iters 0"
    common += " --bf16" if args.bf16 else ""
    zeropp = ALL_FLAGS if args.recipe is None else f"--zeropp {args.recipe}"
    flags = {
        "plain": f"{common} --zero-stage 0",
        "emulated": f"{common} {zeropp} --emulate-ranks {RANKS} --emulate-nodes {NODES}",
    }
    with tempfile.TemporaryDirectory() as folder:
        sizes = vocab_size, MICRO_BATCH_SIZE, num_steps, args.steps, batch
        sides = {name: OurTraining(our_run(GPT, folder, flags[name], device, *sizes)) for name in flags}
        turns = {name: lambda side=side: seconds_of(lambda: side.steps(args.steps)) for name, side in sides.items()}
        seconds = in_turns(turns, args.rounds)
    run = sides["plain"].run
    assert run.settings.training.seq_length
    tokens = args.steps * batch * run.settings.training.seq_length
    ratios = [plain / emulated for plain, emulated in zip(seconds["plain"], seconds["emulated"], strict=True)]
    return {
        "model": args.model,
        "parameters": run.architecture.num_parameters(run.model.config),
        "seq_length": run.settings.training.seq_length,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "ranks": RANKS,
        "nodes": NODES,
        "recipe": args.recipe,
        "precision": "bf16" if args.bf16 else "fp32",
        **{f"tokens_per_second_{name}": round(tokens / statistics.median(seconds[name])) for name in sides},
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_each_turn": [round(ratio, 3) for ratio in ratios],
        "loss_of_first_step": {name: side.metrics["lm loss"][0] for name, side in sides.items()},
        "loss_of_last_step": {name: side.metrics["lm loss"][-1] for name, side in sides.items()},
        "device": device_name(device),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt-25m")
    parser.add_argument("--steps", type=int, default=1, metavar="K", help="optimizer steps of a turn; default 1")
    parser.add_argument("--rounds", type=int, default=4, metavar="K", help="turns after the one that warms up")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--recipe", choices=RECIPES, help="of --zeropp; default: all flags of ZeRO++ and LoCo")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also append the result there, as a JSON line")
    args = parser.parse_args()
    result = measure(args, init_distributed(None, 10))
    dist.destroy_process_group()
    print(json.dumps(result, indent=1))
    append_row(args.output, result)


if __name__ == "__main__":
    main()
