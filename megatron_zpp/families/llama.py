"""Llama and its relatives: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.

Defaults: an MLP of 8/3 * hidden_size, rounded down to a multiple of 64; no dropout; an output layer of its own. The
small models of Llama 3.2 tie theirs to the embeddings; ``--use-rope-scaling`` is Llama 3.1's.
"""

from __future__ import annotations

from megatron_zpp.families.decoder_only import decoder
from megatron_zpp.families.llama_huggingface import LLAMA_FAMILIES

DEFAULTS: dict[str, object] = dict(
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    position_embedding_type="rope",
    attention_dropout=0.0,
    hidden_dropout=0.0,
    tie_embeddings=False,
)

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
    # Mistral 7B (Jiang et al., arXiv 2310.06825, table 1), v0.1: with a sliding window.
    "mistral-7b": dict(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=14336,
        window_size="4095,0",  # 4,096 tokens with its own
        norm_epsilon=1e-5,
        seq_length=8192,
    ),
    # Qwen3 (Yang et al., arXiv 2505.09388, table 1); widths are those of the published configurations.
    "qwen3-0.6b": dict(
        num_layers=28,
        hidden_size=1024,
        num_attention_heads=16,
        kv_channels=128,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=3072,
        qk_layernorm=True,
        rotary_base=1000000,
        norm_epsilon=1e-6,
        tie_embeddings_and_output_weights=True,
        seq_length=4096,
    ),
    "qwen3-8b": dict(
        num_layers=36,
        hidden_size=4096,
        num_attention_heads=32,
        kv_channels=128,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=12288,
        qk_layernorm=True,
        rotary_base=1000000,
        norm_epsilon=1e-6,
        seq_length=4096,
    ),
    "qwen3-30b-a3b": dict(
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        kv_channels=128,
        group_query_attention=True,
        num_query_groups=4,
        ffn_hidden_size=6144,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        moe_aux_loss_coeff=0.001,
        qk_layernorm=True,
        rotary_base=1000000,
        norm_epsilon=1e-6,
        seq_length=4096,
    ),
    # Mixtral of Experts (Jiang et al., arXiv 2401.04088, table 1).
    "mixtral-8x7b": dict(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        group_query_attention=True,
        num_query_groups=8,
        ffn_hidden_size=14336,
        num_experts=8,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.02,
        rotary_base=1000000,
        norm_epsilon=1e-5,
        seq_length=4096,
    ),
}

LLAMA = decoder(name="llama", title="Llama", defaults=DEFAULTS, presets=PRESETS, huggingface=LLAMA_FAMILIES)
