"""Decoders as models of transformers: ``Family`` says how one of its models differs from Llama in config.json."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_zpp.families.decoder_huggingface_experts import Experts
from megatron_zpp.families.decoder_huggingface_weights import in_memory, weights
from megatron_zpp.families.huggingface import (
    HuggingFaceMapping,
    InMemory,
    Weight,
    require_fields,
    require_sizes,
    require_values,
)
from megatron_zpp.models.decoder import DecoderConfig

# Keys of config.json, and the fields of our config that have the same value.
KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "attention_dropout": "attention_dropout",
    "initializer_range": "init_method_std",
    "tie_word_embeddings": "tie_embeddings",
}
# Fields of our config that config.json has, or that only training needs.
WRITTEN = (
    *KEYS.values(),
    *("norm_epsilon", "ffn_hidden_size", "num_query_groups", "kv_channels", "hidden_dropout", "rotary_base"),
    *("rope_scaling_factor", "rotary_seq_len_interpolation_factor", "position_embedding_type"),
    *("yarn_scaling_factor", "yarn_original_context", "yarn_beta_fast", "yarn_beta_slow", "mscale", "mscale_all_dim"),
    "no_yarn_correction_range_round_to_int",
)
# Values of fields of our config where a family does not say otherwise.
FIELDS: dict[str, Any] = dict(normalization="RMSNorm", swiglu=True, add_bias_linear=False)
# Llama 3.1's scaling of rotary frequencies beside its factor: constants in ``models.rotary``.
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONTEXT = "original_max_position_embeddings"
YARN = {"factor": "yarn_scaling_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
NORMS = {"input_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class Key:
    """A key of config.json for one field of our config, where the two do not have the same value."""

    name: str
    field: str
    write: Callable[[DecoderConfig], Any]  # raises ValueError for what it cannot express
    read: Callable[[Mapping[str, Any]], Any]  # config.json -> the field


@dataclass(frozen=True)
class Family:
    """How one of transformers' models differs from Llama."""

    model_type: str
    class_name: str = ""  # default: of its type, as Qwen3MoeForCausalLM of qwen3_moe
    fields: Mapping[str, Any] = field(default_factory=dict)  # {field of our config: value, or a function of the width}
    keys: Mapping[str, str] = field(default_factory=dict)  # {key of config.json: field with the same value}
    special_keys: tuple[Key, ...] = ()
    always: Mapping[str, Any] = field(default_factory=dict)  # further keys of config.json, and their only value
    activation: tuple[str, str] = ("hidden_act", "silu")  # a key, and its value
    norm_epsilon: str = "rms_norm_eps"
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)  # names of a block's norms, ours and theirs
    window: str | None = None  # which keys say where a window is: mistral's, qwen's, or layer_types
    has_head_dim: bool = True  # else heads have hidden_size / num_attention_heads channels
    is_fused: bool = False  # queries, keys and values are one tensor, and so are gates and ups
    has_groups: bool = True  # key/value heads of several queries
    has_partial_rotary: bool = False
    rotary_keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor")  # which every version reads
    has_local_rotary: bool = False  # rope_parameters are two: of blocks with a window, and of the others
    experts: Experts | None = None
    weights: Callable[[DecoderConfig], Iterator[Weight]] | None = None  # default: Llama's names
    in_memory: Callable[[DecoderConfig], Iterator[InMemory]] | None = None

    def fixed_fields(self, hidden_size: int) -> dict[str, Any]:
        values = FIELDS | dict(self.fields)
        return {name: value(hidden_size) if callable(value) else value for name, value in values.items()}

    def mapping(self) -> HuggingFaceMapping:
        return HuggingFaceMapping(
            model_type=self.model_type,
            to_config=partial(to_config, self),
            from_config=partial(from_config, self),
            weights=self.weights or partial(weights, self.norms, self.experts, self.is_fused),
            in_memory=self.in_memory or partial(in_memory, self.experts),
        )


