"""Map the tensors of Megatron-LM's GPTModel to the parameters of our decoder.

Names follow megatron-core's local layers, numbered over the whole model; ``canonical`` renames all others.
Queries, keys and values have the same layout in both. Weights are only moved: there and back gives the same bits.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.families.decoder_huggingface_weights import rotated_in_pairs
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.moe import MoEConfig

EXPERT_BIAS = "expert_bias"  # a buffer in fp32, without moments
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # a row is a token


@dataclass(frozen=True)
class Weight:
    """A tensor of Megatron's model, and our parameters that hold its numbers."""

    theirs: str
    ours: tuple[str, ...]
    sharded_dim: int | None = None  # over tensor-parallel ranks; None: each rank has the whole
    is_stacked: bool = False  # a rank has its rows of the first half above its rows of the second
    split: Callable[[Tensor], tuple[Tensor, ...]] = lambda x: (x,)  # theirs -> ours
    join: Callable[..., Tensor] = lambda x: x  # ours -> theirs


def weights(config: DecoderConfig) -> Iterator[Weight]:
    """Yield the whole model in the order of its layers; each parameter of ours once."""
    yield Weight("embedding.word_embeddings.weight", ("word_embeddings.weight",), sharded_dim=0)
    if config.position_embedding_type == "learned_absolute":
        yield Weight("embedding.position_embeddings.weight", ("position_embeddings.weight",))
    bias = config.add_bias_linear
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"decoder.layers.{layer}"
        yield from _norm(config, f"{ours}.input_norm", f"{theirs}.input_layernorm")
        attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attention"
        if config.multi_latent_attention:
            yield from _latent_attention(config, attention, their_attention)
        else:
            has_bias = bias or config.add_qkv_bias
            yield from _linear(f"{attention}.linear_qkv", f"{their_attention}.linear_qkv", 0, has_bias)
        yield from _linear(f"{attention}.linear_proj", f"{their_attention}.linear_proj", 1, bias)
        if config.has_sinks:
            yield Weight(f"{their_attention}.core_attention.softmax_offset", (f"{attention}.sinks.bias",), 0)
        for name in _norms_of_attention(config) if config.qk_layernorm else ():
            yield from _norm(config, f"{attention}.{name}", f"{their_attention}.{name}")
        yield from _norm(config, f"{ours}.pre_mlp_norm", f"{theirs}.pre_mlp_layernorm")
        if config.moe is not None and layer in config.layers_with_experts:
            yield from _experts(config, config.moe, f"{ours}.mlp", f"{theirs}.mlp")
        else:
            yield from _mlp(config, f"{ours}.mlp", f"{theirs}.mlp")
    yield from _norm(config, "final_norm", "decoder.final_layernorm")
    if not config.tie_embeddings:
        yield Weight("output_layer.weight", ("output_layer.weight",), sharded_dim=0)


def _linear(ours: str, theirs: str, sharded_dim: int, bias: bool) -> Iterator[Weight]:
    yield Weight(f"{theirs}.weight", (f"{ours}.weight",), sharded_dim)
    if bias:  # each rank has all of it if the layer's inputs are sharded
        yield Weight(f"{theirs}.bias", (f"{ours}.bias",), 0 if sharded_dim == 0 else None)


def _latent_attention(config: DecoderConfig, ours: str, theirs: str) -> Iterator[Weight]:
    """Yield what makes queries, keys and values; shards of ranks are not read, which differ between implementations."""

    def projection(name: str, heads: int) -> Weight:
        to_pairs, to_halves = rotated_in_pairs(heads, config.qk_pos_emb_head_dim)
        name = f"{name}.weight"
        return Weight(f"{theirs}.{name}", (f"{ours}.{name}",), split=lambda x: (to_halves(x),), join=to_pairs)

    heads = config.num_attention_heads
    if config.q_lora_rank is None:
        yield projection("linear_q_proj", heads)
    else:
        yield from _linear(f"{ours}.linear_q_down_proj", f"{theirs}.linear_q_down_proj", 0, False)
        yield projection("linear_q_up_proj", heads)
    yield projection("linear_kv_down_proj", 1)
    yield from _linear(f"{ours}.linear_kv_up_proj", f"{theirs}.linear_kv_up_proj", 0, False)


def _norms_of_attention(config: DecoderConfig) -> tuple[str, ...]:
    if not config.multi_latent_attention:
        return "q_layernorm", "k_layernorm"
    return ("kv_layernorm",) if config.q_lora_rank is None else ("q_layernorm", "kv_layernorm")


