"""Names and layouts of weights are those of transformers, and nothing is lost on the way there and back."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_zpp.convert.hf.files import their_shapes
from tests.convert.hf.small_models import CONFIGS, build, build_empty, mapping_of, to_hf_config
from tests.families.find import architecture_of


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_weight_of_both_sides_has_its_counterpart(config, tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(config))).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:  # a tied one once
        expected = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert their_shapes(architecture_of(config), config) == expected
    ours = [weight.ours for weight in mapping_of(config).weights(config)]
    assert sorted(ours) == sorted(name for name, _ in build_empty(config).named_parameters())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_there_and_back_gives_the_same_bits(config):
    ours = dict(build(config).named_parameters())
    for weight in mapping_of(config).weights(config):
        parts = weight.split(ours[weight.ours])
        assert torch.equal(weight.join(*parts), ours[weight.ours]), weight.ours
        again = weight.split(weight.join(*parts))
        assert all(map(torch.equal, parts, again)), weight.ours
