"""Weights keep their bits to transformers and back, logits are the same block by block, and mistakes are noticed."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_zpp.convert.hf.compare import compare, streamed_logits, transformers_model
from megatron_zpp.convert.hf.files import in_memory, their_shapes
from megatron_zpp.models.decoder import DecoderConfig
from tests.convert.hf.small_models import CONFIGS, POSITIONS, build, build_empty, mapping_of, to_hf_config
from tests.convert.hf.small_models import YARN as YARN_FIELDS
from tests.families.find import architecture_of

YARN = to_hf_config(CONFIGS["llama-yarn"])["rope_scaling"]
TOKENS = torch.randint(101, (2, 32), generator=torch.Generator().manual_seed(1))


def split(config, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of transformers' model by name."""
    mapping = mapping_of(config)
    tensors = {
        name: tensor
        for weight in mapping.weights(config)
        for name, tensor in zip(weight.theirs, weight.split(*map(ours.get, weight.ours)), strict=True)
    }
    made = {parameter.name: parameter for parameter in mapping.in_memory(config)}
    joined = {name for parameter in made.values() for name in parameter.tensors}
    read = in_memory(mapping, config, tensors.__getitem__)
    return {name: read(name) for name in (*(tensors.keys() - joined), *made)}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_weight_of_both_sides_has_its_counterpart_and_keeps_its_bits(config, tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(config))).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:  # a tied one once
        expected = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert their_shapes(architecture_of(config), config, mapping_of(config)) == expected
    ours = build(config).state_dict()
    weights = list(mapping_of(config).weights(config))
    assert sorted(name for weight in weights for name in weight.ours) == sorted(ours)
    for weight in weights:
        whole = [ours[name] for name in weight.ours]
        parts = weight.split(*whole)
        assert all(map(torch.equal, weight.join(*parts), whole)), weight.ours
        assert all(map(torch.equal, parts, weight.split(*weight.join(*parts)))), weight.ours


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_streamed_logits_are_those_of_the_whole_model(config):
    ours = build(config)
    parameters = ours.state_dict()
    assert torch.equal(streamed_logits(build_empty(config).eval(), parameters.__getitem__, TOKENS), ours(TOKENS))

    hf_config, tensors = to_hf_config(config), split(config, parameters)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config)).eval()
    missing = theirs.load_state_dict(tensors, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    expected = theirs(TOKENS).logits
    assert (ours(TOKENS) - expected).abs().max() <= 3e-5
    assert torch.equal(streamed_logits(transformers_model(hf_config), tensors.__getitem__, TOKENS), expected)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_training_step_is_transformers(config):
    ours = build(config)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(config))).eval()  # no dropout
    theirs.load_state_dict(split(config, ours.state_dict()), strict=False)
    assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= 3e-5
    found, gradients = [], []
    for model, logits in (ours, ours), (theirs, lambda tokens: theirs(tokens).logits):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(2):
            loss = F.cross_entropy(logits(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found.append([*losses, norm.item()])
    states = {name: torch.zeros_like(x) for name, x in ours.state_dict().items()}  # biases of experts have none
    mine, expected = split(config, states | gradients[0]), gradients[2]
    for name, gradient in expected.items():
        # A bias of keys has no gradient but rounding errors.
        assert (mine[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-2), name
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][1] < found[0][0]


ROPE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rope_scaling_factor": None,
    "rotary_seq_len_interpolation_factor": None,
    **{field.name: field.default for field in dataclasses.fields(DecoderConfig) if "yarn_" in field.name},
    **{"mscale": 1.0, "mscale_all_dim": 0.0},
}
OTHERS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True},
    "untied": {"tie_embeddings": False},
    "one group": {"num_query_groups": 1},
    "a group per head": {"num_query_groups": 4},
    "norms": {"norm_epsilon": 1e-3},
    "narrow": {"ffn_hidden_size": 20},
    "a window": {"window_size": 3},
    "no window": {"window_size": None, "window_attn_skip_freq": None},
    "base": {"rotary_base": 1234},
    "no scaling": ROPE,
    "llama3": ROPE | {"rope_scaling_factor": 4.0},
    "llama3 from 16 tokens": ROPE | {"rope_scaling_factor": 4.0, "yarn_original_context": 16},
    "attention biases": {"attention_bias": True, "add_qkv_bias": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sequential": {"use_parallel_residual": False},
    "linear": ROPE | {"rotary_seq_len_interpolation_factor": 4.0},
    "yarn": ROPE | YARN_FIELDS | {"position_embedding_type": "yarn"},
    "rope, scores scaled as YaRN's": {"position_embedding_type": "rope", "rope_scaling_factor": None},
    "half rotary": {"rotary_percent": 0.25},
    "top 1 more": {"moe": {"router_topk": 4}},
    "more experts": {"moe": {"num_experts": 12}},
    "weights": {"moe": {"topk_scaling_factor": 0.5}},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_families_in_other_settings_are_transformers(name, tmp_path):
    """Logits, gradients, and bits there and back, in each setting that the family has."""
    compared = []
    for setting, changes in OTHERS.items():
        try:
            if "moe" in changes:
                changes = {"moe": dataclasses.replace(CONFIGS[name].moe, **changes["moe"])}
            config = dataclasses.replace(CONFIGS[name], **changes)
            to_hf_config(config)
        except (ValueError, TypeError):  # not of this family
            continue
        test_every_weight_of_both_sides_has_its_counterpart_and_keeps_its_bits(config, tmp_path / setting)
        test_a_training_step_is_transformers(config)
        compared.append(setting)
    assert len(compared) >= 4, compared


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
    ("name", "weight", "config"),
    [
        ("gpt", {"transformer.h.1.attn.c_attn.weight": lambda x: x.roll(8, dims=1)}, {}),  # the next head's
        ("gpt", {"transformer.h.0.ln_1.bias": torch.zeros_like}, {}),
        ("llama-grouped", {"model.layers.1.self_attn.k_proj.weight": lambda x: x.flip(0)}, {}),
        ("llama", {"model.layers.0.mlp.up_proj.weight": lambda x: x + 1e-2}, {}),
        ("qwen2", {"model.layers.1.self_attn.k_proj.bias": torch.zeros_like}, {}),
        ("qwen3", {"model.layers.0.self_attn.q_norm.weight": torch.ones_like}, {}),
        ("llama-grouped", {}, {"rope_theta": 10000.0}),
        ("llama-grouped", {}, {"rope_scaling": None}),
        ("llama-grouped", {}, {"rms_norm_eps": 1e-2}),
        ("mistral", {}, {"sliding_window": 5}),  # ours is 5 tokens and the token itself
        ("mistral", {}, {"sliding_window": None}),
        ("qwen2-window", {}, {"max_window_layers": 1}),
        ("llama-yarn", {}, {"rope_scaling": YARN | {"beta_slow": 1.0}}),
        ("llama-yarn", {}, {"rope_scaling": YARN | {"attention_factor": 1.0}}),
    ],
)
def test_a_wrong_weight_or_configuration_is_noticed(name, weight, config):
    ours, hf_config = CONFIGS[name], to_hf_config(CONFIGS[name]) | config
    parameters = dict(build(ours).named_parameters())
    tensors = {key: weight.get(key, lambda x: x)(x.detach()) for key, x in split(ours, parameters).items()}
    with pytest.raises(ValueError, match="transformers' logits differ from ours"):
        compare(build_empty(ours), parameters.__getitem__, hf_config, tensors.__getitem__, POSITIONS)
