"""A small Llama of transformers in a plain loop; for ``other_loops.py``."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from other_loops import Trained
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_zpp.zeropp import ZeroPPConfig, apply_zeropp

VOCABULARY, TOKENS, SAMPLES = 512, 32, 2  # tokens per sample, samples per micro-batch
Batch = dict[str, Tensor]

LLAMA: dict[str, Any] = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=VOCABULARY,
    num_key_value_heads=2, head_dim=16, use_cache=False,
)  # fmt: skip


def counting(generator: torch.Generator) -> Batch:
    """Tokens that count on from a random one."""
    tokens = torch.arange(TOKENS) + torch.randint(VOCABULARY - TOKENS, (SAMPLES, 1), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def make_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def blocks_of(model: nn.Module) -> Iterable[nn.Module]:
    """The model's list of layers."""
    return max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)


def train(
    config: ZeroPPConfig | None,
    accumulation: int,
    steps: int,
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - a frozen record
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    loss_scale: float | None = None,
    stance: str = "default",
) -> Trained:
    """Clips, and accumulates as FSDP2 wants it.

    loss_scale: what a GradScaler begins with; None = train without. stance: torch.compile's, of the optimizer's step.
    """
    torch.manual_seed(0)
    model: Any = make_llama()
    trained = Trained(sum(parameter.numel() for parameter in model.parameters()))
    for block in blocks_of(model):
        fully_shard(block, mp_policy=mp_policy)
    fully_shard(model, mp_policy=mp_policy)
    zeropp = None if config is None else apply_zeropp(model, config)
    optimizer = make_optimizer(model.parameters(), lr=3e-3)
    has_scaler = loss_scale is not None
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1.0, growth_interval=4, enabled=has_scaler)
    rank = dist.get_rank()
    for step in range(steps):
        for i in range(accumulation):
            model.set_is_last_backward(i == accumulation - 1)
            generator = torch.Generator().manual_seed(1000 * (step * accumulation + i) + rank)
            torch.manual_seed(step * accumulation + i)  # dropout's
            loss = model(**counting(generator)).loss
            scaler.scale(loss / accumulation).backward()
            trained.losses.append(loss.item())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.compiler.set_stance(stance):
            scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if zeropp is not None and scaler.get_scale() < scale:
            zeropp.undo_step()
        if zeropp is not None and scaler.get_scale() != scale:
            zeropp.rescale_errors(scaler.get_scale() / scale)
        optimizer.zero_grad()
        trained.end_step(zeropp)
    return trained


def adamw_8bit(config: ZeroPPConfig | None, accumulation: int, steps: int) -> Trained:
    from torchao.optim import AdamW8bit

    # Its step is compiled, for each shape again: here it runs as it is written.
    return train(config, accumulation, steps, make_optimizer=AdamW8bit, stance="force_eager")


# Some steps overflow, and are skipped.
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
grad_scaler = partial(train, mp_policy=FP16, loss_scale=2.0**21)
