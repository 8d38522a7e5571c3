"""GPT: Megatron-LM's defaults, which flags change into any other decoder.

They are learned positions, LayerNorm, an MLP of 4 * hidden_size with GELU, biases, dropout of 0.1, tied embeddings.
"""

from __future__ import annotations

from megatron_zpp.families.decoder_only import decoder
from megatron_zpp.families.gpt_huggingface import GPT2
from megatron_zpp.families.llama_huggingface import LLAMA_FAMILIES

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

GPT = decoder(name="gpt", title="GPT", defaults={}, presets=PRESETS, huggingface=(GPT2, *LLAMA_FAMILIES))
