"""The weights of our models in transformers': names and layouts. GPT is its GPT-2, and Llama is its Llama.

Weights are only moved, never rounded: there and back gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.models.gpt import GPT, GPTConfig
from megatron_zpp.models.llama import Llama, LlamaConfig

WITH_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")  # of ours; a row is a token


@dataclass(frozen=True)
class Weight:
    """A parameter of ours, and the tensors that hold its numbers in transformers' model."""

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]  # ours -> theirs; views where it can be
    join: Callable[..., Tensor]  # theirs -> ours


def weights(config: GPTConfig | LlamaConfig) -> list[Weight]:
    """Every parameter of the model, each of either side's tensors once."""
    return list(_gpt_weights(config) if isinstance(config, GPTConfig) else _llama_weights(config))


def build_empty(config: GPTConfig | LlamaConfig) -> GPT | Llama:
    """Our model on the meta device."""
    with torch.device("meta"):
        return GPT(config) if isinstance(config, GPTConfig) else Llama(config)


def their_shapes(config: GPTConfig | LlamaConfig) -> dict[str, torch.Size]:
    """{name: shape} of every tensor of transformers' model."""
    ours = dict(build_empty(config).named_parameters())
    return {
        name: tensor.shape
        for weight in weights(config)
        for name, tensor in zip(weight.theirs, weight.split(ours[weight.ours]), strict=True)
    }


def _gpt_weights(config: GPTConfig) -> Iterator[Weight]:
    heads, head_dim = config.num_attention_heads, config.head_dim

    # GPT-2 has the rows of all queries, then of all keys, then of all values; we have q, k, v head by head.
    def by_kind(x: Tensor) -> Tensor:
        return x.unflatten(0, (heads, 3, head_dim)).transpose(0, 1).flatten(0, 2)

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(0, (3, heads, head_dim)).transpose(0, 1).flatten(0, 2)

    yield _same("word_embeddings.weight", "transformer.wte.weight")
    yield _same("position_embeddings.weight", "transformer.wpe.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        yield from _same_norm(f"{ours}.input_norm", f"{theirs}.ln_1")
        qkv, c_attn = f"{ours}.self_attention.linear_qkv", f"{theirs}.attn.c_attn"
        yield Weight(f"{qkv}.weight", (f"{c_attn}.weight",), lambda x: (by_kind(x).t(),), lambda x: by_head(x.t()))
        yield Weight(f"{qkv}.bias", (f"{c_attn}.bias",), lambda x: (by_kind(x),), by_head)
        yield from _transposed(f"{ours}.self_attention.linear_proj", f"{theirs}.attn.c_proj")
        yield from _same_norm(f"{ours}.pre_mlp_norm", f"{theirs}.ln_2")
        yield from _transposed(f"{ours}.mlp.linear_fc1", f"{theirs}.mlp.c_fc")
        yield from _transposed(f"{ours}.mlp.linear_fc2", f"{theirs}.mlp.c_proj")
    yield from _same_norm("final_norm", "transformer.ln_f")
    if not config.tie_embeddings:
        yield _same("output_layer.weight", "lm_head.weight")


def _llama_weights(config: LlamaConfig) -> Iterator[Weight]:
    groups, head_dim = config.num_groups, config.head_dim
    queries = config.num_attention_heads // groups  # per group

    # We have the rows of one group's queries, key and value after the other.
    def split_qkv(x: Tensor) -> tuple[Tensor, ...]:
        parts = x.unflatten(0, (groups, queries + 2, head_dim)).split([queries, 1, 1], dim=1)
        return tuple(part.flatten(0, 2) for part in parts)

    def join_qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([x.unflatten(0, (groups, -1, head_dim)) for x in (q, k, v)], dim=1).flatten(0, 2)

    yield _same("word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield _same(f"{ours}.input_norm.weight", f"{theirs}.input_layernorm.weight")
        yield Weight(
            f"{ours}.self_attention.linear_qkv.weight",
            tuple(f"{attention}.{name}_proj.weight" for name in "qkv"),
            split_qkv,
            join_qkv,
        )
        yield _same(f"{ours}.self_attention.linear_proj.weight", f"{attention}.o_proj.weight")
        yield _same(f"{ours}.pre_mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        yield _same(f"{ours}.mlp.linear_fc1_gate.weight", f"{mlp}.gate_proj.weight")
        yield _same(f"{ours}.mlp.linear_fc1_up.weight", f"{mlp}.up_proj.weight")
        yield _same(f"{ours}.mlp.linear_fc2.weight", f"{mlp}.down_proj.weight")
    yield _same("final_norm.weight", "model.norm.weight")
    if not config.tie_embeddings:
        yield _same("output_layer.weight", "lm_head.weight")


def _same(ours: str, theirs: str) -> Weight:
    return Weight(ours, (theirs,), lambda x: (x,), lambda x: x)


def _same_norm(ours: str, theirs: str) -> Iterator[Weight]:
    for kind in ("weight", "bias"):
        yield _same(f"{ours}.{kind}", f"{theirs}.{kind}")


def _transposed(ours: str, theirs: str) -> Iterator[Weight]:
    """GPT-2's Conv1D, which is a Linear whose weight is [in, out]."""
    yield Weight(f"{ours}.weight", (f"{theirs}.weight",), lambda x: (x.t(),), lambda x: x.t())
    yield _same(f"{ours}.bias", f"{theirs}.bias")
