"""What our training loop costs beside plain PyTorch: tokens per second of both, for the same GPT on one rank.

    python benchmarks/loop_overhead.py > benchmarks/results/loop_overhead.json

The plain side is the shortest program that trains a GPT: a model of torch.nn layers, batches that lie in memory,
AdamW, clipping, a cosine. Ours is the trainer as it is: flags, FSDP2, the indexed dataset, logging. Both begin with
the same weights, see the same batches and take turns, a few steps each; the ratio is the median over the turns.
That they did the same work shows in the losses of their last turns.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from common import in_turns, new_parser, origin, seconds_of
from side_by_side import WARMUP, OurTraining, PlainTraining, full_weights, our_run, plain_model, same_batches

from megatron_zpp.families import GPT
from megatron_zpp.parallel.distributed import init_distributed
from megatron_zpp.training.trainer import Trainer

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCAB = 4, 256, 4, 256, 8, 8192


def measure(bf16: bool, rounds: int, steps: int) -> dict[str, Any]:
    """Both sides in turns; tokens per second of the median turn."""
    num_steps = (rounds + 1) * steps
    with our_side(bf16, num_steps, log_interval=steps) as run:
        model = plain_model(GPT, run.model.config, full_weights(run), run.device)
        plain = PlainTraining(model, same_batches(run, num_steps), num_steps, bf16, compiled=False)
        ours = OurTraining(run)
        sides = {side: lambda side=side: seconds_of(lambda: side.steps(steps)) for side in (plain, ours)}
        seconds = in_turns(sides, rounds)
    tokens = steps * BATCH * LENGTH
    ratios = [a / b for a, b in zip(seconds[ours], seconds[plain], strict=True)]
    return {
        "precision": "bf16" if bf16 else "fp32",
        "tokens_per_second_plain": round(tokens / statistics.median(seconds[plain])),
        "tokens_per_second_ours": round(tokens / statistics.median(seconds[ours])),
        "time_ours_over_plain": round(statistics.median(ratios), 4),
        "ratio_of_each_turn": [round(ratio, 3) for ratio in ratios],
        "mean_loss_of_last_turn_plain": round(statistics.mean(plain.losses[-steps:]), 4),
        "mean_loss_of_last_turn_ours": round(statistics.mean(ours.metrics["lm loss"][-steps:]), 4),
    }


@contextmanager
def our_side(bf16: bool, num_steps: int, log_interval: int) -> Iterator[Trainer]:
    """Our trainer on one rank, ready to take ``num_steps`` steps."""
    shape = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH}"
    flags = f"{shape} --num-workers 0 {'--bf16' if bf16 else ''}"
    device = init_distributed("gloo", 10)
    with tempfile.TemporaryDirectory() as folder:
        yield our_run(GPT, folder, flags, device, VOCAB, BATCH, num_steps, log_interval)
    dist.destroy_process_group()


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="turns of each side; default 10")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps of a turn; default 5")
    parser.add_argument("--bf16", action="store_true", help="bf16 on both sides: autocast there, --bf16 here")
    args = parser.parse_args()
    if (args.rounds + 1) * args.steps <= WARMUP:
        parser.error(f"--rounds and --steps must make more than the {WARMUP} steps of the warm-up")
    model = f"GPT: {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, vocabulary {VOCAB}; {BATCH} x {LENGTH} tokens"
    print(json.dumps({"model": model, **origin(), **measure(args.bf16, args.rounds, args.steps)}, indent=1))


if __name__ == "__main__":
    main()
