"""GPT: Megatron-LM's defaults, which flags change into any other decoder, and transformers' GPT-2."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megatron_zpp.families.decoder_only import decoder
from megatron_zpp.families.huggingface import (
    HuggingFaceMapping,
    Weight,
    moved,
    require_fields,
    require_sizes,
    require_values,
    same,
    same_weight_and_bias,
)
from megatron_zpp.families.llama_huggingface import LLAMA_FAMILIES
from megatron_zpp.models.decoder import DecoderConfig

# Keys of config.json, and the fields of our config that have the same value.
KEYS = {
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "resid_pdrop": "hidden_dropout",
    "attn_pdrop": "attention_dropout",
    "layer_norm_epsilon": "norm_epsilon",
    "initializer_range": "init_method_std",
    "tie_word_embeddings": "tie_embeddings",
}
WRITTEN = (*KEYS.values(), "ffn_hidden_size", "num_query_groups", "kv_channels", "exact_gelu")
REQUIRED: dict[str, tuple[Any, ...]] = dict(
    normalization=("LayerNorm",), add_bias_linear=(True,), position_embedding_type=("learned_absolute",)
)


def to_config(config: DecoderConfig, positions: int) -> dict[str, Any]:
    require_fields(config, "GPT-2", REQUIRED, WRITTEN)
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.num_groups != heads:
        raise ValueError(f"GPT-2 does not have grouped queries ({config.num_groups} groups for {heads} heads)")
    if config.head_dim * heads != hidden:
        raise ValueError(f"GPT-2 has heads of {hidden} / {heads} channels, not of {config.head_dim} (--kv-channels)")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{key: getattr(config, name) for key, name in KEYS.items()},
        "n_inner": config.ffn_size,
        "activation_function": "gelu" if config.exact_gelu else "gelu_new",  # the tanh approximation
        "embd_pdrop": config.hidden_dropout,
    }


def from_config(hf: Mapping[str, Any]) -> tuple[DecoderConfig, int]:
    require_sizes(hf, "n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
    switches = {"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)}
    activations = {"activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh")}
    require_values(hf, {**activations, "scale_attn_weights": (True,), **switches})
    config = DecoderConfig(
        **{name: hf[key] for key, name in KEYS.items()},
        ffn_hidden_size=hf["n_inner"] or 4 * hf["n_embd"],
        num_query_groups=hf["n_head"],
        kv_channels=hf["n_embd"] // hf["n_head"],
        exact_gelu=hf["activation_function"] == "gelu",
    )
    return config, hf["n_positions"]


def weights(config: DecoderConfig) -> Iterator[Weight]:
    heads, head_dim = config.num_attention_heads, config.head_dim

    # GPT-2 has the rows of all queries, then all keys, then all values; we have q, k, v head by head.
    def by_kind(x: Tensor) -> Tensor:
        return x.unflatten(0, (heads, 3, head_dim)).transpose(0, 1).flatten(0, 2)

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(0, (3, heads, head_dim)).transpose(0, 1).flatten(0, 2)

    yield same("word_embeddings.weight", "transformer.wte.weight")
    yield same("position_embeddings.weight", "transformer.wpe.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        yield from same_weight_and_bias(f"{ours}.input_norm", f"{theirs}.ln_1")
        qkv, c_attn = f"{ours}.self_attention.linear_qkv", f"{theirs}.attn.c_attn"
        yield moved(f"{qkv}.weight", f"{c_attn}.weight", lambda x: by_kind(x).t(), lambda x: by_head(x.t()))
        yield moved(f"{qkv}.bias", f"{c_attn}.bias", by_kind, by_head)
        yield from _transposed(f"{ours}.self_attention.linear_proj", f"{theirs}.attn.c_proj")
        yield from same_weight_and_bias(f"{ours}.pre_mlp_norm", f"{theirs}.ln_2")
        yield from _transposed(f"{ours}.mlp.linear_fc1", f"{theirs}.mlp.c_fc")
        yield from _transposed(f"{ours}.mlp.linear_fc2", f"{theirs}.mlp.c_proj")
    yield from same_weight_and_bias("final_norm", "transformer.ln_f")
    if not config.tie_embeddings:
        yield same("output_layer.weight", "lm_head.weight")


def _transposed(ours: str, theirs: str) -> Iterator[Weight]:
    """Pair a Linear with GPT-2's Conv1D, whose weight is [in, out]."""
    yield moved(f"{ours}.weight", f"{theirs}.weight", lambda x: x.t(), lambda x: x.t())
    yield same(f"{ours}.bias", f"{theirs}.bias")


GPT2 = HuggingFaceMapping("gpt2", to_config, from_config, weights)

GPT_OSS: dict[str, object] = dict(
    hidden_size=2880,
    num_attention_heads=64,
    kv_channels=64,
    group_query_attention=True,
    num_query_groups=8,
    ffn_hidden_size=2880,
    seq_length=4096,
    normalization="RMSNorm",
    quick_geglu=True,
    glu_linear_offset=1.0,
    activation_func_clamp_value=7.0,
    softmax_type="learnable",
    window_size="127,0",
    window_attn_skip_freq="2",
    position_embedding_type="yarn",
    rotary_base=150000,
    yarn_rotary_scaling_factor=32.0,
    yarn_original_max_position_embeddings=4096,
    no_yarn_correction_range_round_to_int=True,
    moe_router_topk=4,
    moe_router_bias=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    untie_embeddings_and_output_weights=True,
)

PRESETS: dict[str, dict[str, object]] = {
    # GPT-3 (Brown et al., arXiv 2005.14165, table 2.1). The table's 24 heads of 128 do not make the 1.3B model's width
    # of 2048, and its 5140 for 13B is no multiple of 40 heads of 128: Megatron's users train 16 heads and 5120.
    "gpt-125m": dict(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=2048),
    "gpt-350m": dict(num_layers=24, hidden_size=1024, num_attention_heads=16, seq_length=2048),
    "gpt-1.3b": dict(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048),
    "gpt-13b": dict(num_layers=40, hidden_size=5120, num_attention_heads=40, seq_length=2048),
    # DeepSpeed's ZeRO++ tutorial.
    "gpt-18b": dict(num_layers=40, hidden_size=6144, num_attention_heads=32, seq_length=512),
    # gpt-oss (OpenAI, arXiv 2508.10925, table 1), which is no Llama for its biases.
    "gpt-oss-20b": GPT_OSS | dict(num_layers=24, num_experts=32),
    "gpt-oss-120b": GPT_OSS | dict(num_layers=36, num_experts=128),
}

GPT = decoder(name="gpt", title="GPT", defaults={}, presets=PRESETS, huggingface=(GPT2, *LLAMA_FAMILIES))
