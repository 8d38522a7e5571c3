"""Small models of every family, with every option somewhere and weights that nothing repeats."""

from typing import Any

import torch
from torch import nn

from megatron_zpp.families import HuggingFaceMapping
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.moe import MoEConfig
from megatron_zpp.models.transformer import Transformer
from tests.families.find import architecture_of
from tests.models.configs import gpt_config, llama_config

POSITIONS = 64
YARN = {"yarn_scaling_factor": 4.0, "yarn_original_context": 4096, "yarn_beta_fast": 8.0, "yarn_beta_slow": 0.5}


def _llama(ffn: int, groups: int, channels: int, layers: int = 2, **more: Any) -> DecoderConfig:
    sizes = {"ffn_hidden_size": ffn, "num_query_groups": groups, "kv_channels": channels}
    return llama_config(layers, 32, 4, 101, **sizes, **more)


CONFIGS: dict[str, DecoderConfig] = {
    "gpt": gpt_config(2, 32, 4, 101, POSITIONS, ffn_hidden_size=128, num_query_groups=4, kv_channels=8),
    "gpt-untied": gpt_config(
        *(3, 32, 2, 101, POSITIONS),
        ffn_hidden_size=48,
        num_query_groups=2,
        kv_channels=16,
        norm_epsilon=1e-3,
        tie_embeddings=False,
    ),
    "llama": _llama(40, 4, 8),
    "llama-grouped": _llama(
        *(64, 2, 8, 3), norm_epsilon=1e-6, attention_dropout=0.1, rotary_base=500000, rope_scaling_factor=8.0
    ),
    "llama-tied": _llama(64, 1, 16, tie_embeddings=True),
    "llama-yarn": _llama(64, 4, 8, position_embedding_type="yarn", **YARN),
    "llama-biases": _llama(
        *(40, 2, 8), attention_bias=True, mlp_bias=True, rope_scaling_factor=8.0, yarn_original_context=32
    ),
    "mistral": _llama(64, 2, 16, window_size=5),
    "qwen2": _llama(64, 2, 8, add_qkv_bias=True),
    "qwen2-window": _llama(64, 1, 8, add_qkv_bias=True, window_size=9, tie_embeddings=True),
    "qwen3": _llama(64, 2, 16, qk_layernorm=True, rotary_base=1000000),
    "mixtral": _llama(40, 2, 8, window_size=9, moe=MoEConfig(4, 40, router_topk=2, aux_loss_coeff=0.5)),
    "qwen3-moe": _llama(64, 2, 16, qk_layernorm=True, moe=MoEConfig(6, 24, router_topk=3, router_pre_softmax=True)),
    "qwen3-moe-normalized": _llama(64, 1, 8, qk_layernorm=True, moe=MoEConfig(4, 24, router_topk=2)),
}

