"""Llama and its relatives as models of transformers; ``FAMILIES`` lists their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.families.huggingface import (
    HuggingFaceMapping,
    InMemory,
    Weight,
    require_fields,
    require_sizes,
    require_values,
    same,
)
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.moe import MoEConfig

# Keys of config.json, and the fields of our config that have the same value.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "rms_norm_eps": "norm_epsilon",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_method_std",
    "tie_word_embeddings": "tie_embeddings",
}
# Fields of our config that config.json has, or that only training needs.
WRITTEN = (
    *KEYS.values(),
    *("ffn_hidden_size", "num_query_groups", "kv_channels", "hidden_dropout", "rotary_base", "rope_scaling_factor"),
    *("yarn_scaling_factor", "yarn_original_context", "yarn_beta_fast", "yarn_beta_slow"),
)
WRITTEN_MOE = ("num_experts", "ffn_hidden_size", "router_topk", "aux_loss_coeff", "z_loss_coeff", "min_capacity")
# Fields of our config with one or two values in all families.
REQUIRED: dict[str, tuple[Any, ...]] = dict(
    normalization=("RMSNorm",), swiglu=(True,), add_bias_linear=(False,), position_embedding_type=("rope", "yarn")
)
# Llama 3.1's scaling of rotary frequencies beside its factor: constants in ``models.layers``.
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _write_window(config: DecoderConfig, is_qwen: bool) -> dict[str, Any]:
    """Write a sliding window as in config.json, where it counts the token itself too."""
    size = None if config.window_size is None else config.window_size + 1
    first = config.num_layers if size is None else 0  # layer with a window
    qwen = {"use_sliding_window": size is not None, "max_window_layers": first}
    return {"sliding_window": size, **(qwen if is_qwen else {})}


def _read_window(hf: Mapping[str, Any], is_qwen: bool) -> int | None:
    size = None if hf["sliding_window"] is None else hf["sliding_window"] - 1
    if not is_qwen:
        return size
    if size is None or not hf["use_sliding_window"]:
        return None
    first, layers = hf["max_window_layers"], hf["num_hidden_layers"]
    kinds = hf.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(set(kinds)) > 1:
        raise ValueError(
            "layer_types has both full_attention and sliding_attention, or max_window_layers "
            f"{first} is between 0 and num_hidden_layers {layers}: our window is the same in all layers"
        )
    return size if kinds[0] == "sliding_attention" else None


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in config.json and among the tensors of a layer."""

    number: str  # the key with the number of experts
    width: str  # the key with the width of one
    module: str
    projections: tuple[str, str, str]  # gate, up and down
    pre_softmax: str | None = None  # the key that is false where scores are softmax over all experts; None: never

    def write(self, moe: MoEConfig, num_layers: int) -> dict[str, Any]:
        values = {
            self.number: moe.num_experts,
            self.width: moe.ffn_hidden_size,
            "num_experts_per_tok": moe.router_topk,
            # There it is a mean over layers, and counts each of a token's choices whole.
            "router_aux_loss_coef": moe.aux_loss_coeff * num_layers / moe.router_topk,
        }
        return values if self.pre_softmax is None else values | {self.pre_softmax: not moe.router_pre_softmax}

    def read(self, hf: Mapping[str, Any]) -> MoEConfig:
        # Version 5's key in every family.
        number = "num_local_experts" if "num_local_experts" in hf else self.number
        require_sizes(hf, number, self.width, "num_experts_per_tok")
        return MoEConfig(
            num_experts=hf[number],
            ffn_hidden_size=hf[self.width],
            router_topk=hf["num_experts_per_tok"],
            router_pre_softmax=self.pre_softmax is not None and not hf[self.pre_softmax],
            aux_loss_coeff=hf["router_aux_loss_coef"] * hf["num_experts_per_tok"] / hf["num_hidden_layers"],
        )

    def weights(self, ours: str, theirs: str, moe: MoEConfig) -> Iterator[Weight]:
        """Pair one layer's experts, whose rows we concatenate."""

        def split(x: Tensor) -> tuple[Tensor, ...]:
            return x.unflatten(0, (moe.num_experts, -1)).unbind(0)

        yield same(f"{ours}.router.weight", f"{theirs}.gate.weight")
        for layer, name in zip(("fc1_gate", "fc1_up", "fc2"), self._tensors(theirs, moe), strict=True):
            yield Weight(f"{ours}.experts.linear_{layer}.weight", name, split, lambda *experts: torch.cat(experts))

    def in_memory(self, layer: str, moe: MoEConfig) -> Iterator[InMemory]:
        """Yield version 5's parameters of a layer: experts [E, out, in], with gate and up concatenated."""

        def gates_and_ups(*experts: Tensor) -> Tensor:
            gates, ups = experts[: moe.num_experts], experts[moe.num_experts :]
            return torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])

        theirs = f"{layer}.{self.module}"
        gates, ups, downs = self._tensors(theirs, moe)
        yield InMemory(f"{layer}.mlp.gate.weight", (f"{theirs}.gate.weight",), lambda x: x)
        yield InMemory(f"{layer}.mlp.experts.gate_up_proj", gates + ups, gates_and_ups)
        yield InMemory(f"{layer}.mlp.experts.down_proj", downs, lambda *experts: torch.stack(experts))

    def _tensors(self, theirs: str, moe: MoEConfig) -> list[tuple[str, ...]]:
        """List the names of all gates, ups and downs."""
        experts = range(moe.num_experts)
        return [tuple(f"{theirs}.experts.{i}.{name}.weight" for i in experts) for name in self.projections]


