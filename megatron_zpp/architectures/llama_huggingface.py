"""Llama and its relatives as models of transformers; ``FAMILIES`` says in what they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.architectures.huggingface import (
    HuggingFaceMapping,
    Weight,
    require_fields,
    require_sizes,
    require_values,
    same,
)
from megatron_zpp.models.decoder import DecoderConfig

# What all of them have: fields of our config, and the values that they may have.
OURS: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "layernorm_1p": (False,),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "position_embedding_type": ("rope", "yarn"),
    "rotary_percent": (1.0,),
}
# What Llama 3.1's scaling of rotary frequencies has beside its factor: constants in ``models.rotary``.
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Window:
    """How a sliding window is written in config.json, where it counts the token itself too."""

    write: Callable[[DecoderConfig], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], int | None]


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": None if config.window_size is None else config.window_size + 1}


def _read_window(hf: Mapping[str, Any]) -> int | None:
    return None if hf["sliding_window"] is None else hf["sliding_window"] - 1


def _write_window_of_qwen(config: DecoderConfig) -> dict[str, Any]:
    has_window = config.window_size is not None
    layers = 0 if has_window else config.num_layers  # which come before those that have it
    return _write_window(config) | {"use_sliding_window": has_window, "max_window_layers": layers}


def _read_window_of_qwen(hf: Mapping[str, Any]) -> int | None:
    if not hf["use_sliding_window"] or hf["sliding_window"] is None:
        return None
    first, layers = hf["max_window_layers"], hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(set(kinds)) > 1:
        raise ValueError(
            "layer_types has both full_attention and sliding_attention, or max_window_layers "
            f"{first} is between 0 and num_hidden_layers {layers}: our window is the same in all layers"
        )
    return _read_window(hf) if kinds[0] == "sliding_attention" else None


@dataclass(frozen=True)
class Family:
    """In what one of transformers' models differs from the others here."""

    model_type: str
    class_name: str
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    window: Window | None = None
    has_head_dim: bool = True  # else heads are of hidden_size / num_attention_heads channels
    always: Mapping[str, Any] = field(default_factory=dict)  # further keys of config.json, and their only value

    @property
    def ours(self) -> dict[str, tuple[Any, ...]]:
        """Fields of our config, and the values that they may have."""
        own = {"add_qkv_bias": (self.add_qkv_bias,), "qk_layernorm": (self.qk_layernorm,)}
        return OURS | own | ({} if self.window is not None else {"window_size": (None,)})


FAMILIES = (
    Family("llama", "LlamaForCausalLM", always={"attention_bias": False, "mlp_bias": False}),
    Family("mistral", "MistralForCausalLM", window=Window(_write_window, _read_window)),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        add_qkv_bias=True,
        window=Window(_write_window_of_qwen, _read_window_of_qwen),
        has_head_dim=False,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_layernorm=True,
        window=Window(_write_window_of_qwen, _read_window_of_qwen),
        always={"attention_bias": False},
    ),
)


