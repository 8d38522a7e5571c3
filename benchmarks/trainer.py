"""How fast the trainer is on one device: tokens/s, MFU, peak memory and where each step's time goes.

    python benchmarks/trainer.py --output benchmarks/results/trainer.jsonl   # GPT-350M and Llama-0.8B, on a GPU
    python benchmarks/trainer.py --model tiny-gpt --model tiny-llama         # anywhere

The trainer runs in bf16 with ``--compile``; the micro-batch is as large as the GPU holds unless it is given. Beside it,
in the same run: plain single-file PyTorch (bf16 autocast, compiled), with the same weights on the same batches;
that they did the same work shows in their losses. The steps' parts come from torch.profiler, over steps of their own.

Under torchrun there is no plain side, and ``--flags`` may turn ZeRO++ on, which then shows among the parts.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import append_row
from side_by_side import OurTraining, PlainTraining, full_weights, our_run, plain_model, same_batches, write_tokens
from step_parts import WARM_UP_STEPS, format_parts, profile_steps
from torch import Tensor

from megatron_zpp.families import GPT, LLAMA, Architecture
from megatron_zpp.metrics.throughput import mfu, peak_tflops
from megatron_zpp.parallel.distributed import init_distributed
from megatron_zpp.training.run import Run


@dataclass(frozen=True)
class Model:
    architecture: Architecture
    flags: str
    vocab_size: int
    seq_length: int


TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
MODELS = {
    "gpt-350m": Model(GPT, "--preset gpt-350m", 50257, 2048),
    "llama-0.8b": Model(LLAMA, "--preset llama-0.8b", 32000, 4096),
    "tiny-gpt": Model(GPT, TINY, 512, 64),
    "tiny-llama": Model(LLAMA, TINY, 512, 64),
}
MEMORY_TO_FILL = 0.85  # of what is free: the rest is for fragmentation and for what is not PyTorch's
BATCH_ON_CPU = 4


@dataclass(frozen=True)
class Options:
    device: torch.device
    compiled: bool
    steps: int
    rounds: int
    profiled_steps: int
    flags: str

    @property
    def timed_steps(self) -> int:
        """The round that warms up included."""
        return (self.rounds + 1) * self.steps

    @property
    def all_steps(self) -> int:
        return self.timed_steps + WARM_UP_STEPS + self.profiled_steps


def measure(name: str, micro_batch_size: int | None, options: Options) -> dict[str, Any]:
    """One model's result, as a line of JSON holds it."""
    model, device, started = MODELS[name], options.device, time.perf_counter()
    given = micro_batch_size is not None
    if micro_batch_size is None:
        micro_batch_size = largest_micro_batch(model, options) if device.type == "cuda" else BATCH_ON_CPU
    note(f"{name}: micro-batches of {micro_batch_size} sequences of {model.seq_length} tokens")
    with tempfile.TemporaryDirectory() as folder:
        run = build(model, micro_batch_size, f"{folder}/tokens", options)
        config, peak = run.model.config, peak_tflops(device_name(device))
        flops = model.architecture.flops_per_token(config, model.seq_length)

        def with_mfu(side: dict[str, Any]) -> dict[str, Any]:
            used = mfu(side["tokens_per_second"] / dist.get_world_size(), flops, peak)
            return side | {"mfu": None if used is None else round(used, 4)}

        weights = full_weights(run)
        batches = same_batches(run, options.timed_steps)
        ours, parts = run_ours(run, options)
        ours = with_mfu(ours)
        note(f"ours: {ours}")
        note(format_parts(parts))
        del run
        release(device)
        plain = (
            with_mfu(run_plain(model.architecture, config, weights, batches, options))
            if dist.get_world_size() == 1
            else None
        )
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
        "plain": plain,
        "parts": parts,
        "seconds_of_this_measurement": round(time.perf_counter() - started),
        "device": device_name(device),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
    }


def build(model: Model, micro_batch_size: int, prefix: str, options: Options) -> Run:
    num_tokens = options.all_steps * dist.get_world_size() * micro_batch_size * (model.seq_length + 1)
    write_tokens(prefix, num_tokens + 20 * model.seq_length, model.vocab_size)
    return our_run(
        model.architecture,
        prefix,
        vocab_size=model.vocab_size,
        micro_batch_size=micro_batch_size,
        num_steps=options.all_steps,
        log_interval=options.steps,
        device=options.device,
        flags=f"{model.flags} --bf16 {'--compile' if options.compiled else ''} {options.flags}",
    )


