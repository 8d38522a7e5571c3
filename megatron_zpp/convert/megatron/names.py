"""Names of tensors in checkpoints of Megatron-LM and Megatron-DeepSpeed, of all ages, as ``weights`` has them."""

from __future__ import annotations

import re
from collections.abc import Iterable

# In this order. The first are of models before megatron-core, the next of Transformer Engine's fused layers.
_RENAMED = (
    (r"^(module\.)*(language_model\.)?", ""),
    (r"^(encoder|transformer)\.", "decoder."),
    (r"^(word_embeddings|position_embeddings)\.", r"embedding.\1."),
    (r"^lm_head\.", "output_layer."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"\.attention\.", ".self_attention."),
    (r"\.self_attention\.(query_key_value)\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.(post_attention_layernorm|post_attention_norm)\.", ".pre_mlp_layernorm."),
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.mlp\.experts\.experts\.", ".mlp.experts."),
)
# A second copy of tied embeddings, on the last stage; what Transformer Engine and rotary embeddings keep.
_NO_WEIGHTS = re.compile(r"(^|\.)(word_embeddings_for_head|_extra_state|rotary_pos_emb|rotary_emb|inv_freq)(\.|/|$)")
_LAYER = re.compile(r"^decoder\.layers\.([0-9]+)\.")


def canonical(name: str) -> str | None:
    """A tensor's name in ``weights``; None for what is no weight."""
    if _NO_WEIGHTS.search(name):
        return None
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def layer_of(name: str) -> int | None:
    """The layer that a canonical name is of; None for what is in none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def in_layer(name: str, layer: int) -> str:
    """The same tensor of another layer."""
    return _LAYER.sub(f"decoder.layers.{layer}.", name)


def of_pipeline(names: Iterable[str]) -> dict[str, str]:
    """Canonical names of the tensors of DeepSpeed's PipelineModule, which numbers all of its modules.

    There are more modules than layers, others in each version; what a module is its tensors say.
    """
    names = list(names)
    numbered = {name: re.fullmatch(r"(?:tied_modules\.\w+|([0-9]+))\.(.+)", name) for name in names}
    layers = [int(found[1]) for found in numbered.values() if found and found[1] and "attention." in found[2]]
    result = {}
    for name, found in numbered.items():
        if found is None:
            new = canonical(name)
        elif found[2] in ("weight", "bias"):
            new = f"decoder.final_layernorm.{found[2]}"
        elif found[1] and "embeddings." not in found[2] and "lm_head." not in found[2]:
            new = canonical(f"decoder.layers.{int(found[1]) - min(layers, default=0)}.{found[2]}")
        else:
            new = canonical(found[2])
        if new is not None:
            result[name] = new
    return result