@dataclass(frozen=True)
class Family:
    """How one of transformers' models differs from the others here."""

    model_type: str
    class_name: str
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    has_window: bool = False
    is_qwen: bool = False  # has Qwen's keys of a window
    has_head_dim: bool = True  # else heads have hidden_size / num_attention_heads channels
    experts: Experts | None = None
    always: Mapping[str, Any] = field(default_factory=dict)  # further keys of config.json, and their only value


_NO_BIAS = {"attention_bias": False}
FAMILIES = (
    Family("llama", "LlamaForCausalLM", always=_NO_BIAS | {"mlp_bias": False}),
    Family("mistral", "MistralForCausalLM", has_window=True),
    Family("qwen2", "Qwen2ForCausalLM", add_qkv_bias=True, has_window=True, is_qwen=True, has_head_dim=False),
    Family("qwen3", "Qwen3ForCausalLM", qk_layernorm=True, has_window=True, is_qwen=True, always=_NO_BIAS),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        has_window=True,
        experts=Experts("num_local_experts", "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2")),
        always={"router_jitter_noise": 0.0},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qk_layernorm=True,
        experts=Experts(
            "num_experts", "moe_intermediate_size", "mlp", ("gate_proj", "up_proj", "down_proj"), "norm_topk_prob"
        ),
        always=_NO_BIAS | {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
)


def to_config(family: Family, config: DecoderConfig, positions: int) -> dict[str, Any]:
    required = REQUIRED | {"add_qkv_bias": (family.add_qkv_bias,), "qk_layernorm": (family.qk_layernorm,)}
    written = [*WRITTEN, *(["moe"] if family.experts else []), *(["window_size"] if family.has_window else [])]
    require_fields(config, family.model_type, required, written)
    experts: dict[str, Any] = {}
    if family.experts is not None:
        if config.moe is None:
            raise ValueError(f"{family.model_type} does not have layers without experts")
        written = [*WRITTEN_MOE, *(["router_pre_softmax"] if family.experts.pre_softmax else [])]
        require_fields(config.moe, family.model_type, {"load_balancing": ("aux_loss", "seq_aux_loss")}, written)
        experts = family.experts.write(config.moe, config.num_layers)
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
        **{key: getattr(config, name) for key, name in KEYS.items()},
        "intermediate_size": config.ffn_size,
        "num_key_value_heads": config.num_groups,
        **({"head_dim": config.head_dim} if family.has_head_dim else {}),
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        # Two keys that every version reads; version 5 would write them as one, rope_parameters.
        "rope_theta": float(config.rotary_base),
        "rope_scaling": _scaling(config),
        **(_write_window(config, family.is_qwen) if family.has_window else {}),
        **experts,
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
        **{name: hf[key] for key, name in KEYS.items()},
        ffn_hidden_size=hf["intermediate_size"],
        num_query_groups=hf["num_key_value_heads"] or hf["num_attention_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        normalization="RMSNorm",
        qk_layernorm=family.qk_layernorm,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=family.add_qkv_bias,
        window_size=_read_window(hf, family.is_qwen) if family.has_window else None,
        hidden_dropout=0.0,
        moe=None if family.experts is None else family.experts.read(hf),
        **_rotary(hf),
    )
    return config, hf["max_position_embeddings"]


def _rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read our config's fields of positions."""
    # Version 5 keeps rotary embeddings in rope_parameters; earlier ones have two keys.
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


def weights(family: Family, config: DecoderConfig) -> Iterator[Weight]:
    groups, head_dim = config.num_groups, config.head_dim
    queries = config.num_attention_heads // groups  # per group

    # We concatenate the rows of one group's queries, key and value.
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
        if family.experts is not None and config.moe is not None:
            yield from family.experts.weights(f"{ours}.mlp", f"{theirs}.{family.experts.module}", config.moe)
            continue
        yield same(f"{ours}.mlp.linear_fc1_gate.weight", f"{mlp}.gate_proj.weight")
        yield same(f"{ours}.mlp.linear_fc1_up.weight", f"{mlp}.up_proj.weight")
        yield same(f"{ours}.mlp.linear_fc2.weight", f"{mlp}.down_proj.weight")
    yield same("final_norm.weight", "model.norm.weight")
    if not config.tie_embeddings:
        yield same("output_layer.weight", "lm_head.weight")


def in_memory(family: Family, config: DecoderConfig) -> Iterator[InMemory]:
    if family.experts is not None and config.moe is not None:
        for layer in range(config.num_layers):
            yield from family.experts.in_memory(f"model.layers.{layer}", config.moe)


LLAMA_FAMILIES = tuple(
    HuggingFaceMapping(
        model_type=family.model_type,
        to_config=partial(to_config, family),
        from_config=partial(from_config, family),
        weights=partial(weights, family),
        in_memory=partial(in_memory, family),
    )
    for family in FAMILIES
)
