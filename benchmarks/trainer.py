"""How fast the trainer is on one device: tokens/s, MFU, peak memory and where each step's time goes.

    python benchmarks/trainer.py --output benchmarks/results/trainer.jsonl   # GPT-350M and Llama-0.8B, on a GPU
    python benchmarks/trainer.py --model tiny-gpt --model tiny-llama         # anywhere

The trainer runs in bf16 with ``--compile``; the micro-batch is as large as the GPU holds unless it is given. Beside it,
in the same run: a plain single-file FSDP2 loop (bf16, compiled), with the same weights on the same batches; that they
did the same work shows in their losses. The steps' parts come from torch.profiler, over steps of their own.

Under torchrun there is no plain side, and ``--flags`` may turn ZeRO++ on, which then shows among the parts.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import append_row, device_name, new_parser, seconds_of
from side_by_side import OurTraining, PlainTraining, full_weights, our_run, plain_model, same_batches, shard_plain
from step_parts import WARM_UP_STEPS, format_parts, profile_steps
from torch import Tensor

from megatron_zpp.families import GPT, LLAMA, Architecture
from megatron_zpp.metrics.throughput import mfu, peak_tflops
from megatron_zpp.parallel.distributed import init_distributed
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import estimate
from megatron_zpp.training.trainer import Trainer


@dataclass(frozen=True)
class Model:
    architecture: Architecture
    flags: str
    vocab_size: int
    seq_length: int


TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
MODELS = {
    "gpt-350m": Model(GPT, "--preset gpt-350m", 50257, 2048),
    "gpt-1.3b": Model(GPT, "--preset gpt-1.3b", 50257, 2048),
    "llama-0.8b": Model(LLAMA, "--preset llama-0.8b", 32000, 4096),
    "tiny-gpt": Model(GPT, TINY, 512, 64),
    "tiny-llama": Model(LLAMA, TINY, 512, 64),
}
MEMORY_TO_FILL = 0.85  # share of free memory: the rest is for fragmentation and for libraries beside PyTorch
BATCH_ON_CPU = 4


def measure(name: str, micro_batch_size: int | None, options: Namespace) -> dict[str, Any]:
    """One model's result, as a line of JSON holds it."""
    model, device, started = MODELS[name], options.device, time.perf_counter()
    given = micro_batch_size is not None
    if micro_batch_size is None:
        micro_batch_size = largest_micro_batch(model, options) if device.type == "cuda" else BATCH_ON_CPU
    note(f"{name}: micro-batches of {micro_batch_size} sequences of {model.seq_length} tokens")
    with tempfile.TemporaryDirectory() as folder:
        run = build(model, micro_batch_size, folder, options)
        config, peak = run.model.config, peak_tflops(device_name(device))
        flops = model.architecture.flops_per_token(config, model.seq_length)

        def with_mfu(side: dict[str, Any]) -> dict[str, Any]:
            used = mfu(side["tokens_per_second"] / dist.get_world_size(), flops, peak)
            return side | {"mfu": None if used is None else round(used, 4)}

        estimated = None
        if dist.get_world_size() == 1:
            grid = RankGrid(1, 1, run.settings.distributed)
            estimated = estimate(model.architecture, run.settings, model.vocab_size, grid).memory
        weights = full_weights(run)
        batches = same_batches(run, options.timed_steps)
        ours, parts = run_ours(run, options)
        ours = with_mfu(ours)
        note(f"ours: {ours}")
        note(format_parts(parts))
        del run
        release(device)
        plain = None
        if dist.get_world_size() == 1:
            plain = with_mfu(run_plain(model.architecture, config, weights, batches, options))
    return {
        "model": name,
        "parameters": model.architecture.num_parameters(config),
        "seq_length": model.seq_length,
        "micro_batch_size": micro_batch_size,
        "micro_batch_size_given": given,
        "ranks": dist.get_world_size(),
        "compiled": options.compiled,
        "flags": options.flags,
        "flops_per_token": flops,
        "peak_tflops": peak,
        "ours": ours,
        "estimated_memory_gb": None if estimated is None else round(estimated / 1e9, 4),  # beside ours's peak_memory_gb
        "plain": plain,
        "parts": parts,
        "seconds_of_this_measurement": round(time.perf_counter() - started),
        "device": device_name(device),
    }


def build(model: Model, micro_batch_size: int, folder: str, options: Namespace) -> Trainer:
    flags = f"{model.flags} --bf16 {'--compile' if options.compiled else ''} {options.flags}"
    sizes = model.vocab_size, micro_batch_size, options.all_steps, options.steps
    return our_run(model.architecture, folder, flags, options.device, *sizes)


