"""Published shapes of Llama and its relatives, for ``--preset``. Widths follow the published weights."""


def shape(
    layers: int, hidden: int, heads: int, ffn: int, seq_length: int, groups: int | None = None, **others: object
) -> dict[str, object]:
    """Return the settings of a published shape; groups: key/value heads, None one per query head."""
    grouped = {} if groups is None else dict(group_query_attention=True, num_query_groups=groups)
    shape = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn_hidden_size=ffn)
    return {**shape, "seq_length": seq_length, "norm_epsilon": 1e-5, **grouped, **others}


def gemma(
    kind: dict[str, object], layers: int, hidden: int, heads: int, ffn: int, groups: int, **others: object
) -> dict[str, object]:
    """Return the settings of a Gemma, which multiplies embeddings by the square root of its width."""
    return shape(layers, hidden, heads, ffn, 8192, groups, embedding_multiplier=hidden**0.5) | kind | others


TIED: dict[str, object] = dict(tie_embeddings_and_output_weights=True)
LLAMA32: dict[str, object] = TIED | dict(use_rope_scaling=True, rope_scaling_factor=32.0)
QWEN3: dict[str, object] = dict(kv_channels=128, qk_layernorm=True, rotary_base=1000000, norm_epsilon=1e-6)
DEEPSEEK: dict[str, object] = dict(  # V2 and V3
    multi_latent_attention=True,
    qk_layernorm=True,
    kv_lora_rank=512,
    norm_epsilon=1e-6,
    yarn_rotary_scaling_factor=40.0,  # as published, after the extension of the context
    yarn_original_max_position_embeddings=4096,
    mscale_all_dim=1.0,
    moe_router_load_balancing_type="seq_aux_loss",
)
DEEPSEEK_V3: dict[str, object] = DEEPSEEK | dict(
    q_lora_rank=1536,
    num_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
KIMI: dict[str, object] = dict(  # Moonshot's, which have DeepSeek-V3's parts
    rotary_base=50000,
    num_experts=64,
    moe_first_layer=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=0.001,
)
GEMMA: dict[str, object] = TIED | dict(
    geglu=True, apply_layernorm_1p=True, post_self_attn_layernorm=True, post_mlp_layernorm=True, norm_epsilon=1e-6
)
GEMMA2: dict[str, object] = GEMMA | dict(
    window_size="4095,0", window_attn_skip_freq="2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0
)
GEMMA3: dict[str, object] = GEMMA | dict(
    qk_layernorm=True, window_size="1023,0", window_attn_skip_freq="6", rotary_base=1000000, rotary_base_local=10000
)
GEMMA3_LONG: dict[str, object] = dict(rotary_seq_len_interpolation_factor=8.0)
OLMO2: dict[str, object] = dict(
    qk_layernorm=True,
    qk_layernorm_whole=True,
    no_pre_norms=True,
    post_self_attn_layernorm=True,
    post_mlp_layernorm=True,
    norm_epsilon=1e-6,
    rotary_base=500000,
)
OLMO3: dict[str, object] = dict(window_size="4095,0", window_attn_skip_freq="4")
NEMOTRON: dict[str, object] = dict(
    normalization="LayerNorm", apply_layernorm_1p=True, squared_relu=True, rotary_percent=0.5
)

PRESETS: dict[str, dict[str, object]] = {
    # LoCo (arXiv 2407.04480) trains a "LLAMA2-0.8B" whose exact shape we do not know. This one, of 24 layers in Llama
    # 2's proportions, has 0.78 billion parameters with a vocabulary of 32,000.
    "llama-0.8b": shape(24, 1536, 12, 4096, 4096),
    # Llama 2 (Touvron et al., arXiv 2307.09288), 7B and 13B.
    "llama-7b": shape(32, 4096, 32, 11008, 4096),
    "llama-13b": shape(40, 5120, 40, 13824, 4096),
    # Llama 3 8B (Grattafiori et al., arXiv 2407.21783, table 3).
    "llama-8b": shape(32, 4096, 32, 14336, 8192, groups=8, rotary_base=500000),
    "llama-70b": shape(80, 8192, 64, 28672, 8192, groups=8, rotary_base=500000),
    # Llama 3.1 and 3.2, whose small models tie their embeddings.
    "llama-405b": shape(126, 16384, 128, 53248, 8192, groups=8, rotary_base=500000, use_rope_scaling=True),
    "llama-1b": shape(16, 2048, 32, 8192, 8192, groups=8, rotary_base=500000) | LLAMA32,
    "llama-3b": shape(28, 3072, 24, 8192, 8192, groups=8, rotary_base=500000) | LLAMA32,
    # Mistral 7B (Jiang et al., arXiv 2310.06825, table 1), v0.1: a sliding window of 4,096 tokens with its own.
    "mistral-7b": shape(32, 4096, 32, 14336, 8192, groups=8, window_size="4095,0"),
    # Qwen3 (Yang et al., arXiv 2505.09388, table 1); widths follow the published configurations.
    "qwen3-0.6b": shape(28, 1024, 16, 3072, 4096, groups=8) | QWEN3 | TIED,
    "qwen3-8b": shape(36, 4096, 32, 12288, 4096, groups=8) | QWEN3,
    "qwen3-14b": shape(40, 5120, 40, 17408, 4096, groups=8) | QWEN3,
    "qwen3-32b": shape(64, 5120, 64, 25600, 4096, groups=8) | QWEN3,
    "qwen3-30b-a3b": shape(48, 2048, 32, 6144, 4096, groups=4)
    | QWEN3
    | dict(num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768, moe_aux_loss_coeff=0.001),
    "qwen3-235b-a22b": shape(94, 4096, 64, 12288, 4096, groups=4)
    | QWEN3
    | dict(num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=1536, moe_aux_loss_coeff=0.001),
    # Qwen2.5 (arXiv 2412.15115).
    "qwen2.5-7b": shape(28, 3584, 28, 18944, 4096, groups=4, add_qkv_bias=True, rotary_base=1000000)
    | dict(norm_epsilon=1e-6),
    # Mixtral of Experts (Jiang et al., arXiv 2401.04088, table 1).
    "mixtral-8x7b": shape(32, 4096, 32, 14336, 4096, groups=8, rotary_base=1000000)
    | dict(num_experts=8, moe_router_topk=2, moe_aux_loss_coeff=0.02),
    # DeepSeek-V2 (arXiv 2405.04434, appendix B) and V3 (arXiv 2412.19437, section 4.2).
    "deepseek-v2-lite": shape(27, 2048, 16, 10944, 4096)
    | DEEPSEEK
    | dict(num_experts=64, moe_router_topk=6, moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=2816)
    | dict(
        moe_first_layer=2, moe_router_pre_softmax=True, moe_aux_loss_coeff=0.001, mscale=0.707, mscale_all_dim=0.707
    ),
    "deepseek-v3": shape(61, 7168, 128, 18432, 4096)
    | DEEPSEEK_V3
    | dict(moe_first_layer=4, moe_router_num_groups=8, moe_router_group_topk=4, moe_router_topk_scaling_factor=2.5)
    | dict(moe_aux_loss_coeff=0.0001),
    "deepseek-v2": shape(60, 5120, 128, 12288, 4096)
    | DEEPSEEK
    | dict(q_lora_rank=1536, num_experts=160, moe_router_topk=6, moe_ffn_hidden_size=1536, moe_first_layer=2)
    | dict(moe_shared_expert_intermediate_size=3072, moe_router_pre_softmax=True, moe_aux_loss_coeff=0.003)
    | dict(moe_router_num_groups=8, moe_router_group_topk=3, moe_router_topk_scaling_factor=16.0),
    # Kimi K2 (arXiv 2507.20534), its YaRN without a range between its ends; Moonlight (arXiv 2502.16982).
    "kimi-k2": shape(61, 7168, 64, 18432, 4096)
    | DEEPSEEK_V3
    | KIMI
    | dict(num_experts=384, moe_router_topk_scaling_factor=2.827, yarn_rotary_scaling_factor=32.0, yarn_beta_fast=1.0),
    "moonlight-16b-a3b": shape(27, 2048, 16, 11264, 8192)
    | KIMI
    | dict(multi_latent_attention=True, qk_layernorm=True, kv_lora_rank=512, moe_router_topk=6)
    | dict(moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=2816, moe_router_topk_scaling_factor=2.446),
    # Gemma 2 (arXiv 2408.00118, table 1).
    "gemma2-2b": gemma(GEMMA2, 26, 2304, 8, 9216, groups=4, kv_channels=256),
    "gemma2-9b": gemma(GEMMA2, 42, 3584, 16, 14336, groups=8, kv_channels=256),
    "gemma2-27b": gemma(GEMMA2, 46, 4608, 32, 36864, groups=16, kv_channels=128, softmax_scale=144**-0.5),
    # Gemma 3 (arXiv 2503.19786, table 1), without what sees images.
    "gemma3-1b": gemma(GEMMA3, 26, 1152, 4, 6912, groups=1, kv_channels=256, window_size="511,0"),
    "gemma3-12b": gemma(GEMMA3, 48, 3840, 16, 15360, groups=8, kv_channels=256) | GEMMA3_LONG,
    "gemma3-27b": gemma(GEMMA3, 62, 5376, 32, 21504, groups=16, kv_channels=128, softmax_scale=168**-0.5) | GEMMA3_LONG,
    # GLM-4.5 (arXiv 2508.06471, table 1).
    "glm-4.5-air": shape(46, 4096, 96, 10944, 4096, groups=8, kv_channels=128, add_qkv_bias=True)
    | dict(rotary_base=1000000, rotary_percent=0.5, moe_first_layer=2, num_experts=128, moe_router_topk=8)
    | dict(moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=1408)
    | dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    "glm-4.5": shape(92, 5120, 96, 12288, 4096, groups=8, kv_channels=128, add_qkv_bias=True, qk_layernorm=True)
    | dict(rotary_base=1000000, rotary_percent=0.5, moe_first_layer=4, num_experts=160, moe_router_topk=8)
    | dict(moe_ffn_hidden_size=1536, moe_shared_expert_intermediate_size=1536, moe_router_topk_scaling_factor=2.5)
    | dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    # MiniMax-M2, as its published configuration.
    "minimax-m2": shape(62, 3072, 48, 1536, 4096, groups=8, kv_channels=128, qk_layernorm=True)
    | dict(qk_layernorm_whole=True, rotary_base=5000000, rotary_percent=0.5, num_experts=256, moe_router_topk=8)
    | dict(norm_epsilon=1e-6, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    # Qwen1.5-MoE, whose model_type is qwen2_moe.
    "qwen1.5-moe-a2.7b": shape(24, 2048, 16, 5632, 4096, add_qkv_bias=True, rotary_base=1000000)
    | dict(norm_epsilon=1e-6, num_experts=60, moe_router_topk=4, moe_ffn_hidden_size=1408, moe_router_pre_softmax=True)
    | dict(moe_shared_expert_intermediate_size=5632, moe_shared_expert_gate=True, moe_aux_loss_coeff=0.001),
    # Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905).
    "phi-3-mini": shape(32, 3072, 32, 8192, 4096, window_size="2046,0"),
    "phi-4": shape(40, 5120, 40, 17920, 4096, groups=10, rotary_base=250000),
    # Nemotron-4 (arXiv 2402.16819, table 2; arXiv 2406.11704, table 1).
    "nemotron-4-15b": shape(32, 6144, 48, 24576, 4096, groups=8) | NEMOTRON,
    "nemotron-4-340b": shape(96, 18432, 96, 73728, 4096, groups=8) | NEMOTRON,
    # Granite 3.3.
    "granite-3.3-8b": shape(40, 4096, 32, 12800, 4096, groups=8, rotary_base=10000000, embedding_multiplier=12.0)
    | TIED
    | dict(residual_multiplier=0.22, logits_scaling=16.0, softmax_scale=0.0078125),
    # OLMoE (arXiv 2409.02060), OLMo 3 before its context was extended.
    "olmoe-1b-7b": shape(16, 2048, 16, 1024, 4096, qk_layernorm=True, qk_layernorm_whole=True, num_experts=64)
    | dict(moe_router_topk=8, moe_router_pre_softmax=True, moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001),
    "olmo3-7b": shape(32, 4096, 32, 11008, 8192) | OLMO2 | OLMO3,
    "olmo3-32b": shape(64, 5120, 40, 27648, 8192, groups=8) | OLMO2 | OLMO3,
    # OLMo 2 (arXiv 2501.00656) and SmolLM3.
    "olmo2-7b": shape(32, 4096, 32, 11008, 4096) | OLMO2,
    "olmo2-32b": shape(64, 5120, 40, 27648, 4096, groups=8) | OLMO2,
    "smollm3-3b": shape(36, 2048, 16, 11008, 4096, groups=4, no_rope_freq="4", rotary_base=5000000)
    | TIED
    | dict(norm_epsilon=1e-6),
}
