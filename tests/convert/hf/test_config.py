"""Configurations go to transformers and back, and what one side cannot express is named."""

import dataclasses

import pytest
from transformers import AutoConfig

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.convert.hf.files import from_hf_config
from megatron_zpp.families import ARCHITECTURES, GPT, LLAMA
from megatron_zpp.models.moe import MoEConfig
from tests.convert.hf.small_models import CONFIGS, POSITIONS, to_hf_config

ROUND_TRIPS = CONFIGS | {"fractional rope_theta": dataclasses.replace(CONFIGS["llama"], rotary_base=10000.5)}


@pytest.mark.parametrize("config", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_configurations_survive_the_round_trip_and_as_flags(config):
    theirs = AutoConfig.for_model(**to_hf_config(config)).to_dict()
    # GPT's flags describe all; Llama's are shorter for the others.
    expected = GPT if config.add_bias_linear else LLAMA
    assert from_hf_config(theirs, ARCHITECTURES) == (expected, config, POSITIONS)
    for architecture in (GPT, LLAMA) if expected is LLAMA else (GPT,):
        flags = [*architecture.flags(config, POSITIONS), "--mock-data", "--vocab-size", "50", "--lr", "1"]
        run = ["--seq-length", "8", "--micro-batch-size", "1", "--train-iters", "1"]
        settings = parse_settings(architecture, [*flags, *run], note=pytest.fail)
        assert architecture.build_model(settings.model, 51).config == config


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_what_transformers_writes_by_default_is_read(kind):
    theirs = AutoConfig.for_model(kind).to_dict()
    architecture, config, positions = from_hf_config(theirs, ARCHITECTURES)
    assert architecture is LLAMA and positions == theirs["max_position_embeddings"]
    assert config.window_size == (4095 if kind == "mistral" else None)
    assert (config.add_qkv_bias, config.qk_layernorm) == (kind == "qwen2", kind == "qwen3")


def test_windows_of_earlier_versions_without_layer_types_are_read():
    hf = to_hf_config(CONFIGS["qwen2-window"])
    assert "layer_types" not in hf and from_hf_config(hf, ARCHITECTURES)[1].window_size == 9
    assert from_hf_config(hf | {"max_window_layers": 2}, ARCHITECTURES)[1].window_size is None


def test_both_spellings_of_rotary_settings_are_read():
    config = CONFIGS["llama-grouped"]
    expected = (LLAMA, config, POSITIONS)
    hf = to_hf_config(config)
    assert from_hf_config(hf, ARCHITECTURES) == expected  # rope_theta and rope_scaling, before version 5
    rope = hf.pop("rope_scaling") | {"rope_theta": hf.pop("rope_theta")}
    assert from_hf_config(hf | {"rope_parameters": rope}, ARCHITECTURES) == expected


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt", {"model_type": "bert"}, "bert; gpt2, llama, mistral, qwen2, .*, deepseek_v2 and deepseek_v3 can be"),
        ("gpt", {"activation_function": "relu"}, "activation_function is relu, supported: gelu or gelu_new or"),
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt", {"quantization_config": {"bits": 4}}, "the weights are quantized"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0, not a size"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu, supported: silu"),
        ("llama", {"rope_scaling": YARN | {"mscale": 0.7}}, "rope_parameters.mscale is 0.7, supported: None"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is None"),
        ("llama", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is"),
        ("qwen2", {"head_dim": 16}, "head_dim is 16, supported: None or 8"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias is True, supported: False"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has chunked_attention"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type is dynamic"),
        ("deepseek-v3", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, supported: 4"),
        ("deepseek-v2", {"topk_method": "group_limited_greedy"}, "topk_method is group_limited_greedy"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, supported: None"),
        ("llama", {"rope_scaling": LLAMA3}, "original_max_position_embeddings is None, not a size"),
        ("llama", {"rope_theta": 0.5}, "rope_theta is 0.5, not a number from 1 on"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta is nan, not a number"),
    ],
)
def test_what_ours_cannot_express_is_named(name, change, message):
    hf = AutoConfig.for_model(**to_hf_config(CONFIGS[name])).to_dict()
    if "rope_parameters" in hf:
        hf |= {"rope_theta": 10000.0, "rope_scaling": None}
        del hf["rope_parameters"]
    with pytest.raises(ValueError, match=message):
        from_hf_config(hf | change, ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt", {"kv_channels": 16}, "GPT-2 has heads of 32 / 4 channels"),
        ("llama", {"num_attention_heads": 3, "num_query_groups": 3}, "llama cannot express 3 heads .* hidden_size 32"),
        ("qwen2-window", {"kv_channels": 16}, "qwen2 cannot express .* heads of 16 channels"),
        (
            *("qwen3", {"add_bias_linear": True, "layernorm_1p": True}),
            "GPT-2 does not have .*; llama does not have .*; qwen3 does not have layernorm_1p True, add_bias_linear",
        ),
        ("gpt", {"num_query_groups": 2}, "GPT-2 does not have grouped queries"),
        (
            *("mixtral", {"moe": MoEConfig(4, 40, shared_expert_size=8)}),
            "llama does not have .*moe .*; mixtral does not have shared_expert_size 8",
        ),
        ("qwen3-moe", {"moe_layer_freq": 2}, "qwen3_moe does not have moe_layer_freq 2"),
        ("glm4-moe", {"moe_layer_freq": "[1, 0, 1]"}, r"glm4_moe does not have moe_layer_freq \[1, 0, 1\]"),
        ("gemma2", {"softmax_scale": 0.3}, "1 / sqrt of a whole number, and not 0.3"),
        ("olmo3", {"rotary_base_local": None}, "olmo3 does not scale rotary frequencies in blocks with a window"),
        ("deepseek-v2", {"norm_epsilon": 1e-5}, "latent vectors have an epsilon of 1e-6, and not 1e-05"),
    ],
)
def test_what_theirs_cannot_express_is_named(name, change, message):
    with pytest.raises(ValueError, match=message):
        to_hf_config(dataclasses.replace(CONFIGS[name], **change))
