"""Llama and its relatives: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.

Defaults: an MLP of 8/3 * hidden_size, rounded down to a multiple of 64; no dropout; an output layer of its own. The
small models of Llama 3.2 tie theirs to the embeddings; ``--use-rope-scaling`` is Llama 3.1's.
"""

from megatron_zpp.families.decoder_only import decoder
from megatron_zpp.families.llama_huggingface import LLAMA_FAMILIES
from megatron_zpp.families.llama_presets import PRESETS

DEFAULTS: dict[str, object] = dict(
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    position_embedding_type="rope",
    attention_dropout=0.0,
    hidden_dropout=0.0,
    tie_embeddings=False,
)

# No flag gives a Llama the biases of these; a GPT has them.
_WITHOUT_BIASES = tuple(mapping for mapping in LLAMA_FAMILIES if mapping.model_type not in ("gpt_oss", "gpt_neox"))
LLAMA = decoder(name="llama", title="Llama", defaults=DEFAULTS, presets=PRESETS, huggingface=_WITHOUT_BIASES)
