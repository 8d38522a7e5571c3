"""Logits computed with one block in memory are those of the whole model, and a wrong weight is noticed."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_zpp.huggingface.compare import compare, streamed_logits, transformers_model
from tests.huggingface.small_models import CONFIGS, POSITIONS, build, build_empty, mapping_of, to_hf_config

TOKENS = torch.randint(101, (2, 32), generator=torch.Generator().manual_seed(1))


def split(config, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' model by name."""
    return {
        name: tensor
        for weight in mapping_of(config).weights(config)
        for name, tensor in zip(weight.theirs, weight.split(ours[weight.ours]), strict=True)
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_streamed_logits_are_those_of_the_whole_model(config):
    ours = build(config)
    parameters = dict(ours.named_parameters())
    assert torch.equal(streamed_logits(build_empty(config).eval(), parameters.__getitem__, TOKENS), ours(TOKENS))

    hf_config, tensors = to_hf_config(config), split(config, parameters)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config)).eval()
    missing = theirs.load_state_dict(tensors, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    expected = theirs(TOKENS).logits
    assert torch.equal(streamed_logits(transformers_model(hf_config), tensors.__getitem__, TOKENS), expected)
    assert compare(build_empty(config), parameters.__getitem__, hf_config, tensors.__getitem__, POSITIONS) < 1e-4


def test_one_block_is_in_memory_at_a_time():
    config = CONFIGS["llama-grouped"]
    parameters, model, filled = dict(build(config).named_parameters()), build_empty(config).eval(), set()

    def read(name: str) -> Tensor:
        blocks: nn.ModuleList = model.layers
        filled.add(tuple(i for i, block in enumerate(blocks) if not next(block.parameters()).is_meta))
        return parameters[name]

    streamed_logits(model, read, TOKENS)
    assert filled == {()}  # whenever something was read, no block still had its weights
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt", {"transformer.h.1.attn.c_attn.weight": lambda x: x.roll(8, dims=1)}),  # the next head's
        ("gpt", {"transformer.h.0.ln_1.bias": torch.zeros_like}),
        ("llama-grouped", {"model.layers.1.self_attn.k_proj.weight": lambda x: x.flip(0)}),
        ("llama", {"model.layers.0.mlp.up_proj.weight": lambda x: x + 1e-2}),
    ],
)
def test_a_wrong_weight_is_noticed(name, change):
    config = CONFIGS[name]
    parameters = dict(build(config).named_parameters())
    tensors = {name: change.get(name, lambda x: x)(x.detach()) for name, x in split(config, parameters).items()}
    with pytest.raises(ValueError, match="transformers' logits differ from ours"):
        compare(build_empty(config), parameters.__getitem__, to_hf_config(config), tensors.__getitem__, POSITIONS)


def test_a_wrong_configuration_is_noticed():
    config = CONFIGS["llama-grouped"]
    parameters = dict(build(config).named_parameters())
    tensors = split(config, parameters)
    hf_config = to_hf_config(config)
    for change in ({"rope_theta": 10000.0}, {"rope_scaling": None}, {"rms_norm_eps": 1e-2}):
        with pytest.raises(ValueError, match="transformers' logits differ from ours"):
            compare(build_empty(config), parameters.__getitem__, hf_config | change, tensors.__getitem__, POSITIONS)
