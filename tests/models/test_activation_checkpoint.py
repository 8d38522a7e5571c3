"""Activation checkpointing: equal gradients, less kept, the promised things computed again."""

import dataclasses
from collections import Counter

import pytest
import torch

from megatron_zpp.models.activation_checkpoint import apply_activation_checkpointing, check_recomputed_modules
from megatron_zpp.models.moe import MoEConfig
from tests.collectives import Calls
from tests.models.configs import gpt_config
from tests.models.test_models import CONFIGS, GPT_CONFIG, batch, build

ATTENTION_AND_MLPS = ("selective", None, None, ("core_attn", "mlp"))
CHOICES = pytest.mark.parametrize(
    "choice",
    [("full",), ("full", "uniform", 2), ("full", "block", 1), ("selective",), ATTENTION_AND_MLPS],
    ids=lambda c: "-".join(map(str, c)),
)


def gradients(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)  # dropout
    tokens, labels = batch()
    model(tokens, labels).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@CHOICES
@CONFIGS
def test_recomputation_changes_neither_gradients_nor_names(config, choice):
    config = dataclasses.replace(config, hidden_dropout=0.2, attention_dropout=0.1)
    expected = gradients(build(config))
    model = build(config)
    apply_activation_checkpointing(model, *choice)
    result = gradients(model)
    assert list(result) == list(expected)
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize("modules", [(), ("moe",), ("shared_experts", "mlp"), ("moe", "shared_experts", "core_attn")])
def test_recomputing_experts_changes_no_bit_of_a_gradient(modules):
    experts = MoEConfig(4, 32, shared_expert_size=24, aux_loss_coeff=0.1)
    config = dataclasses.replace(GPT_CONFIG, moe=experts, moe_layer_freq="[0,1]", add_bias_linear=False)

    def all_gradients(model):
        tokens, labels = batch()
        output = model(tokens, labels)
        (output.losses.mean() + sum(output.auxiliary.values())).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected, model = all_gradients(build(config).bfloat16()), build(config).bfloat16()
    apply_activation_checkpointing(model, "selective", modules=modules)
    for name, gradient in all_gradients(model).items():
        assert torch.equal(gradient, expected[name]), name


def recomputed(*choice) -> tuple[int, int, int]:
    """(linear layers, attentions, GELUs) that the backward pass of a GPT with 4 layers computes again."""
    config = gpt_config(4, 48, 4, 130, 24, attention_dropout=0.0, hidden_dropout=0.0)
    model = build(config)
    tokens, labels = batch()
    if choice:
        apply_activation_checkpointing(model, *choice)
    loss = model(tokens, labels).mean()
    with Calls() as operators:
        loss.backward()
    counts = Counter(function.overloadpacket.__name__ for function, _ in operators.calls)
    return counts["addmm"], counts["_scaled_dot_product_flash_attention_for_cpu"], counts["gelu"]


def test_what_is_computed_again():
    assert recomputed() == (0, 0, 0)
    # The very last linear layer of a block is needed by nothing in backward, so it need not be computed again.
    linears, attentions, gelus = recomputed("full")
    assert linears in (12, 16) and (attentions, gelus) == (4, 4)
    assert recomputed("full", "uniform", 2)[1:] == (2, 2)
    assert recomputed("full", "uniform", 3)[1:] == (2, 2)  # layers 0 and 3
    assert recomputed("full", "block", 3)[1:] == (3, 3)
    assert recomputed("selective") == (0, 0, 4)
    assert recomputed("selective", None, None, ("core_attn",)) == (0, 4, 0)
    assert recomputed("selective", None, None, ("mlp",)) == (4, 0, 4)  # the first linear layer of each


def test_a_module_that_no_block_has_is_refused():
    with pytest.raises(ValueError, match="--recompute-modules moe: no block of this model has it"):
        check_recomputed_modules(build(GPT_CONFIG), ("mlp", "moe"))