def _norm(config: DecoderConfig, ours: str, theirs: str) -> Iterator[Weight]:
    for kind in ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",):
        yield Weight(f"{theirs}.{kind}", (f"{ours}.{kind}",))


def _mlp(config: DecoderConfig, ours: str, theirs: str) -> Iterator[Weight]:
    if config.activation.is_gated:  # gates above ups
        for kind in ("weight", "bias") if config.add_bias_linear else ("weight",):
            yield Weight(
                f"{theirs}.linear_fc1.{kind}",
                (f"{ours}.linear_fc1_gate.{kind}", f"{ours}.linear_fc1_up.{kind}"),
                sharded_dim=0,
                is_stacked=True,
                split=lambda x: x.tensor_split(2),
                join=lambda gate, up: torch.cat([gate, up]),
            )
    else:
        yield from _linear(f"{ours}.linear_fc1", f"{theirs}.linear_fc1", 0, config.add_bias_linear)
    yield from _linear(f"{ours}.linear_fc2", f"{theirs}.linear_fc2", 1, config.add_bias_linear)


def _experts(config: DecoderConfig, moe: MoEConfig, ours: str, theirs: str) -> Iterator[Weight]:
    """Yield experts: theirs are [E, out, in], ours [E * out, in]. Biases have no [in]."""

    def flat(x: Tensor) -> tuple[Tensor, ...]:
        return (x.flatten(0, 1),)

    def stacked(x: Tensor) -> Tensor:
        return x.unflatten(0, (moe.num_experts, -1))

    def gates_and_ups(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(half.flatten(0, 1) for half in x.tensor_split(2, dim=1))

    def both(gates: Tensor, ups: Tensor) -> Tensor:
        return torch.cat([stacked(gates), stacked(ups)], dim=1)

    for kind in ("weight", "bias") if moe.router_bias else ("weight",):
        yield Weight(f"{theirs}.router.{kind}", (f"{ours}.router.{kind}",))
    if moe.bias_update_rate is not None:
        yield Weight(f"{theirs}.router.{EXPERT_BIAS}", (f"{ours}.{EXPERT_BIAS}",))
    inner, outer = f"{ours}.experts", f"{theirs}.experts"
    for kind in ("weight", "bias") if config.add_bias_linear else ("weight",):
        fc1, fc2 = f"{outer}.linear_fc1.{kind}", f"{outer}.linear_fc2.{kind}"
        if config.activation.is_gated:
            names = (f"{inner}.linear_fc1_gate.{kind}", f"{inner}.linear_fc1_up.{kind}")
            yield Weight(fc1, names, split=gates_and_ups, join=both)
        else:
            yield Weight(fc1, (f"{inner}.linear_fc1.{kind}",), split=flat, join=stacked)
        yield Weight(fc2, (f"{inner}.linear_fc2.{kind}",), split=flat, join=stacked)
    if moe.shared_expert_size is not None:
        yield from _mlp(config, f"{ours}.shared_expert", f"{theirs}.shared_experts")
    if moe.shared_expert_gate:
        yield Weight(f"{theirs}.shared_experts.gate_weight", (f"{ours}.shared_gate.weight",))


# Names in checkpoints of Megatron-LM and Megatron-DeepSpeed of all ages, replaced in this order. The first belong to
# models before megatron-core, the last to Transformer Engine's fused layers.
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
    (r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r".\1_layernorm.\2"),
    (r"\.mlp\.experts\.experts\.", ".mlp.experts."),
)
# The last stage's copy of tied embeddings, and state of Transformer Engine and rotary embeddings.
_NO_WEIGHTS = re.compile(r"(^|\.)(word_embeddings_for_head|_extra_state|rotary_pos_emb|rotary_emb|inv_freq)(\.|/|$)")
_LAYER = re.compile(r"^decoder\.layers\.([0-9]+)\.")


def canonical(name: str) -> str | None:
    """Return a tensor's name in ``weights``; None if it is no weight."""
    if _NO_WEIGHTS.search(name):
        return None
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def layer_of(name: str) -> int | None:
    """Return the layer number in a canonical name, if any."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def rename_layer(name: str, layer: int) -> str:
    """Return the canonical name of the same tensor in another layer."""
    return _LAYER.sub(f"decoder.layers.{layer}.", name)


def canonical_pipeline_names(names: Iterable[str]) -> dict[str, str]:
    """Return canonical names for the tensors of DeepSpeed's PipelineModule, which numbers all of its modules.

    It has more modules than layers, and they differ between versions; the tensors tell what a module is.
    """
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
