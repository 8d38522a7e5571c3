"""From settings to a model, on the meta device."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_zpp.models.gpt import GPT, GPTConfig
from megatron_zpp.models.llama import Llama, LlamaConfig
from megatron_zpp.training.settings import ModelSettings, PrecisionSettings


def build_model(architecture: str, settings: ModelSettings, vocab_size: int) -> GPT | Llama:
    """The model without storage, its vocabulary padded: call ``to_empty`` and ``init_weights`` on it."""
    assert settings.num_layers and settings.hidden_size and settings.num_attention_heads  # by parse_settings
    assert settings.attention_dropout is not None and settings.hidden_dropout is not None
    shape = dict(
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        vocab_size=padded_vocab_size(vocab_size, settings.make_vocab_size_divisible_by),
        ffn_hidden_size=settings.ffn_hidden_size,
        kv_channels=settings.kv_channels,
        norm_epsilon=settings.norm_epsilon,
        attention_dropout=settings.attention_dropout,
        hidden_dropout=settings.hidden_dropout,
        init_method_std=settings.init_method_std,
        tie_embeddings=settings.tie_embeddings_and_output_weights,
    )
    with torch.device("meta"):
        if architecture == "gpt":
            assert settings.max_position_embeddings
            return GPT(
                GPTConfig(
                    **shape,  # type: ignore[arg-type]
                    max_position_embeddings=settings.max_position_embeddings,
                )
            )
        return Llama(
            LlamaConfig(
                **shape,  # type: ignore[arg-type]
                num_query_groups=settings.num_query_groups,
                rotary_base=settings.rotary_base,
                rope_scaling_factor=settings.rope_scaling_factor if settings.use_rope_scaling else None,
            )
        )


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """``vocab_size`` up to the next multiple: even sizes are faster."""
    return -(-vocab_size // multiple) * multiple


def mixed_precision(precision: PrecisionSettings) -> MixedPrecisionPolicy:
    """Megatron's precision flags as FSDP2's policy. Master parameters and the optimizer stay in fp32."""
    if not (precision.bf16 or precision.fp16):
        return MixedPrecisionPolicy()
    compute = torch.bfloat16 if precision.bf16 else torch.float16
    if precision.grad_reduce_in_bf16:
        reduce = torch.bfloat16
    elif precision.bf16 or precision.accumulate_allreduce_grads_in_fp32:
        reduce = torch.float32
    else:
        reduce = compute
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
