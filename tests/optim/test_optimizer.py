"""Optimizers: their groups, settings, state and steps as the formulas say."""

import copy

import pytest
import torch
from torch import nn

from megatron_zpp.optim.optimizer import OPTIMIZERS, build_optimizer
from megatron_zpp.optim.schedule import set_lr_and_weight_decay
from megatron_zpp.settings.groups import OptimizerSettings, all_flags
from megatron_zpp.zeropp import ZeroPPConfig
from tests.ranks import run_ranks
from tests.zeropp.training_on_ranks import shard


class Model(nn.Module):
    """Sizes that 4 ranks cannot share evenly, a tied weight, and every kind of parameter that has a decay rule."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3)
        self.output_layer = nn.Linear(3, 7)
        self.output_layer.weight = self.word_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.norm(self.word_embeddings(tokens)))


def build_model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_no_decay_on_biases_and_norms_and_a_tied_weight_once() -> None:
    model = build_model()
    decay, no_decay = build_optimizer(model, OptimizerSettings(lr=0.1)).param_groups
    assert [id(p) for p in decay["params"]] == [id(model.word_embeddings.weight)]
    expected = (model.norm.weight, model.norm.bias, model.output_layer.bias)
    assert {id(p) for p in no_decay["params"]} == {id(p) for p in expected}


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_weight_decay_and_learning_rate_of_the_step(name: str) -> None:
    model = build_model()
    before = copy.deepcopy(model)
    optimizer = build_optimizer(model, OptimizerSettings(optimizer=name, lr=9.0, weight_decay=9.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_lr_and_weight_decay(optimizer, lr=0.1, weight_decay=0.5)
    optimizer.step()
    # With no gradient only weight decay moves parameters: by lr * decay, in the first group alone.
    torch.testing.assert_close(model.word_embeddings.weight, before.word_embeddings.weight * (1 - 0.1 * 0.5))
    assert torch.equal(model.norm.weight, before.norm.weight)
    assert torch.equal(model.output_layer.bias, before.output_layer.bias)


def _check_kept_state() -> None:
    for name, kind in OPTIMIZERS.items():
        for momentum in (0.0, 0.9):
            settings = OptimizerSettings(optimizer=name, lr=0.1, sgd_momentum=momentum)
            model = build_model()
            model.layers = nn.ModuleList([nn.Linear(3, 3)])  # a hidden matrix
            optimizer = build_optimizer(model, settings, shard(model, ZeroPPConfig()))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            for parameter in model.parameters():
                kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
                is_hidden_matrix = parameter is model.layers[0].weight
                expected = kind.state_tensors(settings, is_hidden_matrix)
                assert sum(value.shape == parameter.shape for value in kept) == expected, name


def test_every_choice_is_there_and_keeps_as_much_state_as_it_says() -> None:
    assert set(all_flags()["optimizer"].choices or ()) == OPTIMIZERS.keys()
    run_ranks(1, _check_kept_state)
    names = [name.lower() for kind in OPTIMIZERS.values() for name in kind.deepspeed_names]
    assert len(names) == len(set(names))


def test_adam_takes_its_settings() -> None:
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    settings = OptimizerSettings(lr=0.1, weight_decay=0.0, adam_beta1=0.0, adam_beta2=0.0, adam_eps=1.0)
    optimizer = build_optimizer(weight, settings)
    set_lr_and_weight_decay(optimizer, 0.1, 0.0)
    weight.weight.grad = torch.tensor([[3.0]])
    optimizer.step()
    assert weight.weight.item() == pytest.approx(-0.1 * 3 / (3 + 1))  # lr * g / (|g| + eps)


def test_decoupled_learning_rates_are_of_embeddings_and_output_layer_alone():
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word_embeddings, self.norm = nn.Embedding(7, 3), nn.LayerNorm(3)
            self.layer, self.output_layer = nn.Linear(3, 3), nn.Linear(3, 7)

    def step(decoupled_lr: float | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Ends()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = build_optimizer(model, OptimizerSettings(optimizer="sgd", lr=1.0, decoupled_lr=decoupled_lr))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        set_lr_and_weight_decay(optimizer, 0.5, 0.0, decoupled_lr)
        optimizer.step()
        return {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}

    for decoupled_lr in 0.125, None:
        for name, moved in step(decoupled_lr).items():
            is_end = name in ("word_embeddings.weight", "output_layer.weight")
            expected = decoupled_lr if is_end and decoupled_lr is not None else 0.5
            torch.testing.assert_close(moved, torch.full_like(moved, expected))
