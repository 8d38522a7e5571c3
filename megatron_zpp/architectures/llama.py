"""Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.

Defaults: an MLP of 8/3 * hidden_size, rounded down to a multiple of 64; no dropout; an output layer of its own. The
small models of Llama 3.2 tie theirs to the embeddings; ``--use-rope-scaling`` is Llama 3.1's.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from megatron_zpp.architectures import decoder_only
from megatron_zpp.architectures.architecture import Architecture
from megatron_zpp.architectures.llama_huggingface import HF_LLAMA
from megatron_zpp.models import llama
from megatron_zpp.parallel.context import apply_context_parallel
from megatron_zpp.parallel.plans import llama_plan
from megatron_zpp.settings.checks import require
from megatron_zpp.settings.groups import ModelSettings

PRESETS: dict[str, dict[str, object]] = {
    # LoCo (arXiv 2407.04480) trains a "LLAMA2-0.8B". Its exact shape is not known to us; this one, of 24 layers in the
    # proportions of Llama 2, has 0.78 billion parameters with a vocabulary of 32,000.
    "llama-0.8b": dict(
        num_layers=24,
        hidden_size=1536,
        num_attention_heads=12,
        ffn_hidden_size=4096,
        norm_epsilon=1e-5,
        seq_length=4096,
    ),
    # Llama 2 (Touvron et al., arXiv 2307.09288), 7B and 13B.
    "llama-7b": dict(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        ffn_hidden_size=11008,
        norm_epsilon=1e-5,
        seq_length=4096,
    ),
    "llama-13b": dict(
        num_layers=40,
        hidden_size=5120,
        num_attention_heads=40,
        ffn_hidden_size=13824,
        norm_epsilon=1e-5,
        seq_length=4096,
    ),
    # Llama 3 8B (Grattafiori et al., arXiv 2407.21783, table 3).
    "llama-8b": dict(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=14336,
        rotary_base=500000,
        norm_epsilon=1e-5,
        seq_length=8192,
    ),
}


def resolve(model: ModelSettings, seq_length: int) -> ModelSettings:
    """Completed flags. Raises SettingsError, also for a flag that describes another network."""
    truth: dict[str, Any] = {"normalization": "RMSNorm", "position_embedding_type": "rope"}
    decoder_only.check_described(model, LLAMA.title, **truth)
    decoder_only.check_shape(model)
    assert model.hidden_size
    ffn_size = llama.default_ffn_size(model.hidden_size)
    resolved = decoder_only.resolve(model, seq_length, default_ffn_size=ffn_size, dropout=0.0, tied=False)
    assert resolved.kv_channels
    require(
        resolved.kv_channels % 2 == 0,
        f"rotary embeddings need an even number of channels per head, got {resolved.kv_channels}; change --hidden-size "
        "or --num-attention-heads, or give --kv-channels",
    )
    return dataclasses.replace(resolved, **truth, swiglu=True, disable_bias_linear=True)


def build_config(model: ModelSettings, vocab_size: int) -> llama.LlamaConfig:
    return llama.LlamaConfig(
        **decoder_only.shape_of(model, vocab_size),
        num_query_groups=model.num_query_groups,
        rotary_base=model.rotary_base,
        rope_scaling_factor=model.rope_scaling_factor if model.use_rope_scaling else None,
    )


LLAMA = Architecture(
    name="llama",
    title="Llama",
    config_class=llama.LlamaConfig,
    module=llama.Llama,
    resolve=resolve,
    build_config=build_config,
    flops_per_token=partial(decoder_only.flops_per_token, mlp_layers=3),
    presets=PRESETS,
    tensor_parallel_plan=llama_plan,
    stages=decoder_only.stages,
    apply_context_parallel=apply_context_parallel,
    # Gate and up are kept, and beside them what SiLU makes of the gate, and the product of the two.
    activations=partial(decoder_only.activations, mlp_outputs=2, mlp_kept=4),
    huggingface=HF_LLAMA,
)
