"""The optimizer, for plain parameters and for FSDP2's DTensors alike.

Parameters are fp32 masters (FSDP2 casts copies of them for computing), so no separate main parameters exist.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_zpp.optim.gradients import local_part
from megatron_zpp.settings.groups import OptimizerSettings


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW or SGD with momentum over the trainable parameters of ``model``.

    Two parameter groups, by Megatron's rule: no weight decay on biases and 1-D parameters (norms), decay on everything
    else, embeddings included. ``set_lr_and_weight_decay`` moves both along the schedule. AdamW's weight decay is
    decoupled; SGD's is torch's, an L2 term in the gradient.

    Args:
        model: already sharded; its parameters keep their identity afterwards.
        settings: with ``use_apex``, NVIDIA Apex's fused kernels run in place of torch's.

    Raises:
        ValueError: no trainable parameter, or ``use_apex`` without a usable NVIDIA Apex.
    """
    groups = _parameter_groups(model)
    lr = settings.lr if settings.lr is not None else 0.0
    betas = (settings.adam_beta1, settings.adam_beta2)
    if settings.use_apex:
        return _apex_optimizer(groups, settings, lr)
    if settings.optimizer == "adam":
        # One fused kernel per group; torch has one for CPU and CUDA, and it takes DTensors.
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=settings.adam_eps, fused=True)
    if settings.optimizer == "sgd":
        # DTensor knows no fused SGD (torch 2.13).
        return torch.optim.SGD(groups, lr=lr, momentum=settings.sgd_momentum, foreach=True)
    raise ValueError(f"--optimizer {settings.optimizer} is not one of adam, sgd")


def set_lr_and_weight_decay(optimizer: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """Set this step's values. Groups built without weight decay stay without."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():  # a tied weight comes once
        if not parameter.requires_grad:
            continue
        without = parameter.ndim <= 1 or name.rsplit(".", 1)[-1] == "bias"
        (no_decay if without else decay).append(parameter)
    groups = [dict(params=decay, decays=True), dict(params=no_decay, decays=False, weight_decay=0.0)]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("the model has no trainable parameter")
    return groups


def _apex_optimizer(groups: list[dict[str, Any]], settings: OptimizerSettings, lr: float) -> torch.optim.Optimizer:
    # The package called `apex` on PyPI is an unrelated one, so an import that works proves nothing.
    name = "FusedAdam" if settings.optimizer == "adam" else "FusedSGD"
    kernel_name = "multi_tensor_adam" if settings.optimizer == "adam" else "multi_tensor_sgd"
    try:
        optimizer_class = getattr(importlib.import_module("apex.optimizers"), name)
        importlib.import_module("amp_C")  # the compiled part, which an Apex built without --cuda_ext lacks
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--use-apex: NVIDIA Apex with its CUDA extensions is not installed ({error}). Build it from "
            "https://github.com/NVIDIA/apex (not `pip install apex`, which is another project), or leave --use-apex "
            "out: torch's fused optimizer is the default"
        ) from error
    arguments: dict[str, Any] = dict(lr=lr, weight_decay=0.0)
    if settings.optimizer == "adam":
        arguments |= dict(betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps, adam_w_mode=True)
    else:
        arguments |= dict(momentum=settings.sgd_momentum)
    optimizer = optimizer_class(groups, **arguments)
    setattr(optimizer, kernel_name, _on_local_tensors(getattr(optimizer, kernel_name)))
    return cast(torch.optim.Optimizer, optimizer)


def _on_local_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Apex's kernel, handed the local shards: it reads raw memory, which a DTensor does not have."""

    def run(chunk_size: int, overflow: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *arguments: Any) -> Any:
        return kernel(chunk_size, overflow, [[local_part(t) for t in tensors] for tensors in tensor_lists], *arguments)

    return run
