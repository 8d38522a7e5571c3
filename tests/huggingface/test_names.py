"""Names and layouts of weights are those of transformers, and nothing is lost on the way there and back."""

import pytest
import torch
from megatron_zpp.huggingface.config import to_hf_config
from megatron_zpp.huggingface.names import build_empty, their_shapes, weights
from transformers import AutoConfig, AutoModelForCausalLM

from tests.huggingface.small_models import CONFIGS, POSITIONS, build


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_weight_of_both_sides_has_its_counterpart(config):
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(config, POSITIONS)))
    expected = {name: parameter.shape for name, parameter in theirs.named_parameters()}  # a tied one once
    assert their_shapes(config) == expected
    ours = [weight.ours for weight in weights(config)]
    assert sorted(ours) == sorted(name for name, _ in build_empty(config).named_parameters())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_there_and_back_gives_the_same_bits(config):
    ours = dict(build(config).named_parameters())
    for weight in weights(config):
        parts = weight.split(ours[weight.ours])
        assert torch.equal(weight.join(*parts), ours[weight.ours]), weight.ours
        again = weight.split(weight.join(*parts))
        assert all(map(torch.equal, parts, again)), weight.ours
