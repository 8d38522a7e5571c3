"""Configurations go to transformers and back, and what one side cannot express is named."""

import dataclasses

import pytest
from transformers import AutoConfig

from megatron_zpp.architectures import ARCHITECTURES, LLAMA
from megatron_zpp.huggingface.mapping import from_hf_config
from tests.architectures.find import architecture_of
from tests.huggingface.small_models import CONFIGS, POSITIONS, to_hf_config


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configurations_survive_the_round_trip(config):
    theirs = AutoConfig.for_model(**to_hf_config(config)).to_dict()
    assert from_hf_config(theirs, ARCHITECTURES) == (architecture_of(config), config, POSITIONS)


def test_both_spellings_of_rotary_settings_are_read():
    config = CONFIGS["llama-grouped"]
    expected = (LLAMA, config, POSITIONS)
    hf = to_hf_config(config)
    assert from_hf_config(hf, ARCHITECTURES) == expected  # rope_theta and rope_scaling, before version 5
    rope = hf.pop("rope_scaling") | {"rope_theta": hf.pop("rope_theta")}
    assert from_hf_config(hf | {"rope_parameters": rope}, ARCHITECTURES) == expected


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt", {"model_type": "bert"}, "model_type is bert; gpt2 and llama can be imported"),
        ("gpt", {"activation_function": "relu"}, "activation_function is relu, supported: gelu_new or"),
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt", {"quantization_config": {"bits": 4}}, "the weights are quantized"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0, not a size"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu, supported: silu"),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "attention_bias is True, supported: False; mlp_bias is"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_parameters.rope_type is yarn"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters.rope_type is linear"),
        ("llama", {"rope_scaling": LLAMA3}, "original_max_position_embeddings is None, supported: 8192"),
        ("llama", {"rope_theta": 10000.5}, "only whole numbers"),
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
    ("config", "message"),
    [
        (dataclasses.replace(CONFIGS["gpt"], kv_channels=16), "GPT-2 has heads of hidden_size / num_attention_heads"),
        (
            dataclasses.replace(CONFIGS["llama"], num_attention_heads=3, num_query_groups=3),
            "Llama needs a hidden_size that its number of heads divides; this model's is 32, with 3 heads",
        ),
    ],
)
def test_what_theirs_cannot_express_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        to_hf_config(config)
