"""Our trainer and plain single-file PyTorch on the same weights and batches, for benchmarks that compare the two."""

import contextlib
import io
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.data.loader import build_loader
from megatron_zpp.families import Architecture
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.rotary import frequencies, rotary_table
from megatron_zpp.training.pretrain import train
from megatron_zpp.training.setup import build_trainer
from megatron_zpp.training.trainer import Trainer

LR, MIN_LR, WARMUP, CLIP, DECAY = 1e-3, 1e-4, 5, 1.0, 0.1


# The plain side: models of torch.nn layers, and a loop in the style of nanoGPT


class PlainBlock(nn.Module):
    """A layer of GPT-2 (LayerNorm, biases, GELU) or of Llama (RMSNorm, rotary positions, SwiGLU)."""

    def __init__(self, config: DecoderConfig, is_llama: bool) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, config.ffn_size, not is_llama
        self.heads, self.is_llama = config.num_attention_heads, is_llama
        self.norm1, self.norm2 = _norm(config, is_llama), _norm(config, is_llama)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, bias=bias), nn.Linear(hidden, hidden, bias=bias)
        self.up = nn.Linear(hidden, 2 * ffn if is_llama else ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, heads, S, head_dim]
            for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        if rotary is not None:
            cos, sin = (table.to(q.dtype) for table in rotary)  # [S, head_dim]
            q, k = (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        up = self.up(self.norm2(x))
        if self.is_llama:
            gate, up = up.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(up, approximate="tanh"))


class PlainModel(nn.Module):
    """GPT-2 with learned positions and a tied output layer, or Llama."""

    def __init__(self, config: DecoderConfig, is_llama: bool) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = None
        if not is_llama:
            assert config.max_position_embeddings is not None
            self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(config, is_llama) for _ in range(config.num_layers))
        self.norm = _norm(config, is_llama)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if not is_llama:
            self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, rotary = self.tokens(tokens), None
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        else:
            frequency = frequencies(self.config.head_dim, self.config.rotary_base, tokens.device)
            cos, sin = (table.squeeze(1).repeat(1, 2) for table in rotary_table(frequency, tokens.shape[1]))
            rotary = cos, sin  # [S, head_dim]
        for block in self.blocks:
            x = block(x, rotary)
        return self.loss(x, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.output(self.norm(x))  # [B, S, V]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _norm(config: DecoderConfig, is_llama: bool) -> nn.Module:
    return nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon) if is_llama else nn.LayerNorm(config.hidden_size)


class PlainTraining:
    """A training loop; ``step`` is all of it. ``batches``: tokens and labels of each step, on the device."""

    def __init__(self, model: PlainModel, batches: list[tuple[Tensor, Tensor]], num_steps: int, compiled: bool) -> None:
        self.model, self.batches, self.num_steps, self.done = model, batches, num_steps, 0
        if compiled:  # in parts, which takes seconds where the whole would take minutes
            for block in model.blocks:
                block.forward = torch.compile(block.forward)  # type: ignore[method-assign]  # without FSDP2's hooks
            model.loss = torch.compile(model.loss)  # type: ignore[method-assign]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)
        self.losses: list[float] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        warm = min(1.0, self.done / WARMUP)
        progress = max(0.0, self.done - WARMUP) / (self.num_steps - WARMUP)
        cosine = MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = LR * warm if warm < 1 else cosine
        tokens, labels = self.batches[self.done]
        loss = self.model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.done += 1


