"""Activation checkpointing: keep less of the forward pass, and compute the rest again in the backward pass."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # defines the operator torch_attn._varlen_attn
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .moe import MoE
from .transformer import Transformer

# "selective" keeps results of linear layers and fused attention, which are expensive to compute for their size.
# Attention that is not fused (on a CPU with dropout) uses bmm, whose results grow with the square of the sequence.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def apply_activation_checkpointing(
    model: Transformer,
    granularity: str,
    method: str | None = "uniform",
    num_layers: int | None = 1,
    modules: Sequence[str] = (),
    splits_backward: bool = False,
) -> None:
    """Checkpoint blocks of ``model`` in place; call it before ``fully_shard`` and ``compile``.

    ``forward`` of a block is replaced, not the block, so that modules and parameters keep their names.

    Args:
        granularity: "full" keeps only the input of a checkpointed block. "selective" also keeps the results of linear
            layers and fused attention, in every block; with ``modules`` all but what these compute from their inputs.
        method: which blocks, for "full" only. "uniform": every k-th. (Megatron makes k blocks one
            checkpoint; here each block gathers its own parameters, so one never spans two.) "block": the first k.
        num_layers: k of ``method``.
        modules: of "selective" only: some of "core_attn", "mlp", "moe" and "shared_experts", as in Megatron.
        splits_backward: a backward pass runs in parts, each of which computes the block again; not with ``compile``.

    ``arguments/resolve_compute.py`` and ``check_recomputed_modules`` check all of these.
    """
    assert granularity in ("full", "selective") and method in ("uniform", "block", None)
    blocks, options = list(model.layers), dict[str, Any]()
    if granularity == "full":
        blocks = blocks[::num_layers] if method == "uniform" else blocks[:num_layers]
    elif modules:
        _checkpoint_modules(blocks, modules)
        return
    else:
        contexts = _contexts_for_parts if splits_backward else create_selective_checkpoint_contexts
        options["context_fn"] = partial(contexts, _keep_or_recompute)
    for block in blocks:
        block.forward = _checkpointed(block.forward, **options)


def recomputed_modules(block: nn.Module, name: str) -> list[nn.Module]:
    """Return what a name of ``recompute_modules`` stands for in a block: one module or none."""
    mlp = getattr(block, "mlp", None)
    if name == "core_attn":
        found = getattr(block, "self_attention", None)
    elif name == "shared_experts":
        found = getattr(mlp, "shared_expert", None)
    else:
        found = mlp if isinstance(mlp, MoE) == (name == "moe") else None
    return [] if found is None else [found]


def check_recomputed_modules(model: Transformer, names: Sequence[str]) -> None:
    """Raise ValueError for a name of ``recompute_modules`` that no block of the whole model has."""
    for name in names:
        if not any(recomputed_modules(block, name) for block in model.layers):
            raise ValueError(f"--recompute-modules {name}: no block of this model has it; leave it out")


def _checkpoint_modules(blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Checkpoint these modules, of which a pipeline's stage may have none."""
    for name in dict.fromkeys(names):
        method = "attend" if name == "core_attn" else "forward"  # not the linear layers around attention
        for module in (module for block in blocks for module in recomputed_modules(block, name)):
            setattr(module, method, _checkpointed(getattr(module, method)))


def _checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # A function, not a partial: torch.compile silently leaves a partial of checkpoint uncompiled.
    def checkpointed_forward(*inputs: Tensor) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    return checkpointed_forward


def _contexts_for_parts(policy: Any) -> tuple[AbstractContextManager, AbstractContextManager]:
    keeping, recomputing = create_selective_checkpoint_contexts(policy)
    return keeping, _ForEachPart(recomputing)


class _ForEachPart(AbstractContextManager):
    """Offer what a selective checkpoint kept to every recomputation; torch's own context drops it after the first."""

    def __init__(self, recomputing: Any) -> None:
        self._recomputing, self._kept = recomputing, recomputing.storage

    def __enter__(self) -> None:
        self._recomputing.storage = {operator: copy.copy(results) for operator, results in self._kept.items()}
        self._recomputing.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recomputing.__exit__(*error)


def _keep_or_recompute(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
