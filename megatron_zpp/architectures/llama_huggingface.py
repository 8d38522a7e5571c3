"""Llama as transformers' Llama."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.architectures.decoder_only import flags_of
from megatron_zpp.architectures.huggingface import HuggingFaceMapping, Weight, require_sizes, require_values, same
from megatron_zpp.models.llama import LlamaConfig

# What Llama 3.1's scaling of rotary frequencies has beside its factor: constants in ``rotary_table``.
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def to_config(config: LlamaConfig, positions: int) -> dict[str, Any]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:
        raise ValueError(
            f"transformers' Llama needs a hidden_size that its number of heads divides; this model's is {hidden}, with "
            f"{heads} heads of {config.head_dim} channels (--kv-channels), so it cannot be exported"
        )
    scaling = None
    if config.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling_factor} | LLAMA3_SCALING
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_epsilon,
        # Two keys that every version reads; version 5 would write them as one, rope_parameters.
        "rope_theta": float(config.rotary_base),
        "rope_scaling": scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.tie_embeddings,
    }


def from_config(hf: Mapping[str, Any]) -> tuple[LlamaConfig, int]:
    require_sizes(hf, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    require_sizes(hf, "max_position_embeddings")
    # Version 5 keeps all that is about rotary embeddings in rope_parameters; before it there were two keys.
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_theta", hf.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    require_values(
        dict(hf)
        | {f"rope_parameters.{key}": value for key, value in rope.items()}
        | {"rope_parameters.rope_type": kind},
        {
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "rope_parameters.rope_type": ("default", "llama3"),
            "rope_parameters.partial_rotary_factor": (None, 1.0),
            **{f"rope_parameters.{key}": (value,) for key, value in LLAMA3_SCALING.items() if kind == "llama3"},
        },
    )
    if rope["rope_theta"] != int(rope["rope_theta"]):
        raise ValueError(f"rope_theta is {rope['rope_theta']}; only whole numbers can be imported (--rotary-base)")
    config = LlamaConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        vocab_size=hf["vocab_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_query_groups=hf["num_key_value_heads"] or hf["num_attention_heads"],
        kv_channels=hf["head_dim"] or hf["hidden_size"] // hf["num_attention_heads"],
        norm_epsilon=hf["rms_norm_eps"],
        attention_dropout=hf["attention_dropout"],
        rotary_base=int(rope["rope_theta"]),
        rope_scaling_factor=float(rope["factor"]) if kind == "llama3" else None,
        init_method_std=hf["initializer_range"],
        tie_embeddings=hf["tie_word_embeddings"],
    )
    return config, hf["max_position_embeddings"]


def weights(config: LlamaConfig) -> Iterator[Weight]:
    groups, head_dim = config.num_groups, config.head_dim
    queries = config.num_attention_heads // groups  # per group

    # We have the rows of one group's queries, key and value after the other.
    def split_qkv(x: Tensor) -> tuple[Tensor, ...]:
        parts = x.unflatten(0, (groups, queries + 2, head_dim)).split([queries, 1, 1], dim=1)
        return tuple(part.flatten(0, 2) for part in parts)

    def join_qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([x.unflatten(0, (groups, -1, head_dim)) for x in (q, k, v)], dim=1).flatten(0, 2)

    yield same("word_embeddings.weight", "model.embed_tokens.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield same(f"{ours}.input_norm.weight", f"{theirs}.input_layernorm.weight")
        yield Weight(
            f"{ours}.self_attention.linear_qkv.weight",
            tuple(f"{attention}.{name}_proj.weight" for name in "qkv"),
            split_qkv,
            join_qkv,
        )
        yield same(f"{ours}.self_attention.linear_proj.weight", f"{attention}.o_proj.weight")
        yield same(f"{ours}.pre_mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        yield same(f"{ours}.mlp.linear_fc1_gate.weight", f"{mlp}.gate_proj.weight")
        yield same(f"{ours}.mlp.linear_fc1_up.weight", f"{mlp}.up_proj.weight")
        yield same(f"{ours}.mlp.linear_fc2.weight", f"{mlp}.down_proj.weight")
    yield same("final_norm.weight", "model.norm.weight")
    if not config.tie_embeddings:
        yield same("output_layer.weight", "lm_head.weight")


def flags(config: LlamaConfig, positions: int) -> list[str]:
    words = [*flags_of(config, positions, tied=False), "--rotary-base", str(config.rotary_base)]
    if config.rope_scaling_factor is not None:
        words += ["--use-rope-scaling", "--rope-scaling-factor", str(config.rope_scaling_factor)]
    return words


HF_LLAMA = HuggingFaceMapping("llama", to_config, from_config, weights, flags)
