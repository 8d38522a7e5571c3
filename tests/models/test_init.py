"""Initial weights: Megatron's rules, never the whole model at once. parallel/test_tensor.py compares layouts."""

import math

import pytest
import torch

from megatron_zpp.models import init
from megatron_zpp.models.decoder import DecoderConfig
from megatron_zpp.models.transformer import Transformer
from tests.collectives import Calls
from tests.families.find import architecture_of
from tests.models.configs import gpt_config

GPT_CONFIG = gpt_config(2, 36, 3, vocab_size=130, max_position_embeddings=3)
LESS_1_CONFIG = gpt_config(1, 36, 3, vocab_size=130, max_position_embeddings=3, layernorm_1p=True, qk_layernorm=True)
SMALL_BLOCK = 500  # several blocks per weight, whose edges are no shard's edges


def on_meta(config: DecoderConfig) -> Transformer:
    return architecture_of(config).build_empty(config)


def initialised(config: DecoderConfig, seed: int = 5) -> dict[str, torch.Tensor]:
    model = on_meta(config).to_empty(device="cpu")
    init.init_weights(model, seed)
    return model.state_dict()


def test_values_follow_megatrons_rules():
    config = gpt_config(8, 256, 4, vocab_size=1000, max_position_embeddings=128, init_method_std=0.05)
    weights = initialised(config)
    for name, value in weights.items():
        if name.endswith("bias"):
            assert (value == 0).all()
        elif "norm" in name:
            assert (value == 1).all()
        else:
            std = 0.05 / math.sqrt(16) if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.05
            error = 5 / math.sqrt(value.numel())  # five standard errors
            assert value.mean().abs() < error * std
            assert value.std() == pytest.approx(std, rel=error)
            assert value.unique().numel() > 0.95 * value.numel()  # no block repeats another
    assert not torch.equal(weights["layers.0.mlp.linear_fc1.weight"], weights["layers.1.mlp.linear_fc1.weight"])


def test_norms_that_add_1_to_their_weight_begin_at_0():
    norms = {name: value for name, value in initialised(LESS_1_CONFIG).items() if "norm" in name}
    assert len(norms) == 10 and all((value == 0).all() for value in norms.values())


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    initialised(GPT_CONFIG)
    assert torch.equal(before, torch.get_rng_state())


def test_model_on_meta_is_refused():
    with pytest.raises(ValueError, match=r"word_embeddings.weight is on the meta device"):
        init.init_weights(on_meta(GPT_CONFIG), 1)


def test_draws_one_block_at_a_time(monkeypatch):
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", SMALL_BLOCK)
    model = on_meta(GPT_CONFIG).to_empty(device="cpu")
    weights = {name: weight for name, weight in model.state_dict().items() if weight.dim() > 1}
    with Calls() as operators:
        for name, weight in weights.items():
            init.fill_normal(weight, 1.0, 1, name)
    assert max(numel for _, numels in operators.calls for numel in numels) <= SMALL_BLOCK
