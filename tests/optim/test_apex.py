"""--use-apex changes how fast a run is, not what it computes, keeps or saves."""

import importlib
import inspect
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron_zpp.models.layers import NORMS, replace_norms
from megatron_zpp.optim.apex import apex_norms
from tests.optim import nvidia_apex
from tests.ranks import run_ranks
from tests.training.small_run import flags, train_each


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


def test_a_machine_without_a_gpu_is_told_so():
    with nvidia_apex.installed(has_gpu=False):
        with pytest.raises(ValueError, match="--use-apex needs a GPU, and torch sees none: leave it out"):
            apex_norms()


LOSSES = "lm loss", "params-norm"


def _resumed(data, folder, words):
    """Metrics of runs of which one half has Apex's kernels, those of a run without; and the calls of its norm."""
    argv = partial(flags, data, f"--log-params-norm {words}", length="--train-iters 4")
    halves = f"--save {folder}/plain --save-interval 2 --exit-interval 2", f"--load {folder}/plain --use-apex"
    swapped = f"{halves[0]} --use-apex".replace("plain", "apex"), f"--load {folder}/apex"
    with nvidia_apex.installed():
        fused = importlib.import_module("apex.normalization.fused_layer_norm")
        with patch.object(fused, "fused_layer_norm_affine", side_effect=fused.fused_layer_norm_affine) as norm:
            runs = [train_each({half: argv(half)})[half] for half in (*halves, *swapped)]
    whole = train_each({"": argv()})[""]
    resumed = [{key: runs[i][key] + runs[i + 1][key] for key in LOSSES} for i in (0, 2)]
    return resumed, {key: whole[key] for key in LOSSES}, norm.call_count


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_run_resumes_with_apex_and_without_as_if_it_had_not_stopped(data, tmp_path, optimizer):
    for resumed, whole, calls in run_ranks(2, _resumed, data, str(tmp_path), f"--optimizer {optimizer}"):
        for metrics in resumed:
            for key in LOSSES:
                assert metrics[key] == pytest.approx(whole[key], rel=1e-4) and len(whole[key]) == 4, key
        assert calls >= 2 * 2 * 2  # halves, norms and steps
