"""What our training loop costs beside plain PyTorch: tokens per second of both, for the same GPT on one rank.

    python benchmarks/loop_overhead.py > benchmarks/results/loop_overhead.json
    python benchmarks/loop_overhead.py --profile > benchmarks/results/loop_profile.json

The plain side is the shortest program that trains a GPT: a model of torch.nn layers, batches that lie in memory,
AdamW, clipping, a cosine. Ours is the trainer as it is: flags, FSDP2, the indexed dataset, logging. Both begin with
the same weights, see the same batches and take turns, a few steps each; the ratio is the median over the turns.
That they did the same work shows in the losses of their last turns. ``--profile`` tells instead what our steps do, by
kind of work: the percentage of the main thread's time, from torch.profiler.
"""

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from common import RESULTS, in_turns, markdown_table, new_parser, origin, seconds_of
from side_by_side import WARMUP, OurTraining, PlainTraining, full_weights, our_run, plain_model, same_batches
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.families import GPT
from megatron_zpp.parallel.distributed import init_distributed
from megatron_zpp.training.trainer import Trainer

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCAB = 4, 256, 4, 256, 8, 8192

# Kind of work: parts of the names of its operations and of the ranges around them. The first that matches counts.
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "MmBackward"),
    "attention": ("scaled_dot_product",),
    "loss, without its products": ("_LinearCrossEntropy",),
    "optimizer, norm and clipping": ("Optimizer.step", "_foreach_norm", "_foreach_mul_"),
    "collectives, with FSDP2's copies and casts": ("c10d::", "gloo:", "FSDP::", "fsdp::", "RegisterPostBackward"),
    "activations": ("gelu",),
    "norms": ("layer_norm",),
    "embedding": ("embedding",),
}
OTHER = "the rest"


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


def profile_kinds(bf16: bool, steps: int) -> dict[str, Any]:
    """The percentage of our steps' time that each kind of work takes."""
    with our_side(bf16, 2 * steps, log_interval=steps) as run:
        ours = OurTraining(run)
        ours.steps(steps)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            ours.steps(steps)
    spent: Counter[str] = Counter()
    for event in profiler.events():
        spent[kind_of(event)] += event.self_cpu_time_total
    shares = {kind: round(100 * spent[kind] / spent.total(), 2) for kind in (*KINDS, OTHER)}
    return {"precision": "bf16" if bf16 else "fp32", "percent": shares}


def kind_of(event: FunctionEvent) -> str:
    names = []
    around: FunctionEvent | None = event
    while around is not None:
        names.append(around.name.lower())
        around = around.cpu_parent
    return next(
        (kind for kind, parts in KINDS.items() if any(part.lower() in name for part in parts for name in names)), OTHER
    )


def table() -> str:
    """The kept profile as Markdown."""
    sides = json.loads((RESULTS / "loop_profile.json").read_text())["profile"]
    rows = [[kind, *(f"{side['percent'][kind]:.1f} %" for side in sides)] for kind in (*KINDS, OTHER)]
    return markdown_table(["kind of work", *(side["precision"] for side in sides)], rows)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="turns of each side; default 10")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps of a turn; default 5")
    parser.add_argument("--bf16", action="store_true", help="bf16 on both sides: autocast there, --bf16 here")
    parser.add_argument("--profile", action="store_true", help="the share of each kind of work, in fp32 and in bf16")
    args = parser.parse_args()
    if (args.rounds + 1) * args.steps <= WARMUP:
        parser.error(f"--rounds and --steps must make more than the {WARMUP} steps of the warm-up")
    model = f"GPT: {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, vocabulary {VOCAB}; {BATCH} x {LENGTH} tokens"
    if args.profile:
        result: dict[str, Any] = {"profile": [profile_kinds(bf16, args.steps) for bf16 in (False, True)]}
    else:
        result = measure(args.bf16, args.rounds, args.steps)
    print(json.dumps({"model": model, **origin(), **result}, indent=1))


if __name__ == "__main__":
    main()
