"""Every parameter of every kind of decoder has one place in Megatron's model, there and back."""

import pytest
import torch

from megatron_zpp.convert.megatron.weights import canonical, canonical_pipeline_names, weights
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.moe import MoEConfig
from tests.convert.hf.small_models import CONFIGS as SMALL
from tests.convert.megatron.layouts import CONFIGS, random_model
from tests.models.configs import gpt_config, llama_config

EXPERTS = MoEConfig(num_experts=3, ffn_hidden_size=24, shared_expert_size=40)
KINDS: dict[str, DecoderConfig] = {
    **CONFIGS,
    "qkv-bias": llama_config(2, 32, 4, 64, ffn_hidden_size=48, add_qkv_bias=True, tie_embeddings=True),
    "swiglu-bias": gpt_config(2, 32, 4, 64, 16, ffn_hidden_size=48, swiglu=True),
    "experts": llama_config(3, 32, 4, 64, ffn_hidden_size=48, moe=EXPERTS, moe_layer_freq=2),
    "deepseek": SMALL["deepseek-v3"],
    "deepseek-without-latent-queries": SMALL["deepseek-v2"],
    "gpt-oss": SMALL["gpt-oss"],
    "gelu-experts": gpt_config(2, 32, 4, 64, 16, ffn_hidden_size=48, add_bias_linear=False, moe=EXPERTS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_comes_once_and_back(kind):
    ours, back = random_model(KINDS[kind]), {}
    table = list(weights(KINDS[kind]))
    assert len({weight.theirs for weight in table}) == len(table)
    for weight in table:
        theirs = weight.join(*(ours[name] for name in weight.ours))
        for name, tensor in zip(weight.ours, weight.split(theirs), strict=True):
            assert name not in back
            back[name] = tensor
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    {
        "module.language_model.encoder.final_norm.weight": "decoder.final_layernorm.weight",
        "language_model.transformer.layers.7.attention.dense.bias": "decoder.layers.7.self_attention.linear_proj.bias",
        "decoder.layers.0.input_norm.weight": "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": "decoder.layers.mlp.experts.linear_fc2.weight",
        "word_embeddings_for_head.weight": None,
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3": None,
        "rotary_pos_emb.inv_freq": None,
    }.items(),
)
def test_names_of_all_ages(theirs, expected):
    assert canonical(theirs) == expected


def test_modules_of_a_pipeline_are_told_by_their_tensors():
    modules = """tied_modules.embed.word_embeddings.weight 2.self_attention.dense.weight 3.self_attention.dense.weight
        3.mlp.dense_4h_to_h.bias 5.weight 6.lm_head.weight"""
    assert list(canonical_pipeline_names(modules.split()).values()) == [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.1.mlp.linear_fc2.bias",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