def run_ours(run: Trainer, options: Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trainer's own figures of each round, and the parts of its steps."""
    training = OurTraining(run)
    reset_peak(options.device)
    training.steps(options.timed_steps)
    # The first round warms up; its first step is logged by itself.
    step_seconds = training.metrics["iteration-time"][-options.rounds :]
    rates = training.metrics["tokens-per-second"][-options.rounds :]
    result = speed(rates, statistics.median(step_seconds), training.metrics["lm loss"], options.device)
    return result, profile_steps(run, training, options.profiled_steps)


def speed(rates: list[float], step_seconds: float, losses: list[float], device: torch.device) -> dict[str, Any]:
    """The figures of one side. rates: tokens per second of each round."""
    return {
        "tokens_per_second": round(statistics.median(rates)),
        "tokens_per_second_of_each_round": [round(rate) for rate in rates],
        "step_ms": round(1000 * step_seconds, 2),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None,
        "loss_of_first_step": round(losses[0], 4),
        "loss_of_last_step": round(losses[-1], 4),
    }


def run_plain(
    architecture: Architecture,
    config: Any,
    weights: dict[str, Tensor],
    batches: list[tuple[Tensor, Tensor]],
    options: Namespace,
) -> dict[str, Any]:
    """The plain side on the same batches; if its whole logits do not fit, on the first half of each."""
    device, micro_batch_size = options.device, batches[0][0].shape[0]
    reset_peak(device)
    try:
        model = plain_model(architecture, config, weights, device)
        shard_plain(model)
        plain = PlainTraining(model, batches, options.all_steps, compiled=options.compiled)
        # Each step reads the loss, so it waits for the device. The first round warms up.
        seconds = [seconds_of(partial(plain.steps, options.steps)) for _ in range(options.rounds + 1)][1:]
    except torch.OutOfMemoryError:
        if micro_batch_size == 1:
            raise
        model = plain = None  # type: ignore[assignment]
    if plain is None:  # outside of the handler, which holds what the failed attempt allocated
        release(device)
        half = [(tokens[: micro_batch_size // 2], labels[: micro_batch_size // 2]) for tokens, labels in batches]
        return run_plain(architecture, config, weights, half, options)
    tokens = options.steps * batches[0][0].numel()
    rates, step_seconds = [tokens / second for second in seconds], statistics.median(seconds) / options.steps
    result = {"micro_batch_size": micro_batch_size, **speed(rates, step_seconds, plain.losses, device)}
    del model, plain
    release(device)
    return result


def largest_micro_batch(model: Model, options: Namespace) -> int:
    """Peak memory grows by the same amount with every sequence: measured at two sizes, continued to the card's end."""
    sizes, peaks = (2, 6), []  # with fewer, the peak may be the optimizer's
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            run = build(model, size, folder, options)
            reset_peak(options.device)
            OurTraining(run).steps(2)
            peaks.append(torch.cuda.max_memory_allocated(options.device))
            del run
            release(options.device)
    per_sequence = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    fixed = peaks[0] - sizes[0] * per_sequence
    free, _ = torch.cuda.mem_get_info(options.device)
    fits = int((MEMORY_TO_FILL * free - fixed) / per_sequence)
    return max(sizes[0], fits - fits % 2)


def release(device: torch.device) -> None:
    """Give back the memory of what nobody refers to any more; compiled code for other shapes goes along."""
    gc.collect()  # a model and its hooks hold each other
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def note(text: str) -> None:
    """Print, on one rank and at once: a run that is cut short leaves what it had."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="default gpt-350m and llama-0.8b")
    parser.add_argument("--micro-batch-size", type=int, metavar="N", help="default: what fills the GPU; 4 on a CPU")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps of a round; default 5")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds after the one that warms up")
    parser.add_argument("--profiled-steps", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--no-compile", action="store_true", help="compile neither side")
    parser.add_argument("--flags", default="", help="more flags for the trainer, in quotes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also append the results there, as JSON lines")
    args = parser.parse_args()
    if min(args.steps, args.rounds, args.profiled_steps, args.micro_batch_size or 1) < 1:
        parser.error("--steps, --rounds, --profiled-steps and --micro-batch-size must be at least 1")
    device = init_distributed(None, 10, local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch._dynamo.config.automatic_dynamic_shapes = False  # each micro-batch size is compiled for itself
    args.device, args.compiled = device, not args.no_compile
    args.timed_steps = (args.rounds + 1) * args.steps  # the round that warms up included
    args.all_steps = args.timed_steps + WARM_UP_STEPS + args.profiled_steps
    for name in args.model or ["gpt-350m", "llama-0.8b"]:
        try:
            result = measure(name, args.micro_batch_size, args)
        except torch.OutOfMemoryError as error:
            sys.exit(f"error: {name} does not fit; give --micro-batch-size ({error})")
        note(json.dumps(result, indent=1))
        if dist.get_rank() == 0:
            append_row(args.output, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