def shard_plain(model: PlainModel) -> None:
    """Shard as FSDP2's documentation does: each block, then the rest. Computes in bf16, reduces gradients in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)


PLAIN_NAMES = {  # to ours
    "tokens": "word_embeddings",
    "positions": "position_embeddings",
    "blocks": "layers",
    "norm1": "input_norm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "norm2": "pre_mlp_norm",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
    "norm": "final_norm",
    "output": "output_layer",
}


@torch.no_grad()
def plain_model(
    architecture: Architecture, config: Any, weights: Mapping[str, Tensor], device: torch.device
) -> PlainModel:
    """The plain model with our ``weights``. Ours packs q, k, v head by head, the plain one part by part."""
    with device:
        plain = PlainModel(config, is_llama=architecture.name == "llama")
    weights = dict(weights)
    for name in [name for name in weights if "linear_fc1_gate" in name]:  # the plain Llama has both in one layer
        gate, up = weights.pop(name), weights.pop(name.replace("_gate", "_up"))
        weights[name.replace("_gate", "")] = torch.cat([gate, up])
    for name, parameter in plain.named_parameters():
        value = weights[".".join(PLAIN_NAMES.get(part, part) for part in name.split("."))]
        if "qkv" in name:
            by_head = value.view(config.num_attention_heads, 3, config.head_dim, -1)
            value = by_head.transpose(0, 1).reshape(value.shape)
        parameter.copy_(value)
    return plain


# Our side


def our_run(
    architecture: Architecture,
    folder: str,
    flags: str,
    device: torch.device,
    vocab_size: int,
    micro_batch_size: int,
    num_steps: int,
    log_interval: int,
) -> Trainer:
    """The trainer, as ``pretrain_gpt.py`` or ``pretrain_llama.py`` builds it, on tokens written to ``folder``.

    flags: the model's shape and more.
    """
    common = f"""
        --attention-dropout 0 --hidden-dropout 0 --micro-batch-size {micro_batch_size} --train-iters {num_steps}
        --lr {LR} --min-lr {MIN_LR} --lr-decay-style cosine --lr-warmup-iters {WARMUP}
        --clip-grad {CLIP} --weight-decay {DECAY} --data-path {folder}/tokens --split 100,0,0 --eval-iters 0
        --tokenizer-type NullTokenizer --vocab-size {vocab_size - 1} --log-interval {log_interval}
    """
    settings = parse_settings(architecture, [*common.split(), *flags.split()], dist.get_world_size())
    assert settings.training.seq_length
    samples = num_steps * micro_batch_size * dist.get_world_size() + 20
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(f"{folder}/tokens", "<u2") as writer:
        for _ in range(20):
            # Frequencies as in text, so that there is something to learn.
            tokens = random.zipf(1.3, size=samples * (settings.training.seq_length + 1) // 20 + 1)
            writer.add_document([np.minimum(tokens, vocab_size - 2)])
    return build_trainer(architecture, settings, device)


def same_batches(run: Trainer, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """What our loop will read, in its order, on the device."""
    assert run.datasets.train is not None and run.settings.training.micro_batch_size
    loader = build_loader(
        run.datasets.train,
        consumed_samples=0,
        micro_batch_size=run.settings.training.micro_batch_size,
        dp_rank=0,
        dp_size=1,
        num_workers=0,
        device="cpu",
    )
    batches = [batch for batch, _ in zip(loader, range(num_steps), strict=False)]
    return [(batch["tokens"].to(run.device), batch["labels"].to(run.device)) for batch in batches]


def full_weights(run: Trainer) -> dict[str, Tensor]:
    """A copy of the whole model's weights in host memory; collective."""
    return {name: p.full_tensor().cpu().clone() for name, p in run.model.state_dict().items()}


class OurTraining:
    """The trainer's loop, some steps at a time, its metrics kept by key."""

    def __init__(self, run: Trainer) -> None:
        self.run = run
        self.metrics: dict[str, list[float]] = {}
        run.train_iters = 0
        run.writers = self  # type: ignore[assignment]

    def steps(self, count: int) -> None:
        self.run.train_iters += count
        with contextlib.redirect_stdout(io.StringIO()):
            train(self.run, time.monotonic())

    def write(self, metrics: Mapping[str, float], iteration: int, consumed_samples: int) -> None:
        """Called by the trainer, where it writes to TensorBoard and wandb."""
        for key, value in metrics.items():
            self.metrics.setdefault(key, []).append(value)
