"""Stands in for NVIDIA Apex, which needs a GPU: the names that we use, by the signatures of its sources, in torch.

Signatures and what state is kept: github.com/NVIDIA/apex at 6424da3b4faa6c8f062da4a48c424fff3f02d42d (July 8, 2026),
apex/optimizers/fused_adam.py and fused_sgd.py, apex/normalization/fused_layer_norm.py, csrc/amp_C_frontend.cpp.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_zpp.optim import apex

# amp_C, the compiled part


def multi_tensor_adam(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
):
    for gradient, parameter, mean, square in zip(*tensor_lists, strict=True):
        for tensor in (gradient, parameter, mean, square):
            assert type(tensor) in (Tensor, torch.nn.Parameter), "a kernel reads raw memory"
        assert mode == 1  # decoupled weight decay
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        update = (mean / corrections[0]) / ((square / corrections[1]).sqrt() + epsilon)
        parameter.data.sub_(lr * (update + weight_decay * parameter.data))


def multi_tensor_sgd(
    chunk_size, noop_flag, tensor_lists, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale
):
    for gradient, parameter, buffer in zip(*tensor_lists, strict=True):
        assert not isinstance(gradient, DTensor), "a kernel reads raw memory"
        scaled = gradient * scale + (0 if wd_after_momentum else wd * parameter.data)
        buffer.copy_(scaled if first_run else momentum * buffer + (1 - dampening) * scaled)
        parameter.data.sub_(lr * buffer)


# apex.optimizers


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.adam_w_mode = int(adam_w_mode)
        self.multi_tensor_adam = multi_tensor_adam

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in used:
                if not self.state[parameter]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][name] = torch.zeros_like(parameter.data).float()
            moments = ([self.state[p][name] for p in used] for name in ("exp_avg", "exp_avg_sq"))
            lists = [[p.grad.data for p in used], [p.data for p in used], *moments]
            settings = (group["eps"], group["step"], self.adam_w_mode, int(group["bias_correction"]))
            if used:
                self.multi_tensor_adam(
                    2048 * 32, None, lists, group["lr"], *group["betas"], *settings, group["weight_decay"]
                )


class FusedSGD(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        wd_after_momentum=False,
        materialize_master_grads=True,
        set_grad_none=False,
    ):
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults)
        self.multi_tensor_sgd = multi_tensor_sgd

    def zero_grad(self):
        super().zero_grad()

    def step(self, closure=None):
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            is_first = True
            for parameter in used:
                is_first = "momentum_buffer" not in self.state[parameter]
                if is_first:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.data)
            lists = [[p.grad for p in used], used, [self.state[p]["momentum_buffer"] for p in used]]
            settings = (group["weight_decay"], group["momentum"], group["dampening"], group["lr"], group["nesterov"])
            if used:
                self.multi_tensor_sgd(2048 * 32, None, lists, *settings, is_first, False, 1.0)


# apex.normalization.fused_layer_norm


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    assert type(input) is Tensor
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    assert type(input) is Tensor
    return F.rms_norm(input, normalized_shape, weight, eps)


@contextmanager
def installed(has_gpu: bool = True) -> Iterator[None]:
    """Let imports find all this, and ``--use-apex`` a GPU."""
    modules = {name: ModuleType(name) for name in ("apex", "amp_C", "fused_layer_norm_cuda")}
    for name, contents in {
        "apex.optimizers": (FusedAdam, FusedSGD),
        "apex.normalization": (),
        "apex.normalization.fused_layer_norm": (fused_layer_norm_affine, fused_rms_norm_affine),
    }.items():
        modules[name] = ModuleType(name)
        for each in contents:
            setattr(modules[name], each.__name__, each)
    torch_there = ModuleType("torch")
    torch_there.__dict__.update(vars(torch), cuda=SimpleNamespace(is_available=lambda: has_gpu))
    with patch.dict(sys.modules, modules), patch.object(apex, "torch", torch_there):
        yield