def to_config(family: Family, config: DecoderConfig, positions: int) -> dict[str, Any]:
    required: dict[str, tuple[Any, ...]] = {
        name: (value,) for name, value in family.fixed_fields(config.hidden_size).items()
    }
    if not family.has_groups:
        required["num_query_groups"] = (None, config.num_attention_heads)
    written = [*WRITTEN, *family.keys.values(), *(key.field for key in family.special_keys)]
    written += ["window_size"] if family.window else []
    written += ["window_attn_skip_freq"] if family.window in ("qwen", "layer_types") else []
    written += ["rotary_percent"] if family.has_partial_rotary else []
    written += ["rotary_base_local"] if family.has_local_rotary else []
    written += [] if family.experts is None else ["moe", *(["moe_layer_freq"] if family.experts.first else [])]
    require_fields(config, family.model_type, required, [name for name in written if name not in required])
    if config.position_embedding_type not in ("rope", "yarn"):
        raise ValueError(f"{family.model_type} does not have positions {config.position_embedding_type}")
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads or not (family.has_head_dim or config.head_dim == hidden // heads):
        heads_of = f"{heads} heads of {config.head_dim} channels (--kv-channels) and hidden_size {hidden}"
        raise ValueError(f"{family.model_type} cannot express {heads_of}: its number of heads must divide hidden_size")
    keys = KEYS | {family.norm_epsilon: "norm_epsilon"} | dict(family.keys)
    return {
        "architectures": [family.class_name or f"{family.model_type.title().replace('_', '')}ForCausalLM"],
        "model_type": family.model_type,
        **{key: getattr(config, name) for key, name in keys.items()},
        "intermediate_size": config.ffn_size,
        **({"num_key_value_heads": config.num_groups} if family.has_groups else {}),
        **({"head_dim": config.head_dim} if family.has_head_dim else {}),
        family.activation[0]: family.activation[1],
        "max_position_embeddings": positions,
        "pad_token_id": None,  # the default of some families is beyond a small vocabulary
        **_write_rotary(family, config),
        **_write_window(family, config, positions),
        **({} if family.experts is None else family.experts.write(family.model_type, config)),
        **{key.name: key.write(config) for key in family.special_keys},
        **family.always,
    }


def from_config(family: Family, hf: Mapping[str, Any]) -> tuple[DecoderConfig, int]:
    require_sizes(hf, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    require_sizes(hf, "max_position_embeddings")
    always: dict[str, tuple[Any, ...]] = {key: (value,) for key, value in family.always.items()}
    if not family.has_head_dim:
        always["head_dim"] = (None, hf["hidden_size"] // hf["num_attention_heads"])
        if family.fields.get("multi_latent_attention"):  # there it is the width of what is rotated
            del always["head_dim"]
    activation, value = family.activation
    require_values(hf, {activation: (value, "swish") if value == "silu" else (value,), **always})
    keys = KEYS | {family.norm_epsilon: "norm_epsilon"} | dict(family.keys)
    head_dim = (hf.get("head_dim") if family.has_head_dim else None) or hf["hidden_size"] // hf["num_attention_heads"]
    config = DecoderConfig(
        **{"hidden_dropout": 0.0}
        | {name: hf[key] for key, name in keys.items()}
        | {key.field: key.read(hf) for key in family.special_keys}
        | _read_rotary(family, hf)
        | family.fixed_fields(hf["hidden_size"]),
        ffn_hidden_size=hf["intermediate_size"],
        num_query_groups=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        kv_channels=head_dim,
        **({} if family.experts is None else family.experts.read(hf)),
        **_read_window(family, hf),
    )
    return config, hf["max_position_embeddings"]


def _write_window(family: Family, config: DecoderConfig, positions: int) -> dict[str, Any]:
    """Write a sliding window as in config.json, where it counts the token itself too."""
    if family.window is None:
        return {}
    size = None if config.window_size is None else config.window_size + 1
    has_window = [config.window_of(layer) is not None for layer in range(config.num_layers)]
    kinds = ["sliding_attention" if has else "full_attention" for has in has_window]
    qwen = {"use_sliding_window": size is not None, "max_window_layers": 0 if size else config.num_layers}
    return {
        # Families that list layers want a window even where none has it.
        "sliding_window": size or (positions if family.window == "layer_types" else None),
        **(qwen if family.window == "qwen" else {}),
        **({"layer_types": kinds} if family.window == "layer_types" or len(set(has_window)) > 1 else {}),
    }


def _read_window(family: Family, hf: Mapping[str, Any]) -> dict[str, Any]:
    size, layers = hf.get("sliding_window"), hf["num_hidden_layers"]
    if family.window is None or size is None or (family.window == "qwen" and not hf["use_sliding_window"]):
        return {}
    if family.window == "mistral":
        return {"window_size": size - 1}
    first = hf.get("max_window_layers", 0)
    kinds = hf.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types has {', '.join(sorted(unknown))}; full_attention and sliding_attention are read")
    has_window = [int(kind == "sliding_attention") for kind in kinds]
    if not any(has_window):
        return {}
    return {"window_size": size - 1, "window_attn_skip_freq": None if all(has_window) else str(has_window)}


def _write_rotary(family: Family, config: DecoderConfig) -> dict[str, Any]:
    base, share = family.rotary_keys
    partial_factor = {share: config.rotary_percent} if family.has_partial_rotary else {}
    scaling = _scaling(config)
    if family.has_local_rotary:
        if config.rotary_base_local is None and scaling is not None:
            raise ValueError(f"{family.model_type} does not scale rotary frequencies in blocks with a window")
        local = {"rope_type": "default", "rope_theta": float(config.rotary_base_local or config.rotary_base)}
        full = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": float(config.rotary_base)}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    if scaling is None and family.model_type == "gpt_oss":  # whose default is YaRN
        scaling = {"rope_type": "default"}
    # Two keys that every version reads; version 5 would write them as one, rope_parameters.
    return {base: float(config.rotary_base), "rope_scaling": scaling} | partial_factor


def _scaling(config: DecoderConfig) -> dict[str, Any] | None:
    if config.position_embedding_type == "yarn":
        yarn: dict[str, Any] = {"rope_type": "yarn", CONTEXT: config.yarn_original_context}
        yarn |= {key: getattr(config, name) for key, name in YARN.items()}
        if config.mscale_all_dim and config.mscale:  # transformers reads both or none
            yarn |= {"mscale": config.mscale, "mscale_all_dim": config.mscale_all_dim}
        elif config.mscale != 1 or config.mscale_all_dim:
            raise ValueError("transformers does not have YaRN's mscale without mscale_all_dim")
        return yarn | ({"truncate": False} if config.no_yarn_correction_range_round_to_int else {})
    if config.multi_latent_attention and config.yarn_scaling_factor is not None and config.mscale_all_dim:
        raise ValueError("transformers does not have mscale_all_dim without position_embedding_type yarn")
    if config.rope_scaling_factor is not None:
        context = {CONTEXT: config.yarn_original_context or 8192}
        return {"rope_type": "llama3", "factor": config.rope_scaling_factor} | LLAMA3_SCALING | context
    if config.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    return None


def _read_rotary(family: Family, hf: Mapping[str, Any]) -> dict[str, Any]:
    # Version 5 keeps rotary embeddings in rope_parameters; earlier ones have two keys.
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    local: dict[str, Any] = {}
    if family.has_local_rotary:
        sliding, rope = rope["sliding_attention"], dict(rope["full_attention"])
        require_values({"rope_type": sliding.get("rope_type", "default")}, {"rope_type": ("default",)})
        local = {"rotary_base_local": _base(sliding["rope_theta"])}
    base_key, share_key = family.rotary_keys
    rope.setdefault("rope_theta", hf.get(base_key))
    kind = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", hf.get(share_key))
    if family.has_partial_rotary and share is not None:
        local["rotary_percent"] = rope["partial_rotary_factor"] = float(share)
    supported: dict[str, tuple[Any, ...]] = {"rope_type": ("default", "linear", "llama3", "yarn")}
    if not family.has_partial_rotary:
        supported["partial_rotary_factor"] = (None, 1.0)
    if kind == "llama3":
        supported |= {key: (value,) for key, value in LLAMA3_SCALING.items()}
    if kind == "yarn":
        supported |= {"attention_factor": (None,), "truncate": (None, True, False)}
        if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
            supported |= {"mscale": (None,), "mscale_all_dim": (None,)}
    require_values(
        {f"rope_parameters.{key}": value for key, value in rope.items()},
        {f"rope_parameters.{key}": values for key, values in supported.items()},
    )
    base = {"position_embedding_type": "rope", "rotary_base": _base(rope["rope_theta"])} | local
    if kind == "llama3":
        require_sizes(rope, CONTEXT)
        context = None if rope[CONTEXT] == 8192 else rope[CONTEXT]  # Megatron's
        return base | {"rope_scaling_factor": float(rope["factor"]), "yarn_original_context": context}
    if kind == "linear":
        return base | {"rotary_seq_len_interpolation_factor": float(rope["factor"])}
    if kind == "yarn":
        require_sizes(rope, CONTEXT)
        names = YARN | {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
        base |= {name: float(rope[key]) for key, name in names.items() if rope.get(key)}  # ours are the defaults there
        base |= {"position_embedding_type": "yarn", "yarn_original_context": rope[CONTEXT]}
        base["no_yarn_correction_range_round_to_int"] = rope.get("truncate") is False
    return base


def _base(value: float) -> float:
    if not isinstance(value, int | float) or not 1 <= value < math.inf:  # NaN, too
        raise ValueError(f"rope_theta is {value}, not a number from 1 on (--rotary-base)")
    return int(value) if float(value).is_integer() else value
