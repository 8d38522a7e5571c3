"""Llama and its relatives as models of transformers; ``FAMILIES`` lists their differences."""

from typing import Any

from megatron_zpp.families.decoder_huggingface import Family, Key
from megatron_zpp.families.decoder_huggingface_experts import Experts, GptOssExperts
from megatron_zpp.families.decoder_huggingface_weights import neox_in_memory, neox_weights
from megatron_zpp.models.decoder import DecoderConfig

_NO_BIAS = {"attention_bias": False}
_ATTENTION_BIAS = {"attention_bias": "attention_bias"}
_BIASES = _ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}


def _write_query_scalar(config: DecoderConfig) -> int:
    scale = config.softmax_scale or config.head_dim**-0.5
    scalar = round(scale**-2)
    if abs(scalar**-0.5 - scale) > 1e-9 * scale:
        raise ValueError(f"Gemma's softmax_scale is 1 / sqrt of a whole number, and not {scale}")
    return scalar


def _write_epsilon(config: DecoderConfig) -> float:
    if (epsilon := config.latent_norm_epsilon or config.norm_epsilon) != 1e-6:
        raise ValueError(f"DeepSeek's norms of latent vectors have an epsilon of 1e-6, and not {epsilon:g}")
    return config.norm_epsilon


_LATENT_EPSILON = Key(
    *("rms_norm_eps", "latent_norm_epsilon", _write_epsilon),
    lambda hf: None if hf["rms_norm_eps"] == 1e-6 else 1e-6,  # whichever value the others use
)
_ROPE_LAYERS = Key(
    *("no_rope_layers", "no_rope_freq"),
    lambda config: [int(config.has_rope(layer)) for layer in range(config.num_layers)],  # 1 where there are positions
    lambda hf: None if all(hf["no_rope_layers"]) else str([1 - has_rope for has_rope in hf["no_rope_layers"]]),
)
_QUERY_SCALAR = Key(
    "query_pre_attn_scalar", "softmax_scale", _write_query_scalar, lambda hf: hf["query_pre_attn_scalar"] ** -0.5
)
_MULTIPLIER = Key(
    *("attention_multiplier", "softmax_scale", lambda config: config.softmax_scale or config.head_dim**-0.5),
    lambda hf: hf["attention_multiplier"],
)
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
_NORMS_AROUND = {"input_norm": "input_layernorm", "pre_mlp_norm": "pre_feedforward_layernorm"} | _NORMS_AFTER
_POST_NORMS = dict(post_self_attn_layernorm=True, post_mlp_layernorm=True)
_AFTER = {"no_pre_norms": True} | _POST_NORMS
_WHOLE = dict(qk_layernorm=True, qk_layernorm_whole=True)
_GEMMA: dict[str, Any] = dict(
    swiglu=False, geglu=True, layernorm_1p=True, embedding_multiplier=lambda hidden_size: hidden_size**0.5
)
_SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_LINEAR = "rotary_seq_len_interpolation_factor"
_QWEN_EXPERTS = Experts("num_experts", "moe_intermediate_size", pre_softmax="norm_topk_prob")
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
_LATENT = dict(multi_latent_attention=True, qk_layernorm=True)  # DeepSeek-V2's attention
_LATENT_KEYS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_DEEPSEEK_EXPERTS: dict[str, Any] = dict(
    number="n_routed_experts",
    width="moe_intermediate_size",
    balancing=None,
    keys={"routed_scaling_factor": "topk_scaling_factor"},
    first="first_k_dense_replace",
    shared="shared_experts",
    shared_number="n_shared_experts",
)
_BIASED: dict[str, Any] = dict(
    fields={"score_function": "sigmoid"}, has_groups=True, bias="gate.e_score_correction_bias"
)

