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


def _shape(
    layers: int, hidden: int, heads: int, ffn: int, seq_length: int, groups: int | None = None, **others: object
) -> dict[str, object]:
    """Return the settings of a published shape; groups: key/value heads, None one per query head."""
    grouped = {} if groups is None else dict(group_query_attention=True, num_query_groups=groups)
    shape = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn_hidden_size=ffn)
    return {**shape, "seq_length": seq_length, "norm_epsilon": 1e-5, **grouped, **others}


QWEN3: dict[str, object] = dict(kv_channels=128, qk_layernorm=True, rotary_base=1000000, norm_epsilon=1e-6)

PRESETS: dict[str, dict[str, object]] = {
    # LoCo (arXiv 2407.04480) trains a "LLAMA2-0.8B" whose exact shape we do not know. This one, of 24 layers in Llama
    # 2's proportions, has 0.78 billion parameters with a vocabulary of 32,000.
    "llama-0.8b": _shape(24, 1536, 12, 4096, 4096),
    # Llama 2 (Touvron et al., arXiv 2307.09288), 7B and 13B.
    "llama-7b": _shape(32, 4096, 32, 11008, 4096),
    "llama-13b": _shape(40, 5120, 40, 13824, 4096),
    # Llama 3 8B (Grattafiori et al., arXiv 2407.21783, table 3).
    "llama-8b": _shape(32, 4096, 32, 14336, 8192, groups=8, rotary_base=500000),
    # Mistral 7B (Jiang et al., arXiv 2310.06825, table 1), v0.1: a sliding window of 4,096 tokens with its own.
    "mistral-7b": _shape(32, 4096, 32, 14336, 8192, groups=8, window_size="4095,0"),
    # Qwen3 (Yang et al., arXiv 2505.09388, table 1); widths are those of the published configurations.
    "qwen3-0.6b": _shape(28, 1024, 16, 3072, 4096, groups=8) | QWEN3 | dict(tie_embeddings_and_output_weights=True),
    "qwen3-8b": _shape(36, 4096, 32, 12288, 4096, groups=8) | QWEN3,
    "qwen3-30b-a3b": _shape(48, 2048, 32, 6144, 4096, groups=4)
    | QWEN3
    | dict(num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768, moe_aux_loss_coeff=0.001),
    # Mixtral of Experts (Jiang et al., arXiv 2401.04088, table 1).
    "mixtral-8x7b": _shape(32, 4096, 32, 14336, 4096, groups=8, rotary_base=1000000)
    | dict(num_experts=8, moe_router_topk=2, moe_aux_loss_coeff=0.02),
}

# No flag gives a Llama the biases of gpt-oss; a GPT has them.
_WITHOUT_BIASES = tuple(mapping for mapping in LLAMA_FAMILIES if mapping.model_type != "gpt_oss")
LLAMA = decoder(name="llama", title="Llama", defaults=DEFAULTS, presets=PRESETS, huggingface=_WITHOUT_BIASES)
