"""Activation checkpointing: keep less of the forward pass, and compute the rest again in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # defines the operator torch_attn._varlen_attn
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .transformer import Transformer

# What "selective" keeps: results of linear layers and fused attention, which are expensive to compute for their size.
# Attention that is not fused (on a CPU with dropout) uses bmm, whose results grow with the square of the sequence.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def apply_activation_checkpointing(
    model: Transformer,
    granularity: str,
    method: str | None = None,
    num_layers: int | None = None,
    splits_backward: bool = False,
) -> None:
    """Checkpoint blocks of ``model`` in place; call it before ``fully_shard`` and ``compile``.

    ``forward`` of a block is replaced, not the block, so that modules and parameters keep their names.

    Args:
        granularity: "full" keeps only the input of a checkpointed block. "selective" also keeps the results of linear
            layers and fused attention, in every block.
        method: which blocks, for "full" only. None: all. "uniform": every k-th. (Megatron makes k blocks one
            checkpoint; here each block gathers its own parameters, so one never spans two.) "block": the first k.
        num_layers: k of ``method``; default 1.
        splits_backward: a backward pass runs in parts, each of which computes the block again; not with ``compile``.

    Raises ValueError for any other combination.
    """
    blocks, options = list(model.layers), dict[str, Any]()
    if granularity == "selective":
        if method is not None or num_layers is not None:
            raise ValueError("recompute_method and recompute_num_layers need recompute_granularity full, not selective")
        contexts = _contexts_for_parts if splits_backward else create_selective_checkpoint_contexts
        options["context_fn"] = partial(contexts, _keep_or_recompute)
    elif granularity != "full":
        raise ValueError(f"recompute_granularity is {granularity!r}; choose full or selective")
    elif method is None:
        if num_layers is not None:
            raise ValueError("recompute_num_layers needs recompute_method uniform or block")
    else:
        k = 1 if num_layers is None else num_layers
        if not 1 <= k <= len(blocks):
            raise ValueError(f"recompute_num_layers is {k}; the model has {len(blocks)} layers")
        if method not in ("uniform", "block"):
            raise ValueError(f"recompute_method is {method!r}; choose uniform or block")
        blocks = blocks[::k] if method == "uniform" else blocks[:k]
    for block in blocks:
        block.forward = _checkpointed(block.forward, **options)


def _checkpointed(forward: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    # A function, not a partial: torch.compile silently leaves a partial of checkpoint uncompiled.
    def checkpointed_forward(*inputs: Tensor) -> Tensor:
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
