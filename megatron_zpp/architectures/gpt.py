"""GPT: learned positions (``max_position_embeddings`` of them), LayerNorm, GELU.

Defaults: an MLP of 4 * hidden_size, dropout of 0.1, tied embeddings.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from megatron_zpp.architectures import decoder_only
from megatron_zpp.architectures.architecture import Architecture
from megatron_zpp.architectures.gpt_huggingface import GPT2
from megatron_zpp.models import gpt
from megatron_zpp.parallel.context import apply_context_parallel
from megatron_zpp.parallel.plans import gpt_plan
from megatron_zpp.settings.groups import ModelSettings

PRESETS: dict[str, dict[str, object]] = {
    # GPT-3 (Brown et al., arXiv 2005.14165, table 2.1). The table's 24 heads of 128 do not make the 1.3B model's width
    # of 2048, and its 5140 for 13B is no multiple of 40 heads of 128: Megatron's users train 16 heads and 5120.
    "gpt-125m": dict(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=2048),
    "gpt-350m": dict(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=2048),
    "gpt-1.3b": dict(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048),
    "gpt-13b": dict(num_layers=40, hidden_size=5120, num_attention_heads=40, seq_length=2048),
    # DeepSpeed's ZeRO++ tutorial.
    "gpt-18b": dict(num_layers=40, hidden_size=6144, num_attention_heads=32, seq_length=512),
}


def resolve(model: ModelSettings, seq_length: int) -> ModelSettings:
    """Completed flags. Raises SettingsError, also for a flag that describes another network."""
    truth: dict[str, Any] = {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
    lacks = ("swiglu", "disable_bias_linear", "group_query_attention", "use_rope_scaling")
    decoder_only.check_described(model, GPT.title, lacks, **truth)
    decoder_only.check_shape(model)
    assert model.hidden_size
    ffn_size = gpt.default_ffn_size(model.hidden_size)
    resolved = decoder_only.resolve(model, seq_length, default_ffn_size=ffn_size, dropout=0.1, tied=True)
    return dataclasses.replace(resolved, **truth)


def build_config(model: ModelSettings, vocab_size: int) -> gpt.GPTConfig:
    assert model.max_position_embeddings
    shape = decoder_only.shape_of(model, vocab_size)
    return gpt.GPTConfig(**shape, max_position_embeddings=model.max_position_embeddings)


GPT = Architecture(
    name="gpt",
    title="GPT",
    config_class=gpt.GPTConfig,
    module=gpt.GPT,
    resolve=resolve,
    build_config=build_config,
    flops_per_token=partial(decoder_only.flops_per_token, mlp_layers=2),
    presets=PRESETS,
    tensor_parallel_plan=gpt_plan,
    stages=partial(decoder_only.stages, positions=("position_embeddings",)),
    apply_context_parallel=apply_context_parallel,
    # With dropout 34 S B H bytes a block in 16 bit. What fc1 makes is kept for GELU, and what GELU makes for fc2.
    activations=partial(decoder_only.activations, mlp_outputs=1, mlp_kept=2),
    huggingface=GPT2,
)
