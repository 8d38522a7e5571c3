"""NVIDIA Apex's kernels for ``--use-apex``: optimizers and norms. Nothing that is saved shows that they were used."""

import importlib
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.zeropp.api import local_part


def import_apex(name: str, compiled: str) -> Any:
    """Import a module of Apex with what it needs compiled. Raises ValueError without a usable Apex, or a GPU."""
    # The package called `apex` on PyPI is an unrelated one, so an import that works proves nothing.
    try:
        importlib.import_module(compiled)  # which an Apex built without APEX_CUDA_EXT lacks
        module = importlib.import_module(name)
    except ImportError as error:
        missing = f"--use-apex: NVIDIA Apex with its CUDA extensions is not installed ({error})"
        raise ValueError(f"{missing}: build it from github.com/NVIDIA/apex, or leave it out") from error
    if not torch.cuda.is_available():
        raise ValueError("--use-apex needs a GPU, and torch sees none: leave it out")
    return module


def apex_optimizer(
    name: str, kernel: str, groups: list[dict[str, Any]], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """Build Apex's optimizer ``name``, with state as torch's has it. Raises ValueError without a usable Apex.

    kernel: the attribute that launches its kernel.
    """
    optimizer = getattr(import_apex("apex.optimizers", "amp_C"), name)(groups, weight_decay=0.0, **arguments)
    setattr(optimizer, kernel, _on_local_tensors(getattr(optimizer, kernel)))
    # Apex's own takes no ``set_to_none``, which loading a checkpoint gives.
    optimizer.zero_grad = MethodType(torch.optim.Optimizer.zero_grad, optimizer)
    if name == "FusedAdam":
        optimizer.register_step_pre_hook(_load_steps)
        optimizer.register_step_post_hook(_keep_steps)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _on_local_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Call Apex's kernel with local shards: it reads raw memory, which a DTensor does not have."""

    def run(chunk_size: int, overflow: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *arguments: Any) -> Any:
        return kernel(chunk_size, overflow, [[local_part(t) for t in tensors] for tensors in tensor_lists], *arguments)

    return run


# FusedAdam counts the steps of a group, which no checkpoint has; AdamW those of each parameter.


def _load_steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        states = [optimizer.state[parameter] for parameter in group["params"] if parameter in optimizer.state]
        group["step"] = max((int(state["step"]) for state in states if "step" in state), default=0)


def _keep_steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        step = torch.tensor(float(group["step"]))
        for parameter in group["params"]:
            if parameter in optimizer.state:
                optimizer.state[parameter]["step"] = step


def apex_norms() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return Apex's LayerNorm and RMSNorm, with the arguments of torch's. Raises ValueError without a usable Apex."""
    fused = import_apex("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda")
    return (
        lambda x, shape, weight, bias, eps: fused.fused_layer_norm_affine(x, weight, bias, shape, eps),
        lambda x, shape, weight, eps: fused.fused_rms_norm_affine(x, weight, shape, eps),
    )