def to_config(family: Family, config: DecoderConfig, positions: int) -> dict[str, Any]:
    require_fields(config, family.model_type, family.ours)
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads or not (family.has_head_dim or config.head_dim == hidden // heads):
        raise ValueError(
            f"{family.model_type} needs a hidden_size that its number of heads divides"
            f"{'' if family.has_head_dim else ', into heads of that width'}; this model's is {hidden}, with {heads} "
            f"heads of {config.head_dim} channels (--kv-channels), so it cannot be exported"
        )
    return {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_groups,
        **({"head_dim": config.head_dim} if family.has_head_dim else {}),
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_epsilon,
        # Two keys that every version reads; version 5 would write them as one, rope_parameters.
        "rope_theta": float(config.rotary_base),
        "rope_scaling": _scaling(config),
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.tie_embeddings,
        **({} if family.window is None else family.window.write(config)),
        **family.always,
    }


def _scaling(config: DecoderConfig) -> dict[str, Any] | None:
    if config.position_embedding_type == "yarn":
        return {
            "rope_type": "yarn",
            "factor": config.yarn_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_context,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
        }
    if config.rope_scaling_factor is not None:
        return {"rope_type": "llama3", "factor": config.rope_scaling_factor} | LLAMA3_SCALING
    return None


def from_config(family: Family, hf: Mapping[str, Any]) -> tuple[DecoderConfig, int]:
    require_sizes(hf, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    require_sizes(hf, "max_position_embeddings")
    always: dict[str, tuple[Any, ...]] = {key: (value,) for key, value in family.always.items()}
    if not family.has_head_dim:
        always["head_dim"] = (None, hf["hidden_size"] // hf["num_attention_heads"])
    require_values(hf, {"hidden_act": ("silu", "swish"), **always})
    config = DecoderConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        vocab_size=hf["vocab_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_query_groups=hf["num_key_value_heads"] or hf["num_attention_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        normalization="RMSNorm",
        norm_epsilon=hf["rms_norm_eps"],
        qk_layernorm=family.qk_layernorm,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=family.add_qkv_bias,
        window_size=None if family.window is None else family.window.read(hf),
        attention_dropout=hf["attention_dropout"],
        hidden_dropout=0.0,
        init_method_std=hf["initializer_range"],
        tie_embeddings=hf["tie_word_embeddings"],
        **_rotary(hf),
    )
    return config, hf["max_position_embeddings"]


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of our config that are about positions."""
    # Version 5 keeps all that is about rotary embeddings in rope_parameters; before it there were two keys.
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_theta", hf.get("rope_theta"))
    kind = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    supported: dict[str, tuple[Any, ...]] = {
        "rope_type": ("default", "llama3", "yarn"),
        "partial_rotary_factor": (None, 1.0),
    }
    if kind == "llama3":
        supported |= {key: (value,) for key, value in LLAMA3_SCALING.items()}
    if kind == "yarn":
        supported |= {key: (None,) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        supported["truncate"] = (None, True)
    require_values(
        {f"rope_parameters.{key}": value for key, value in rope.items()},
        {f"rope_parameters.{key}": values for key, values in supported.items()},
    )
    if rope["rope_theta"] != int(rope["rope_theta"]):
        raise ValueError(f"rope_theta is {rope['rope_theta']}; only whole numbers can be imported (--rotary-base)")
    base = {"position_embedding_type": "rope", "rotary_base": int(rope["rope_theta"])}
    if kind == "llama3":
        return base | {"rope_scaling_factor": float(rope["factor"])}
    if kind == "yarn":
        require_sizes(rope, "original_max_position_embeddings")
        return base | {
            "position_embedding_type": "yarn",
            "yarn_scaling_factor": float(rope["factor"]),
            "yarn_original_context": rope["original_max_position_embeddings"],
            "yarn_beta_fast": float(rope.get("beta_fast") or 32),
            "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        }
    return base


def weights(config: DecoderConfig) -> Iterator[Weight]:
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
        for kind in ("weight", "bias") if config.add_qkv_bias else ("weight",):
            parts = tuple(f"{attention}.{name}_proj.{kind}" for name in "qkv")
            yield Weight(f"{ours}.self_attention.linear_qkv.{kind}", parts, split_qkv, join_qkv)
        yield same(f"{ours}.self_attention.linear_proj.weight", f"{attention}.o_proj.weight")
        if config.qk_layernorm:
            yield same(f"{ours}.self_attention.q_layernorm.weight", f"{attention}.q_norm.weight")
            yield same(f"{ours}.self_attention.k_layernorm.weight", f"{attention}.k_norm.weight")
        yield same(f"{ours}.pre_mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        yield same(f"{ours}.mlp.linear_fc1_gate.weight", f"{mlp}.gate_proj.weight")
        yield same(f"{ours}.mlp.linear_fc1_up.weight", f"{mlp}.up_proj.weight")
        yield same(f"{ours}.mlp.linear_fc2.weight", f"{mlp}.down_proj.weight")
    yield same("final_norm.weight", "model.norm.weight")
    if not config.tie_embeddings:
        yield same("output_layer.weight", "lm_head.weight")


LLAMA_FAMILIES = tuple(
    HuggingFaceMapping(family.model_type, partial(to_config, family), partial(from_config, family), weights)
    for family in FAMILIES
)
