"""--use-apex changes how fast a run is, not what it computes, keeps or saves."""

import importlib
import inspect
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from megatron_zpp.models.layers import NORMS, replace_norms
from megatron_zpp.optim.apex import apex_norms
from megatron_zpp.optim.optimizer import build_optimizer
from megatron_zpp.optim.schedule import set_lr_and_weight_decay
from megatron_zpp.settings.groups import OptimizerSettings
from tests.optim import nvidia_apex
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import flags, train_each
from tests.zeropp.training_on_ranks import Net, shards

STEPS = 3


def _train(model, optimizer, steps):
    for step in steps:
        set_lr_and_weight_decay(optimizer, 0.01, 0.1)
        x = torch.linspace(-1, 1, 4 * 24).view(4, 24) + step + dist.get_rank()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return shards(model)


def _build(kind, use_apex):
    model = Net(num_blocks=2)
    for module in (*model.blocks, model):
        fully_shard(module)
    with nvidia_apex.installed():
        optimizer = build_optimizer(model, OptimizerSettings(optimizer=kind, lr=0.1, use_apex=use_apex))
    return model, optimizer


def _in_turn(kind):
    """Weights after training without Apex, with it, and where the run resumes with the other one."""
    results = {}
    for before in (False, True):
        for after in (before, not before):
            model, optimizer = _build(kind, before)
            _train(model, optimizer, range(STEPS))
            saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
            state = get_optimizer_state_dict(model, optimizer)["state"]
            model, optimizer = _build(kind, after)
            for name, value in model.state_dict().items():
                value.copy_(saved[name])
            filled = get_optimizer_state_dict(
                model, optimizer
            )  # as a checkpoint is loaded: it fills a new one's tensors
            for name, values in filled["state"].items():
                for key, value in values.items():
                    value.copy_(state[name][key])
            set_optimizer_state_dict(model, optimizer, filled)
            names = {f"{name}.{key}": value.shape for name, values in state.items() for key, value in values.items()}
            results[before, after] = _train(model, optimizer, range(STEPS, 2 * STEPS)), names
    model, optimizer = _build(kind, False)
    return results, _train(model, optimizer, range(2 * STEPS))


@pytest.fixture(scope="module")
def found():
    return run_in_turn(2, {kind: partial(_in_turn, kind) for kind in ("adam", "sgd")})


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_run_resumes_with_apex_and_without_as_if_it_had_not_stopped(found, kind):
    for results, expected in found[kind]:
        (_, names), *_ = results.values()
        assert names
        for how, (weights, saved) in results.items():
            assert saved == names, how
            for weight, wanted in zip(weights, expected, strict=True):
                torch.testing.assert_close(
                    weight, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, how=how: f"{how}: {text}"
                )


@pytest.mark.parametrize("kind", NORMS)
def test_norms_compute_and_save_the_same(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), NORMS[kind](6, eps=1e-3))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    names, x = list(model.state_dict()), torch.randn(5, 6)
    expected = model(x)
    calls = []

    def counted(function, *arguments):
        calls.append(function)
        return function(*arguments)

    with nvidia_apex.installed():
        replace_norms(model, *(partial(counted, norm) for norm in apex_norms()))
    assert torch.equal(model(x), expected) and len(calls) == 1
    assert list(model.state_dict()) == names
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_signatures_that_are_recorded_are_those_of_apex_where_it_is_installed():
    optimizers = pytest.importorskip("apex.optimizers", reason="NVIDIA Apex is not installed")
    norms = pytest.importorskip("apex.normalization.fused_layer_norm", reason="NVIDIA Apex is not installed")
    for name in ("FusedAdam", "FusedSGD"):
        for method in ("__init__", "zero_grad", "step"):
            signatures = [inspect.signature(getattr(getattr(m, name), method)) for m in (optimizers, nvidia_apex)]
            assert [*signatures[0].parameters] == [*signatures[1].parameters], (name, method)
    for name in ("fused_layer_norm_affine", "fused_rms_norm_affine"):
        assert inspect.signature(getattr(norms, name)) == inspect.signature(getattr(nvidia_apex, name))


def test_torchs_norms_take_the_arguments_that_are_given_to_apexs():
    x, weight, bias = torch.randn(3, 4), torch.randn(4), torch.randn(4)
    with nvidia_apex.installed():
        layer_norm, rms_norm = apex_norms()
    assert layer_norm(x, (4,), weight, bias, 0.1).equal(F.layer_norm(x, (4,), weight, bias, 0.1))
    assert rms_norm(x, (4,), weight, 0.1).equal(F.rms_norm(x, (4,), weight, 0.1))


def test_a_machine_without_a_gpu_is_told_so():
    with nvidia_apex.installed(has_gpu=False):
        with pytest.raises(ValueError, match="--use-apex needs a GPU, and torch sees none: leave it out"):
            apex_norms()


def _resumed(data, folder):
    """Losses of a run whose second half has Apex's kernels, those of one without them, and calls of Apex's norm."""
    argv = partial(flags, data, length="--train-iters 4")
    before = train_each({"run": argv(f"--save {folder} --save-interval 2 --exit-interval 2")})["run"]["lm loss"]
    with nvidia_apex.installed():
        fused = importlib.import_module("apex.normalization.fused_layer_norm")
        with patch.object(fused, "fused_layer_norm_affine", side_effect=fused.fused_layer_norm_affine) as norm:
            after = train_each({"run": argv(f"--load {folder} --use-apex")})["run"]["lm loss"]
    return before + after, train_each({"run": argv()})["run"]["lm loss"], norm.call_count


def test_the_trainer_goes_on_with_apex_where_it_stopped_without(data, tmp_path):
    for losses, whole, calls in run_ranks(2, _resumed, data, str(tmp_path)):
        assert losses == pytest.approx(whole, rel=1e-4) and len(losses) == 4
        assert calls >= 2 * 2  # norms and steps