FAMILIES = (
    Family("llama", keys=_BIASES),
    Family("mistral", window="mistral"),
    Family("qwen2", fields={"add_qkv_bias": True}, window="qwen", has_head_dim=False),
    Family(
        "seed_oss",
        fields={"add_qkv_bias": True},
        always={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.0},
    ),
    Family("qwen3", fields={"qk_layernorm": True}, keys=_ATTENTION_BIAS, window="qwen"),
    Family(
        "mixtral",
        window="mistral",
        experts=Experts("num_local_experts", "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2")),
        always={"router_jitter_noise": 0.0},
    ),
    Family("qwen3_moe", fields={"qk_layernorm": True}, keys=_ATTENTION_BIAS, experts=_QWEN_EXPERTS, always=_ALL_SPARSE),
    Family(
        "smollm3",
        class_name="SmolLM3ForCausalLM",
        keys=_BIASES,
        special_keys=(_ROPE_LAYERS,),
        has_head_dim=False,
        always={"use_sliding_window": False},
    ),
    Family("olmo2", fields=_WHOLE | _AFTER, keys=_ATTENTION_BIAS, norms=_NORMS_AFTER, has_head_dim=False),
    Family(
        "olmo3",
        fields=_WHOLE | _AFTER,
        keys=_ATTENTION_BIAS,
        norms=_NORMS_AFTER,
        window="layer_types",
        has_head_dim=False,
        has_local_rotary=True,
    ),
    Family(
        "olmoe",
        fields=_WHOLE,
        keys=_ATTENTION_BIAS,
        has_head_dim=False,
        experts=Experts("num_experts", "intermediate_size", pre_softmax="norm_topk_prob"),
        always={"clip_qkv": None},
    ),
    Family(
        "granite",
        keys=_BIASES | {name: name for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")},
        special_keys=(_MULTIPLIER,),
        has_head_dim=False,
    ),
    Family(
        "gemma",
        fields=_GEMMA,
        keys=_ATTENTION_BIAS,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        always={"use_bidirectional_attention": None},
    ),
    Family(
        "gemma2",
        fields=_GEMMA | _POST_NORMS,
        keys=_SOFTCAPS | _ATTENTION_BIAS,
        special_keys=(_QUERY_SCALAR,),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norms=_NORMS_AROUND,
        window="layer_types",
        always={"use_bidirectional_attention": None},
    ),
    Family(
        "gemma3_text",
        class_name="Gemma3ForCausalLM",
        fields=_GEMMA | _POST_NORMS | {"qk_layernorm": True},
        keys=_SOFTCAPS | _ATTENTION_BIAS,
        special_keys=(_QUERY_SCALAR,),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norms=_NORMS_AROUND,
        window="layer_types",
        has_local_rotary=True,
        always={"use_bidirectional_attention": False},
    ),
    Family(
        "nemotron",
        fields=dict(normalization="LayerNorm", layernorm_1p=True, swiglu=False, squared_relu=True),
        keys=_BIASES,
        activation=("hidden_act", "relu2"),
        norm_epsilon="norm_eps",
        has_partial_rotary=True,
    ),
    Family(
        "gpt_neox",
        class_name="GPTNeoXForCausalLM",
        fields=dict(normalization="LayerNorm", swiglu=False, exact_gelu=True, add_bias_linear=True),
        keys={name: name for name in ("use_parallel_residual", "hidden_dropout")},
        activation=("hidden_act", "gelu"),
        norm_epsilon="layer_norm_eps",
        has_head_dim=False,
        has_groups=False,
        has_partial_rotary=True,
        rotary_keys=("rotary_emb_base", "rotary_pct"),
        weights=neox_weights,
        in_memory=neox_in_memory,
        always={"attention_bias": True},
    ),
    Family(
        "qwen2_moe",
        fields={"add_qkv_bias": True},
        has_head_dim=False,
        experts=Experts(
            "num_experts",
            "moe_intermediate_size",
            pre_softmax="norm_topk_prob",
            fields={"shared_expert_gate": True},
            shared="shared_expert",
            keys={"shared_expert_intermediate_size": "shared_expert_size"},
        ),
        always=_ALL_SPARSE | {"qkv_bias": True},
    ),
    Family(
        "glm4_moe",
        keys={"attention_bias": "add_qkv_bias", "use_qk_norm": "qk_layernorm"},
        has_partial_rotary=True,
        experts=Experts(**_DEEPSEEK_EXPERTS | _BIASED),
        always={"norm_topk_prob": True},
    ),
    Family(
        "minimax_m2",
        class_name="MiniMaxM2ForCausalLM",
        fields=_WHOLE,
        has_partial_rotary=True,
        experts=Experts(
            "num_local_experts",
            "intermediate_size",
            "block_sparse_moe",
            ("w1", "w3", "w2"),
            fields={"score_function": "sigmoid"},
            bias="e_score_correction_bias",
        ),
        always={"router_jitter_noise": 0.0},
    ),
    Family(
        "phi3",
        fields={"position_embedding_type": "rope", "rope_scaling_factor": None, _LINEAR: None},
        window="mistral",
        has_head_dim=False,
        has_partial_rotary=True,
        is_fused=True,
        always={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    Family(
        "gpt_oss",
        fields=dict(
            add_bias_linear=True, swiglu=False, quick_geglu=True, glu_linear_offset=1.0, softmax_type="learnable"
        ),
        keys={"swiglu_limit": "activation_func_clamp_value"},
        window="layer_types",
        experts=GptOssExperts("num_local_experts", "intermediate_size", fields={"router_bias": True}),
        always={"attention_bias": True, "swiglu_alpha": 1.702},
    ),
    Family(
        "deepseek_v2",
        fields=_LATENT,
        keys=_LATENT_KEYS,
        special_keys=(_LATENT_EPSILON,),
        has_head_dim=False,
        experts=Experts(**_DEEPSEEK_EXPERTS | {"fields": {"router_pre_softmax": True}}),
        always=_NO_BIAS | {"mlp_bias": False, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    Family(
        "deepseek_v3",
        fields=_LATENT,
        keys=_LATENT_KEYS,
        special_keys=(_LATENT_EPSILON,),
        has_head_dim=False,
        experts=Experts(**_DEEPSEEK_EXPERTS | _BIASED),
        always=_NO_BIAS | {"rope_interleave": True, "norm_topk_prob": True},
    ),
)
LLAMA_FAMILIES = tuple(family.mapping() for family in FAMILIES)
