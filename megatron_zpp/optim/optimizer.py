"""The optimizer, over plain parameters or FSDP2's DTensors: fp32 masters, of which FSDP2 casts copies."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_zpp.settings.groups import OptimizerSettings
from megatron_zpp.zeropp import Muon, ZeroPP
from megatron_zpp.zeropp.api import local_part


@dataclass(frozen=True)
class OptimizerKind:
    """One choice of ``--optimizer``."""

    torch_class: Callable[..., torch.optim.Optimizer]
    arguments: Callable[[OptimizerSettings], dict[str, Any]]  # arguments of the optimizer's class
    # fp32 tensors of a parameter's shape that it keeps, by whether the parameter is a hidden matrix
    state_tensors: Callable[[OptimizerSettings, bool], int]
    deepspeed_names: tuple[str, ...] = ()  # its names in a DeepSpeed file, in upper or lower case
    is_muon: bool = False  # takes hidden matrices in a group of their own, and the model's collectives


OPTIMIZERS = {
    "adam": OptimizerKind(
        # One fused kernel per group; torch has one for CPU and CUDA, and it takes DTensors.
        torch_class=partial(torch.optim.AdamW, fused=True),
        arguments=lambda settings: dict(betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps),
        state_tensors=lambda settings, is_hidden_matrix: 2,
        deepspeed_names=("Adam", "AdamW"),
    ),
    "sgd": OptimizerKind(
        # DTensor knows no fused SGD (torch 2.13).
        torch_class=partial(torch.optim.SGD, foreach=True),
        arguments=lambda settings: dict(momentum=settings.sgd_momentum),
        state_tensors=lambda settings, is_hidden_matrix: int(settings.sgd_momentum > 0),
        deepspeed_names=("SGD",),
    ),
    "muon": OptimizerKind(
        torch_class=Muon,
        arguments=lambda settings: dict(
            momentum=settings.muon_momentum,
            nesterov=settings.muon_use_nesterov,
            adjust_lr_fn=settings.muon_scale_mode,
            extra_scale_factor=settings.muon_extra_scale_factor,
            period=settings.muon_period or None,
            momentum_bits=settings.muon_momentum_bits,
            stale_rows=settings.muon_stale_rows,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
        ),
        state_tensors=lambda settings, is_hidden_matrix: 1 if is_hidden_matrix else 2,
        is_muon=True,
    ),
}


def build_optimizer(
    model: nn.Module, settings: OptimizerSettings, zeropp: ZeroPP | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that ``settings`` name, over the trainable parameters of ``model``, already sharded.

    Two parameter groups, by Megatron's rule: no weight decay on biases and 1-D parameters (norms), decay on everything
    else, embeddings included. With ``decoupled_lr`` word embeddings and output layer are a third group, and Muon's
    matrices are one more. ``set_lr_and_weight_decay`` sets the values of all. AdamW's weight decay is decoupled; SGD's
    is torch's, an L2 term in the gradient. Each group is divided further by the ranks that share its parameters.

    zeropp: the model's collectives, which Muon needs. Raises ValueError without parameters.
    """
    kind = OPTIMIZERS[settings.optimizer]
    groups = _parameter_groups(model, settings.decoupled_lr is not None, kind.is_muon)
    arguments = dict(lr=settings.lr or 0.0, **kind.arguments(settings))
    if kind.is_muon:
        arguments["zeropp"] = zeropp
    return kind.torch_class(groups, **arguments)


_DECOUPLED = ("word_embeddings", "output_layer")  # the modules whose weights --decoupled-lr is for


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter of a ``Transformer`` is a matrix of one of its layers, which Muon takes."""
    return parameter.ndim == 2 and "layers" in name.split(".")


def state_numel(parameters: Iterable[tuple[str, Tensor]], settings: OptimizerSettings) -> int:
    """Count the fp32 elements of the optimizer's state for this rank's parts of these parameters."""
    tensors = OPTIMIZERS[settings.optimizer].state_tensors
    return sum(tensors(settings, is_hidden_matrix(name, p)) * local_part(p).numel() for name, p in parameters)


def _parameter_groups(model: nn.Module, decouples: bool, takes_matrices: bool) -> list[dict[str, Any]]:
    decay, no_decay, decoupled, matrices = [list[nn.Parameter]() for _ in range(4)]
    for name, parameter in model.named_parameters():  # a tied weight comes once
        if not parameter.requires_grad:
            continue
        module, _, last = name.rpartition(".")
        if parameter.ndim <= 1 or last == "bias":
            no_decay.append(parameter)
        elif takes_matrices and is_hidden_matrix(name, parameter):
            matrices.append(parameter)
        elif decouples and module.rpartition(".")[2] in _DECOUPLED:
            decoupled.append(parameter)
        else:
            decay.append(parameter)
    groups: list[dict[str, Any]] = [
        dict(params=decay, decays=True),
        dict(params=no_decay, decays=False, weight_decay=0.0),
        dict(params=decoupled, decays=True, decoupled=True),
    ]
    if takes_matrices:
        groups = [*(group | {"use_muon": False} for group in groups), dict(params=matrices, decays=True, use_muon=True)]
    # Torch's fused kernels take DTensors of one mesh at a time, and experts may have another mesh than the rest.
    parts: dict[tuple[int, DeviceMesh | None], list[nn.Parameter]] = {}
    for i, group in enumerate(groups):
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            parts.setdefault((i, mesh), []).append(parameter)
    if not parts:
        raise ValueError("the model has no trainable parameter")
    return [{**groups[i], "params": part} for (i, _), part in parts.items()]
