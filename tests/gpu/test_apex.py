"""NVIDIA Apex's own kernels beside torch's, where both are: built as docs/how-to/install.md says."""

import pytest
import torch
from torch import nn

from megatron_zpp.models.layers import NORMS, replace_norms
from megatron_zpp.optim.apex import apex_norms
from megatron_zpp.optim.optimizer import build_optimizer
from megatron_zpp.optim.schedule import set_lr_and_weight_decay
from megatron_zpp.settings.groups import OptimizerSettings

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("amp_C", reason="needs NVIDIA Apex")


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_its_optimizers_step_as_torchs(kind):
    weights = []
    for use_apex in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, device="cuda")
        optimizer = build_optimizer(model, OptimizerSettings(optimizer=kind, lr=0.1, use_apex=use_apex))
        for _ in range(3):
            set_lr_and_weight_decay(optimizer, 0.01, 0.1)
            model(torch.ones(4, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_norms_compute_as_torchs(kind, dtype):
    results = []
    for use_apex in (False, True):
        torch.manual_seed(0)
        norm = nn.Sequential(NORMS[kind](256, eps=1e-5).to("cuda", dtype))
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        if use_apex:
            replace_norms(norm, *apex_norms())
        x = torch.randn(3, 7, 256, device="cuda", dtype=dtype, requires_grad=True)
        y = norm(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in norm.parameters())])
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for ours, apexs in zip(*results, strict=True):
        torch.testing.assert_close(ours, apexs, rtol=tolerance, atol=tolerance * float(ours.abs().max()))
