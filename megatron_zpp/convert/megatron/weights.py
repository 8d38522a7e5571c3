"""The tensors of Megatron-LM's GPTModel, and the parameters of our decoder that they are.

Names are those of megatron-core's local layers, numbered over the whole model; ``names`` brings all others to them.
Queries, keys and values lie alike in both. Weights are only moved: there and back gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.moe import MoEConfig

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # a row is a token


@dataclass(frozen=True)
class Weight:
    """A tensor of Megatron's model, and those of our parameters that hold its numbers."""

    theirs: str
    ours: tuple[str, ...]
    divided: int | None = None  # the dimension that tensor-parallel ranks divide; None: each has the whole
    stacked: bool = False  # a tensor-parallel rank has its rows of the first half, and below them those of the second
    split: Callable[[Tensor], tuple[Tensor, ...]] = lambda x: (x,)  # theirs -> ours
    join: Callable[..., Tensor] = lambda x: x  # ours -> theirs


def weights(config: DecoderConfig) -> Iterator[Weight]:
    """Of the whole model, in the order of its layers; each parameter of ours comes once."""
    yield Weight("embedding.word_embeddings.weight", ("word_embeddings.weight",), divided=0)
    if config.position_embedding_type == "learned_absolute":
        yield Weight("embedding.position_embeddings.weight", ("position_embeddings.weight",))
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"decoder.layers.{layer}"
        yield from _norm(config, f"{ours}.input_norm", f"{theirs}.input_layernorm")
        attention = ".self_attention"
        yield from _linear(
            f"{ours}{attention}.linear_qkv",
            f"{theirs}{attention}.linear_qkv",
            0,
            bias=config.add_bias_linear or config.add_qkv_bias,
        )
        yield from _linear(
            f"{ours}{attention}.linear_proj", f"{theirs}{attention}.linear_proj", 1, bias=config.add_bias_linear
        )
        if config.qk_layernorm:
            for name in ("q_layernorm", "k_layernorm"):
                yield from _norm(config, f"{ours}{attention}.{name}", f"{theirs}{attention}.{name}")
        yield from _norm(config, f"{ours}.pre_mlp_norm", f"{theirs}.pre_mlp_layernorm")
        if config.moe is not None and layer in config.layers_with_experts:
            yield from _experts(config, config.moe, f"{ours}.mlp", f"{theirs}.mlp")
        else:
            yield from _mlp(config, f"{ours}.mlp", f"{theirs}.mlp")
    yield from _norm(config, "final_norm", "decoder.final_layernorm")
    if not config.tie_embeddings:
        yield Weight("output_layer.weight", ("output_layer.weight",), divided=0)


def _linear(ours: str, theirs: str, divided: int, bias: bool) -> Iterator[Weight]:
    yield Weight(f"{theirs}.weight", (f"{ours}.weight",), divided)
    if bias:  # of a layer whose inputs are divided each rank has the whole
        yield Weight(f"{theirs}.bias", (f"{ours}.bias",), 0 if divided == 0 else None)


def _norm(config: DecoderConfig, ours: str, theirs: str) -> Iterator[Weight]:
    for kind in ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",):
        yield Weight(f"{theirs}.{kind}", (f"{ours}.{kind}",))


def _mlp(config: DecoderConfig, ours: str, theirs: str) -> Iterator[Weight]:
    if config.swiglu:  # gates and, below them, ups
        for kind in ("weight", "bias") if config.add_bias_linear else ("weight",):
            yield Weight(
                f"{theirs}.linear_fc1.{kind}",
                (f"{ours}.linear_fc1_gate.{kind}", f"{ours}.linear_fc1_up.{kind}"),
                divided=0,
                stacked=True,
                split=lambda x: x.tensor_split(2),
                join=lambda gate, up: torch.cat([gate, up]),
            )
    else:
        yield from _linear(f"{ours}.linear_fc1", f"{theirs}.linear_fc1", 0, bias=config.add_bias_linear)
    yield from _linear(f"{ours}.linear_fc2", f"{theirs}.linear_fc2", 1, bias=config.add_bias_linear)


def _experts(config: DecoderConfig, moe: MoEConfig, ours: str, theirs: str) -> Iterator[Weight]:
    """Theirs are stacked, [E, out, in]; ours are one below the other, [E * out, in]. Biases without [in]."""

    def below(x: Tensor) -> tuple[Tensor, ...]:
        return (x.flatten(0, 1),)

    def apart(x: Tensor) -> Tensor:
        return x.unflatten(0, (moe.num_experts, -1))

    def gates_and_ups(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(half.flatten(0, 1) for half in x.tensor_split(2, dim=1))

    def both(gates: Tensor, ups: Tensor) -> Tensor:
        return torch.cat([apart(gates), apart(ups)], dim=1)

    yield Weight(f"{theirs}.router.weight", (f"{ours}.router.weight",))
    inner, outer = f"{ours}.experts", f"{theirs}.experts"
    for kind in ("weight", "bias") if config.add_bias_linear else ("weight",):
        fc1, fc2 = f"{outer}.linear_fc1.{kind}", f"{outer}.linear_fc2.{kind}"
        if config.swiglu:
            names = (f"{inner}.linear_fc1_gate.{kind}", f"{inner}.linear_fc1_up.{kind}")
            yield Weight(fc1, names, split=gates_and_ups, join=both)
        else:
            yield Weight(fc1, (f"{inner}.linear_fc1.{kind}",), split=below, join=apart)
        yield Weight(fc2, (f"{inner}.linear_fc2.{kind}",), split=below, join=apart)
    if moe.shared_expert_size is not None:
        yield from _mlp(config, f"{ours}.shared_expert", f"{theirs}.shared_experts")
