"""The configurations of our models as transformers' config.json: GPT as GPT-2, and Llama as Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_zpp.models.gpt import GPTConfig
from megatron_zpp.models.llama import LlamaConfig

# What Llama 3.1's scaling of rotary frequencies has beside its factor: constants in ``rotary_table``.
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def to_hf_config(config: GPTConfig | LlamaConfig, max_position_embeddings: int) -> dict[str, Any]:
    """What stands in config.json, tokens and dtype left out.

    max_position_embeddings: Llama's; GPT's configuration has its own.
    Raises ValueError for a model that transformers' architecture cannot express.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    if isinstance(config, GPTConfig):
        if config.head_dim * heads != hidden:
            raise ValueError(
                f"transformers' GPT-2 has heads of hidden_size / num_attention_heads = {hidden} / {heads} channels; "
                f"this model's have {config.head_dim} (--kv-channels), so it cannot be exported"
            )
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.max_position_embeddings,
            "n_embd": hidden,
            "n_layer": config.num_layers,
            "n_head": heads,
            "n_inner": config.ffn_size,
            "activation_function": "gelu_new",  # the tanh approximation
            "resid_pdrop": config.hidden_dropout,
            "embd_pdrop": config.hidden_dropout,
            "attn_pdrop": config.attention_dropout,
            "layer_norm_epsilon": config.norm_epsilon,
            "initializer_range": config.init_method_std,
            "tie_word_embeddings": config.tie_embeddings,
        }
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
        "max_position_embeddings": max_position_embeddings,
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


def from_hf_config(hf: Mapping[str, Any]) -> tuple[GPTConfig | LlamaConfig, int]:
    """Our configuration, with every width filled in, and the number of positions. hf: all keys, defaults included.

    Raises ValueError that names each key whose value our models cannot express.
    """
    kind = hf.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"model_type is {kind}; gpt2 and llama can be imported")
    if hf.get("quantization_config") is not None:
        raise ValueError("the weights are quantized (quantization_config); import the model they were made from")
    if kind == "gpt2":
        _require_sizes(hf, "n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
        return _from_gpt2(hf)
    _require_sizes(hf, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    _require_sizes(hf, "max_position_embeddings")
    return _from_llama(hf)


def _from_gpt2(hf: Mapping[str, Any]) -> tuple[GPTConfig, int]:
    _require(
        hf,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    )
    hidden, heads = hf["n_embd"], hf["n_head"]
    config = GPTConfig(
        num_layers=hf["n_layer"],
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=hf["vocab_size"],
        max_position_embeddings=hf["n_positions"],
        ffn_hidden_size=hf["n_inner"] or 4 * hidden,
        kv_channels=hidden // heads,
        norm_epsilon=hf["layer_norm_epsilon"],
        attention_dropout=hf["attn_pdrop"],
        hidden_dropout=hf["resid_pdrop"],
        init_method_std=hf["initializer_range"],
        tie_embeddings=hf["tie_word_embeddings"],
    )
    return config, config.max_position_embeddings


def _from_llama(hf: Mapping[str, Any]) -> tuple[LlamaConfig, int]:
    # Version 5 keeps all that is about rotary embeddings in rope_parameters; before it there were two keys.
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_theta", hf.get("rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    _require(
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


def _require_sizes(hf: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if type(hf.get(name)) is not int or hf[name] < 1:
            raise ValueError(f"{name} is {hf.get(name)!r}, not a size")


def _require(hf: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    wrong = [
        f"{key} is {hf.get(key)}, supported: {' or '.join(map(str, values))}"
        for key, values in supported.items()
        if hf.get(key) not in values
    ]
    if wrong:
        raise ValueError("our models cannot express this configuration: " + "; ".join(wrong))
