"""The tensors of transformers' decoders, and the parameters of ours that hold their numbers."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_zpp.families.decoder_huggingface_experts import Experts
from megatron_zpp.families.huggingface import InMemory, Weight, moved, same, same_weight_and_bias
from megatron_zpp.models.decoder import DecoderConfig


def weights(
    norms: Mapping[str, str], experts: Experts | None, is_fused: bool, config: DecoderConfig
) -> Iterator[Weight]:
    """Yield the whole model. norms: names of a block's norms, ours and theirs. is_fused: queries, keys and values are
    one tensor, and so are gates and ups."""
    kinds = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    yield same("word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for our_norm, their_norm in norms.items():
            yield from (same(f"{ours}.{our_norm}.{kind}", f"{theirs}.{their_norm}.{kind}") for kind in kinds)
        attention = f"{ours}.self_attention", f"{theirs}.self_attn"
        if config.multi_latent_attention:
            yield from _latent_attention(config, *attention)
        else:
            yield from _attention(config, *attention, is_fused)
        if experts is not None and config.moe is not None and layer in config.layers_with_experts:
            yield from experts.weights(f"{ours}.mlp", f"{theirs}.{experts.module}", config.moe)
            continue
        is_gated = config.activation.is_gated
        names = {"fc1_gate": "gate", "fc1_up": "up", "fc2": "down"} if is_gated else {"fc1": "up", "fc2": "down"}
        if is_fused:
            gate_up = (f"{ours}.mlp.linear_fc1_gate.weight", f"{ours}.mlp.linear_fc1_up.weight")
            fused = (f"{theirs}.mlp.gate_up_proj.weight",)
            yield Weight(gate_up, fused, lambda *parts: (torch.cat(parts),), lambda x: x.tensor_split(2))
            names = {"fc2": "down"}
        for our_name, their_name in names.items():
            for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
                yield same(f"{ours}.mlp.linear_{our_name}.{kind}", f"{theirs}.mlp.{their_name}_proj.{kind}")
    for kind in kinds:
        yield same(f"final_norm.{kind}", f"model.norm.{kind}")
    if not config.tie_embeddings:
        yield same("output_layer.weight", "lm_head.weight")


def _attention(config: DecoderConfig, ours: str, theirs: str, is_fused: bool) -> Iterator[Weight]:
    groups, head_dim = config.num_groups, config.head_dim
    queries = config.num_attention_heads // groups  # per group
    has_bias = config.add_bias_linear or config.attention_bias

    # We concatenate the rows of one group's queries, key and value.
    def split_qkv(x: Tensor) -> tuple[Tensor, ...]:
        parts = x.unflatten(0, (groups, queries + 2, head_dim)).split([queries, 1, 1], dim=1)
        return tuple(part.flatten(0, 2) for part in parts)

    def join_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (torch.cat([x.unflatten(0, (groups, -1, head_dim)) for x in (q, k, v)], dim=1).flatten(0, 2),)

    def join_fused(x: Tensor) -> tuple[Tensor]:
        return join_qkv(*x.split([config.num_attention_heads * head_dim, groups * head_dim, groups * head_dim]))

    for kind in ("weight", "bias") if config.add_qkv_bias or has_bias else ("weight",):
        qkv = (f"{ours}.linear_qkv.{kind}",)
        if is_fused:
            yield Weight(qkv, (f"{theirs}.qkv_proj.{kind}",), lambda x: (torch.cat(split_qkv(x)),), join_fused)
        else:
            yield Weight(qkv, tuple(f"{theirs}.{name}_proj.{kind}" for name in "qkv"), split_qkv, join_qkv)
    for kind in ("weight", "bias") if has_bias else ("weight",):
        yield same(f"{ours}.linear_proj.{kind}", f"{theirs}.o_proj.{kind}")
    if config.has_sinks:
        yield same(f"{ours}.sinks.bias", f"{theirs}.sinks")
    if config.qk_layernorm:
        yield same(f"{ours}.q_layernorm.weight", f"{theirs}.q_norm.weight")
        yield same(f"{ours}.k_layernorm.weight", f"{theirs}.k_norm.weight")


def neox_weights(config: DecoderConfig) -> Iterator[Weight]:
    """Yield the whole model of GPT-NeoX, whose queries, keys and values are one tensor that is laid out as ours."""
    names = {
        **{"input_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"},
        **{"self_attention.linear_qkv": "attention.query_key_value", "self_attention.linear_proj": "attention.dense"},
        **{"mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h"},
    }
    yield same("word_embeddings.weight", "gpt_neox.embed_in.weight")
    for layer in range(config.num_layers):
        for ours, theirs in names.items():
            yield from same_weight_and_bias(f"layers.{layer}.{ours}", f"gpt_neox.layers.{layer}.{theirs}")
    yield from same_weight_and_bias("final_norm", "gpt_neox.final_layer_norm")
    if not config.tie_embeddings:
        yield same("output_layer.weight", "embed_out.weight")


def neox_in_memory(config: DecoderConfig) -> Iterator[InMemory]:
    if not config.tie_embeddings:  # transformers 5 renames it; earlier versions keep the name of the files
        yield InMemory("lm_head.weight", ("embed_out.weight",), lambda x: x)


def rotated_in_pairs(heads: int, rotated: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return functions that reorder latent attention's rows [heads * width, ...] from ours to theirs, and back.

    Their rotated channels 2 i and 2 i + 1 form a pair; ours i and i + rotated / 2. They are the last rows of a head.
    """

    def reorder(x: Tensor, shape: tuple[int, int]) -> Tensor:
        parts = x.unflatten(0, (heads, -1)).unbind(0)
        moved = (head[-rotated:].unflatten(0, shape).transpose(0, 1).flatten(0, 1) for head in parts)
        return torch.cat([torch.cat([head[:-rotated], rows]) for head, rows in zip(parts, moved, strict=True)])

    return lambda x: reorder(x, (2, -1)), lambda x: reorder(x, (-1, 2))


def _latent_attention(config: DecoderConfig, ours: str, theirs: str) -> Iterator[Weight]:
    def reordered(ours: str, theirs: str, heads: int) -> Weight:
        return moved(ours, theirs, *rotated_in_pairs(heads, config.qk_pos_emb_head_dim))

    heads = config.num_attention_heads
    if config.q_lora_rank is None:
        yield reordered(f"{ours}.linear_q_proj.weight", f"{theirs}.q_proj.weight", heads)
    else:
        yield same(f"{ours}.linear_q_down_proj.weight", f"{theirs}.q_a_proj.weight")
        yield same(f"{ours}.q_layernorm.weight", f"{theirs}.q_a_layernorm.weight")
        yield reordered(f"{ours}.linear_q_up_proj.weight", f"{theirs}.q_b_proj.weight", heads)
    yield reordered(f"{ours}.linear_kv_down_proj.weight", f"{theirs}.kv_a_proj_with_mqa.weight", 1)
    yield same(f"{ours}.kv_layernorm.weight", f"{theirs}.kv_a_layernorm.weight")
    yield same(f"{ours}.linear_kv_up_proj.weight", f"{theirs}.kv_b_proj.weight")
    yield same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight")


def in_memory(experts: Experts | None, config: DecoderConfig) -> Iterator[InMemory]:
    if experts is not None and config.moe is not None:
        for layer in config.layers_with_experts:
            yield from experts.in_memory(f"model.layers.{layer}", config.moe)
