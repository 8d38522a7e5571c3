"""Cross-entropy of the vocabulary that never holds all logits at once."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .layers import capped, gather_tokens

# The fewest rows of the vocabulary whose logits are computed at once: large enough for matrix products.
VOCABULARY_BLOCK = 2048


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None, compiled: bool = False
) -> Tensor:
    """Cross entropy of each token: ``hidden`` [..., H], ``weight`` [V, H], ``labels`` int64 [...] -> fp32 [...].

    As in Megatron the matrix products are taken in the inputs' dtype and the softmax in fp32. The logits [..., V] never
    exist whole: both passes walk over blocks of the vocabulary. The loss of a label outside [0, V) is NaN. ``softcap``
    c turns a logit l into c * tanh(l / c). ``compiled``: by torch.compile, one kernel does what a block needs besides
    matrix products, without fp32 copies of logits, so that blocks are wider.

    Not ``torch.nn.functional.linear_cross_entropy`` (torch 2.13), because that one returns the losses in the inputs'
    dtype: in bf16 they keep two digits, and so do the gradients that come back for them.

    Under tensor parallelism ``weight`` is a DTensor and each rank has its rows; ``hidden`` is one too, whole or
    sharded along the sequence. Ranks exchange two numbers per token, never logits.
    """
    if isinstance(weight, DTensor):
        group = weight.device_mesh.get_group()
        return _LinearCrossEntropy.apply(gather_tokens(hidden), weight.to_local(), labels, softcap, group, compiled)
    return _LinearCrossEntropy.apply(hidden, weight, labels, softcap, None, compiled)


class _LinearCrossEntropy(torch.autograd.Function):
    """Blocks are rows of ``weight``, not tokens: one matrix product then completes a block's weight gradient, and only
    the gradient of ``hidden``, which is small, needs an fp32 accumulator."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        softcap: float | None,
        group: dist.ProcessGroup | None,
        compiled: bool,
    ) -> Tensor:
        """``group``: the ranks that hold the rows of the whole weight, ``weight`` of each, in their order."""
        tokens, whole_labels = hidden.flatten(0, -2), labels.flatten()  # [T, H], [T]
        labels = whole_labels if group is None else whole_labels - group.rank() * weight.shape[0]
        # The backward pass needs memory for the weights' gradient; before that, this pass may use as much. Operators
        # one by one would write and read all of it several times, which on CPUs takes twice as long as in caches.
        room = weight.nbytes if compiled and ctx.needs_input_grad[1] else 0
        width = _block_width(tokens, compiled, softcap, temporaries=1, room=room)
        columns, inside = _columns(labels, weight.shape[0], width)
        body = _compiled(_sums) if compiled else _sums
        blocks = zip(_blocks_of_logits(tokens, weight, width), columns, strict=True)
        log_sums, targets = zip(*(body(logits, column, softcap) for (_, logits), column in blocks), strict=True)
        log_sum = torch.stack(log_sums).logsumexp(dim=0)
        found = torch.where(inside, torch.stack(targets), torch.nan)  # [blocks, T]
        target = found.gather(0, inside.int().argmax(dim=0, keepdim=True)).squeeze(0)
        if group is not None:
            log_sum, target = _combine(log_sum, target, whole_labels // weight.shape[0], group)
        ctx.save_for_backward(hidden, weight, labels, log_sum)
        ctx.softcap, ctx.compiled = softcap, compiled
        shape = hidden.shape[:-1]
        return log_sum.view(shape) - target.view(shape)  # no view: FSDP2 warns of those

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:  # type: ignore[override]
        hidden, weight, labels, log_sum = ctx.saved_tensors
        tokens, grad = hidden.flatten(0, -2), grad.flatten()
        grad_tokens = torch.zeros(tokens.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        width = _block_width(tokens, ctx.compiled, ctx.softcap)
        columns, inside = _columns(labels, weight.shape[0], width)
        body = _compiled(_gradient_) if ctx.compiled else _gradient_
        blocks = zip(_blocks_of_logits(tokens, weight, width), columns, -inside.float(), strict=True)
        for (rows, logits), column, minus_one in blocks:
            body(logits, log_sum, column, minus_one, grad, ctx.softcap)
            grad_tokens += logits @ weight[rows]
            if grad_weight is not None:
                torch.mm(logits.t(), tokens, out=grad_weight[rows])
        return grad_tokens.to(hidden.dtype).view(hidden.shape), grad_weight, None, None, None, None


def _block_width(tokens: Tensor, compiled: bool, softcap: float | None, temporaries: int = 0, room: int = 0) -> int:
    """Return how many rows of the vocabulary make a block whose logits, and fp32 ``temporaries`` of their shape, take
    7.5 bytes * VOCABULARY_BLOCK per token, or ``room`` bytes where that is more.

    With compiled bodies 6, because all of it then exists beside the result of a product with the weights."""
    bytes_per_logit = tokens.dtype.itemsize
    if not compiled:  # else one kernel reads and writes the logits themselves
        fp32_copy = tokens.dtype != torch.float32
        bytes_per_logit += 4 * (fp32_copy + temporaries + (0 if softcap is None else 2))
    bytes_per_token = max((12 if compiled else 15) * VOCABULARY_BLOCK // 2, room // max(1, tokens.shape[0]))
    return max(VOCABULARY_BLOCK, bytes_per_token // bytes_per_logit // 64 * 64)  # matrix products want a multiple


def _blocks_of_logits(tokens: Tensor, weight: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of each block and its logits [T, rows], which the next block overwrites."""
    count, size = tokens.shape[0], weight.shape[0]
    scratch = tokens.new_empty(count * min(width, size))
    for start in range(0, size, width):
        rows = slice(start, min(start + width, size))
        logits = scratch[: count * (rows.stop - start)].view(count, -1)
        yield rows, torch.mm(tokens, weight[rows].t(), out=logits)


_compiled: Callable[..., Any] = cache(torch.compile)


def _sums(logits: Tensor, column: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Logits [T, rows] -> each token's logarithm of the sum of exponentials, and its logit at ``column``, fp32 [T]."""
    logits = capped(logits.float(), softcap)
    return logits.logsumexp(dim=-1), logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)


def _gradient_(
    logits: Tensor, log_sum: Tensor, column: Tensor, minus_one: Tensor, grad: Tensor, softcap: float | None
) -> None:
    """Turn logits [T, rows] into the loss's gradients to them: grad * (softmax - one_hot(label)).

    ``minus_one``: -1 where the label is in this block, at ``column``; else 0.
    """
    x = capped(logits.float(), softcap)
    slope = None if softcap is None else 1 - (x / softcap).square()
    x = x.sub_(log_sum.unsqueeze(-1)).exp_()
    column, minus_one = column.unsqueeze(-1), minus_one.unsqueeze(-1)
    if torch.compiler.is_compiling():  # a comparison is part of the same kernel; a scatter would need its own
        x = x + minus_one * (torch.arange(x.shape[-1], device=x.device) == column)
    else:
        x.scatter_add_(-1, column, minus_one)
    x = x if slope is None else x.mul_(slope)
    logits.copy_(x.mul_(grad.unsqueeze(-1)))


def _combine(log_sum: Tensor, target: Tensor, owner: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Combine sums over each rank's rows into sums over all. ``owner`` int64 [...]: the rank with the label's row."""
    mine = torch.stack([log_sum, target])  # [2, ...]
    per_rank = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(per_rank, mine, group)
    log_sums, targets = torch.stack(per_rank, dim=1)  # [tp, ...] each
    owner = owner.clamp(0, group.size() - 1).unsqueeze(0)
    return log_sums.logsumexp(dim=0), targets.gather(0, owner).squeeze(0)


def _columns(labels: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Compute labels' columns in each block of ``width`` of ``rows``, and whether they are in there: [blocks, T]."""
    starts = torch.arange(0, rows, width, device=labels.device).unsqueeze(-1)
    columns = (labels.clamp(0, rows - 1) - starts).clamp_(0, width - 1)
    return columns, labels - starts == columns
