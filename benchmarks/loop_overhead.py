"""What our training loop costs beside plain PyTorch: tokens per second of both, for the same GPT on one rank.

    python benchmarks/loop_overhead.py --output benchmarks/results/loop_overhead.json

The plain side is the shortest program that trains a GPT: a model of torch.nn layers, batches that lie in memory,
AdamW, clipping, a cosine. Ours is the trainer as it is: flags, FSDP2, the indexed dataset, logging. Both begin with
the same weights, see the same batches and take turns, a few steps each; the ratio is the median over the turns.
That they did the same work shows in the losses of their last turns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.data.build import build_loader
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.parallel.distributed import init_distributed
from megatron_zpp.training.arguments import parse_settings
from megatron_zpp.training.pretrain import train
from megatron_zpp.training.setup import Run, build_run

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCAB = 4, 256, 4, 256, 8, 8192
LR, MIN_LR, WARMUP, CLIP, DECAY = 1e-3, 1e-4, 5, 1.0, 0.1
HEAD_DIM = HIDDEN // HEADS


# The plain side


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)  # [B, heads, S, head_dim]
            for part in self.qkv(self.norm1(x)).split(HIDDEN, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))  # [B, S, V]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PlainTraining:
    """A training loop in the style of nanoGPT; ``step`` is all of it."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], bf16: bool, num_steps: int) -> None:
        self.batches, self.bf16, self.num_steps, self.done = batches, bf16, num_steps, 0
        self.model = PlainGPT()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)
        self.losses: list[float] = []

    def step(self) -> None:
        warm = min(1.0, self.done / WARMUP)
        progress = max(0.0, self.done - WARMUP) / (self.num_steps - WARMUP)
        cosine = MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = LR * warm if warm < 1 else cosine
        tokens, labels = self.batches[self.done]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.done += 1


@torch.no_grad()
def copy_weights(ours: nn.Module, plain: PlainGPT) -> None:
    """Give the plain model our initial weights. Ours packs q, k, v head by head, the plain one part by part."""
    weights: dict[str, Tensor] = {name: p.full_tensor() for name, p in ours.state_dict().items()}

    def part_by_part(x: Tensor) -> Tensor:
        return x.view(HEADS, 3, HEAD_DIM, -1).transpose(0, 1).reshape(x.shape)

    names = {
        "norm1": "input_norm",
        "qkv": "self_attention.linear_qkv",
        "proj": "self_attention.linear_proj",
        "norm2": "pre_mlp_norm",
        "up": "mlp.linear_fc1",
        "down": "mlp.linear_fc2",
    }
    for i, block in enumerate(plain.blocks):
        for name, theirs in names.items():
            for kind in ("weight", "bias"):
                value = weights[f"layers.{i}.{theirs}.{kind}"]
                getattr(block.get_submodule(name), kind).copy_(part_by_part(value) if name == "qkv" else value)
    plain.tokens.weight.copy_(weights["word_embeddings.weight"])
    plain.positions.weight.copy_(weights["position_embeddings.weight"])
    plain.norm.weight.copy_(weights["final_norm.weight"])
    plain.norm.bias.copy_(weights["final_norm.bias"])


# Our side


def our_run(prefix: str, bf16: bool, num_steps: int, log_interval: int) -> Run:
    """The trainer, as ``pretrain_gpt.py`` on one rank builds it."""
    flags = f"""
        --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH}
        --attention-dropout 0 --hidden-dropout 0 --micro-batch-size {BATCH} --train-iters {num_steps}
        --lr {LR} --min-lr {MIN_LR} --lr-decay-style cosine --lr-warmup-iters {WARMUP}
        --clip-grad {CLIP} --weight-decay {DECAY} --data-path {prefix} --split 100,0,0 --eval-iters 0
        --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --num-workers 0 --log-interval {log_interval}
        {"--bf16" if bf16 else ""}
    """
    return build_run(parse_settings("gpt", flags.split()), init_distributed(None, 10))


def write_tokens(prefix: str, num_steps: int) -> None:
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for _ in range(20):
            # Frequencies as in text, so that there is something to learn.
            tokens = np.minimum(random.zipf(1.3, size=num_steps * BATCH * LENGTH // 20 + LENGTH), VOCAB - 2)
            writer.add_document([tokens])


def same_batches(run: Run, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """What our loop will read, in its order, in memory."""
    assert run.datasets.train is not None
    loader = build_loader(
        run.datasets.train,
        consumed_samples=0,
        micro_batch_size=BATCH,
        dp_rank=0,
        dp_size=1,
        num_workers=0,
        device="cpu",
    )
    return [(batch["tokens"], batch["labels"]) for batch, _ in zip(loader, range(num_steps), strict=False)]


class OurTraining:
    """The trainer's loop, some steps at a time."""

    def __init__(self, run: Run) -> None:
        self.run, self.log = run, io.StringIO()
        run.train_iters = 0

    def steps(self, count: int) -> None:
        self.run.train_iters += count
        with contextlib.redirect_stdout(self.log):
            train(self.run, time.monotonic())


def measure(bf16: bool, rounds: int, steps: int) -> dict[str, Any]:
    """Both sides in turns, the first of which warms up; tokens per second of the median turn."""
    num_steps = (rounds + 1) * steps
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/tokens"
        write_tokens(prefix, num_steps)
        run = our_run(prefix, bf16, num_steps, log_interval=steps)
        plain, ours = PlainTraining(same_batches(run, num_steps), bf16, num_steps), OurTraining(run)
        copy_weights(run.model, plain.model)

        seconds: dict[str, list[float]] = {"plain": [], "ours": []}
        for turn in range(rounds + 1):
            # Who begins alternates, lest one side always meets the machine as the other left it.
            for side in ("plain", "ours") if turn % 2 else ("ours", "plain"):
                start = time.perf_counter()
                if side == "plain":
                    for _ in range(steps):
                        plain.step()
                else:
                    ours.steps(steps)
                if turn > 0:
                    seconds[side].append(time.perf_counter() - start)
        dist.destroy_process_group()

    last_line = ours.log.getvalue().split("lm loss: ")[-1]
    tokens = steps * BATCH * LENGTH
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
    return {
        "precision": "bf16" if bf16 else "fp32",
        "tokens_per_second_plain": round(tokens / statistics.median(seconds["plain"])),
        "tokens_per_second_ours": round(tokens / statistics.median(seconds["ours"])),
        "time_ours_over_plain": round(statistics.median(ratios), 4),
        "ratio_of_each_turn": [round(ratio, 3) for ratio in ratios],
        "mean_loss_of_last_turn_plain": round(statistics.mean(plain.losses[-steps:]), 4),
        "mean_loss_of_last_turn_ours": round(float(last_line.split()[0]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Our training loop beside plain PyTorch, on one rank.")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="turns of each side; default 10")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps of a turn; default 5")
    parser.add_argument("--bf16", action="store_true", help="bf16 on both sides: autocast there, --bf16 here")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the result there, as JSON")
    args = parser.parse_args()
    if (args.rounds + 1) * args.steps <= WARMUP:
        parser.error(f"--rounds and --steps must make more than the {WARMUP} steps of the warm-up")
    result = {
        "model": f"GPT: {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, vocabulary {VOCAB}; {BATCH} x {LENGTH} tokens",
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}",
        **measure(args.bf16, args.rounds, args.steps),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
