"""Published model shapes by name: ``--preset gpt-350m``. The part before the dash is the architecture.

Each value is a field of ``ModelSettings``, but ``seq_length``, which is a field of ``TrainingSettings``; flags that
are given override both. The vocabulary is the tokenizer's.
"""

from __future__ import annotations

PRESETS: dict[str, dict[str, object]] = {
    # GPT-3 (Brown et al., arXiv 2005.14165, table 2.1). The table's 24 heads of 128 do not make the 1.3B model's width
    # of 2048, and its 5140 for 13B is no multiple of 40 heads of 128: Megatron's users train 16 heads and 5120.
    "gpt-125m": dict(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=2048),
    "gpt-350m": dict(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=2048),
    "gpt-1.3b": dict(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048),
    "gpt-13b": dict(num_layers=40, hidden_size=5120, num_attention_heads=40, seq_length=2048),
    # DeepSpeed's ZeRO++ tutorial.
    "gpt-18b": dict(num_layers=40, hidden_size=6144, num_attention_heads=32, seq_length=512),
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