def run_ours(run: Run, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trainer's own figures of each round, and the parts of its steps."""
    training = OurTraining(run)
    reset_peak(options.device)
    training.steps(options.timed_steps)
    memory = peak_memory(options.device)
    # The first round warms up; its first step is logged by itself.
    seconds = training.metrics["iteration-time"][-options.rounds :]
    losses = training.metrics["lm loss"]
    tokens_per_second = [round(rate) for rate in training.metrics["tokens-per-second"][-options.rounds :]]
    result = {
        "tokens_per_second": round(statistics.median(tokens_per_second)),
        "tokens_per_second_of_each_round": tokens_per_second,
        "step_ms": round(1000 * statistics.median(seconds), 2),
        "peak_memory_gb": memory,
        "loss_of_first_step": round(losses[0], 4),
        "loss_of_last_step": round(losses[-1], 4),
    }
    return result, profile_steps(run, training, options.profiled_steps)


def run_plain(
    architecture: Architecture,
    config: Any,
    weights: dict[str, Tensor],
    batches: list[tuple[Tensor, Tensor]],
    options: Options,
) -> dict[str, Any]:
    """The plain side on the same batches; if its whole logits do not fit, on the first part of each, halved."""
    device = options.device
    seconds: list[float] = []
    plain: PlainTraining | None
    try:
        reset_peak(device)
        model = plain_model(architecture, config, weights, device)
        plain = PlainTraining(model, batches, options.all_steps, bf16=True, compiled=options.compiled)
        for turn in range(options.rounds + 1):
            start = time.perf_counter()
            for _ in range(options.steps):
                plain.step()  # reads the loss: waits for the device
            if turn > 0:
                seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        micro_batch_size = batches[0][0].shape[0]
        if micro_batch_size == 1:
            raise
        batches = [(tokens[: micro_batch_size // 2], labels[: micro_batch_size // 2]) for tokens, labels in batches]
        model = plain = None  # type: ignore[assignment]
    if plain is None:  # outside of the handler, which holds what the failed attempt allocated
        release(device)
        return run_plain(architecture, config, weights, batches, options)
    tokens = options.steps * batches[0][0].numel()
    result = {
        "micro_batch_size": batches[0][0].shape[0],
        "tokens_per_second": round(tokens / statistics.median(seconds)),
        "tokens_per_second_of_each_round": [round(tokens / second) for second in seconds],
        "step_ms": round(1000 * statistics.median(seconds) / options.steps, 2),
        "peak_memory_gb": peak_memory(device),
        "loss_of_first_step": round(plain.losses[0], 4),
        "loss_of_last_step": round(plain.losses[-1], 4),
    }
    del model, plain
    release(device)
    return result


def largest_micro_batch(model: Model, options: Options) -> int:
    """Peak memory grows by the same amount with every sequence: measured at two sizes, continued to the card's end."""
    sizes, peaks = (2, 6), []  # with fewer, the peak may be the optimizer's
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            run = build(model, size, f"{folder}/tokens", options)
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


def peak_memory(device: torch.device) -> float | None:
    """GB (1e9 bytes) that tensors took at most; None on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None


def note(text: str) -> None:
    """Print, on one rank and at once: a run that is cut short leaves what it had."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description="The trainer's speed on one device, beside plain PyTorch.")
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
    device = init_distributed(None, 10)
    torch._dynamo.config.automatic_dynamic_shapes = False  # each micro-batch size is compiled for itself
    options = Options(device, not args.no_compile, args.steps, args.rounds, args.profiled_steps, args.flags)
    for name in args.model or ["gpt-350m", "llama-0.8b"]:
        try:
            result = measure(name, args.micro_batch_size, options)
        except torch.OutOfMemoryError as error:
            sys.exit(f"error: {name} does not fit; give --micro-batch-size ({error})")
        note(json.dumps(result, indent=1))
        if args.output is not None and dist.get_rank() == 0:
            append_row(args.output, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