_WHOLE = dict(qk_layernorm=True, qk_layernorm_whole=True)
_AFTER = dict(no_pre_norms=True, post_self_attn_layernorm=True, post_mlp_layernorm=True)
_GEMMA_1: dict[str, Any] = dict(layernorm_1p=True, swiglu=False, geglu=True, embedding_multiplier=32**0.5)
_GEMMA = _GEMMA_1 | dict(post_self_attn_layernorm=True, post_mlp_layernorm=True, softmax_scale=24**-0.5)
_SIGMOID: dict[str, Any] = dict(score_function="sigmoid", bias_update_rate=1e-3)
_MSCALE = YARN | dict(position_embedding_type="yarn", mscale=0.7, mscale_all_dim=1.2)
_LATENT: dict[str, Any] = dict(
    multi_latent_attention=True, qk_layernorm=True, norm_epsilon=1e-6, kv_lora_rank=12, qk_head_dim=8,
    qk_pos_emb_head_dim=4, v_head_dim=6, moe_layer_freq="[0]*1+[1]*2",
)  # fmt: skip
CONFIGS |= {
    "smollm3": _llama(64, 2, 8, 4, no_rope_freq="[0, 0, 0, 1]", tie_embeddings=True),
    "seed-oss": _llama(64, 2, 16, add_qkv_bias=True),
    "olmo2": _llama(64, 4, 8, **_WHOLE, **_AFTER),
    "olmo3": _llama(
        *(64, 4, 8, 3), **_WHOLE, **_AFTER, window_size=5, window_attn_skip_freq="[1, 1, 0]", rotary_base_local=500000,
        rotary_base=500000, position_embedding_type="yarn", **YARN,
    ),
    "olmoe": _llama(24, 2, 8, **_WHOLE, moe=MoEConfig(6, 24, router_topk=3, router_pre_softmax=True)),
    "granite": _llama(
        64, 2, 8, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=8.0, softmax_scale=0.0625
    ),
    "gemma": _llama(64, 2, 16, **_GEMMA_1, tie_embeddings=True),
    "gpt-neox": _llama(
        *(64, 4, 8), normalization="LayerNorm", swiglu=False, exact_gelu=True, add_bias_linear=True,
        use_parallel_residual=True, rotary_percent=0.25, rotary_base=5000.5, hidden_dropout=0.1,
    ),
    "gemma2": _llama(
        *(64, 2, 16), **_GEMMA, window_size=5, window_attn_skip_freq="[1, 0]", attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0, tie_embeddings=True,
    ),
    "gemma3": _llama(
        *(64, 2, 16, 3), **_GEMMA, qk_layernorm=True, window_size=5, window_attn_skip_freq="[1, 1, 0]",
        rotary_base=1000000, rotary_base_local=10000, rotary_seq_len_interpolation_factor=8.0, tie_embeddings=True,
    ),
    "nemotron": _llama(
        64, 2, 8, normalization="LayerNorm", layernorm_1p=True, swiglu=False, squared_relu=True, rotary_percent=0.5
    ),
    "qwen2-moe": _llama(
        *(64, 2, 8), add_qkv_bias=True,
        moe=MoEConfig(6, 24, router_topk=3, router_pre_softmax=True, shared_expert_size=40, shared_expert_gate=True),
    ),
    "glm4-moe": _llama(
        *(64, 2, 16, 3), add_qkv_bias=True, qk_layernorm=True, rotary_percent=0.5, moe_layer_freq="[0]*1+[1]*2",
        moe=MoEConfig(6, 24, router_topk=3, topk_scaling_factor=1.5, shared_expert_size=24, **_SIGMOID),
    ),
    "minimax-m2": _llama(24, 2, 16, **_WHOLE, rotary_percent=0.5, moe=MoEConfig(6, 24, router_topk=3, **_SIGMOID)),
    "phi3": _llama(64, 2, 8, window_size=5, rotary_percent=0.5),
    "gpt-oss": _llama(
        *(24, 2, 16), swiglu=False, quick_geglu=True, glu_linear_offset=1.0, activation_func_clamp_value=0.5,
        softmax_type="learnable", add_bias_linear=True, window_size=5, window_attn_skip_freq="[1, 0]",
        moe=MoEConfig(6, 24, router_topk=3, router_bias=True), position_embedding_type="yarn", **YARN,
        no_yarn_correction_range_round_to_int=True,
    ),
    "deepseek-v2": _llama(
        *(64, 4, 8, 3), **_LATENT, **_MSCALE,
        moe=MoEConfig(6, 24, router_topk=3, router_pre_softmax=True, topk_scaling_factor=1.5, shared_expert_size=48),
    ),
    "kimi-k2": _llama(  # with YaRN's ends at one place, and one epsilon for latent vectors
        *(64, 4, 8, 3), **_LATENT | {"norm_epsilon": 1e-5, "latent_norm_epsilon": 1e-6}, q_lora_rank=20,
        **_MSCALE | {"yarn_beta_fast": 1.0, "yarn_beta_slow": 1.0, "yarn_original_context": 16},
        moe=MoEConfig(6, 24, router_topk=3, topk_scaling_factor=2.827, shared_expert_size=24, **_SIGMOID),
    ),
    "deepseek-v3": _llama(
        *(64, 4, 8, 3), **_LATENT, q_lora_rank=20, **_MSCALE, moe=MoEConfig(
            *(16, 24), router_topk=4, topk_scaling_factor=2.5, shared_expert_size=24, router_num_groups=4,
            router_group_topk=2, **_SIGMOID,
        ),
    ),
}  # fmt: skip


def mapping_of(config: DecoderConfig) -> HuggingFaceMapping:
    return architecture_of(config).huggingface_model(config)


def to_hf_config(config: DecoderConfig, positions: int = POSITIONS) -> dict[str, Any]:
    return mapping_of(config).to_config(config, positions)


def build_empty(config: DecoderConfig) -> Transformer:
    return architecture_of(config).build_empty(config)


def build(config: DecoderConfig, seed: int = 0) -> Transformer:
    """Our model with random weights in every place, norms and biases too; ready to compute logits."""
    model = build_empty(config).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.state_dict().items():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
    return model
