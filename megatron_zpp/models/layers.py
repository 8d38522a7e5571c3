"""Layers of the models: norms, and the loss that never holds all logits at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

# Rows of the vocabulary whose logits exist at one time: 8 KiB of fp32 per token, and large enough matrix products.
VOCABULARY_BLOCK = 2048


def head_size(hidden_size: int, num_heads: int, num_query_groups: int, kv_channels: int | None) -> int:
    """Width of one attention head. Raises ValueError for heads that do not divide."""
    if num_heads % num_query_groups:
        raise ValueError(f"num_attention_heads {num_heads} is not divisible by num_query_groups {num_query_groups}")
    if kv_channels is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads}: set kv_channels"
        )
    return kv_channels or hidden_size // num_heads


class LayerNorm1p(nn.LayerNorm):
    """A norm whose weight is kept less 1, so that weight decay would pull it to 1, and 16 bits hold it more exactly."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RMSNorm1p(nn.RMSNorm):
    """RMSNorm whose weight is kept less 1, as in ``LayerNorm1p``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


NORMS = {
    ("LayerNorm", False): nn.LayerNorm,
    ("LayerNorm", True): LayerNorm1p,
    ("RMSNorm", False): nn.RMSNorm,
    ("RMSNorm", True): RMSNorm1p,
}


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None = None) -> Tensor:
    """Cross entropy of each token: ``hidden`` [..., H], ``weight`` [V, H], ``labels`` int64 [...] -> fp32 [...].

    As in Megatron the matrix products are taken in the inputs' dtype and the softmax in fp32. The logits [..., V] never
    exist whole: both passes walk over blocks of the vocabulary. The loss of a label outside [0, V) is NaN. ``softcap``
    c turns a logit l into c * tanh(l / c).

    Not ``torch.nn.functional.linear_cross_entropy`` (torch 2.13), because that one returns the losses in the inputs'
    dtype: in bf16 they keep two digits, and so do the gradients that come back for them.

    Under tensor parallelism ``weight`` is a DTensor and each rank has its rows; ``hidden`` is one too, whole or
    sharded along the sequence. Ranks exchange two numbers per token, never logits.
    """
    if isinstance(weight, DTensor):
        group = weight.device_mesh.get_group()
        return _LinearCrossEntropy.apply(gather_tokens(hidden), weight.to_local(), labels, softcap, group)
    return _LinearCrossEntropy.apply(hidden, weight, labels, softcap, None)


def output_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [..., V] of ``hidden`` [..., H], whole on every rank."""
    if isinstance(weight, DTensor):
        mine = F.linear(gather_tokens(hidden), weight.to_local())
        return DTensor.from_local(mine, weight.device_mesh, [Shard(mine.dim() - 1)], run_check=False).full_tensor()
    return F.linear(hidden, weight)


class OutputLayer(nn.Linear):
    """The linear layer [V, H] to the vocabulary, and the loss after it: hidden states [..., H] and labels int64 [...]
    -> each token's loss, fp32 [...]; without labels: logits [..., V]."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None, softcap: float | None = None) -> Tensor:
        return losses_or_logits(hidden, self.weight, labels, softcap)


def losses_or_logits(hidden: Tensor, weight: Tensor, labels: Tensor | None, softcap: float | None = None) -> Tensor:
    """Compute what ``OutputLayer`` returns, with ``weight`` [V, H]. ``softcap``: see ``linear_cross_entropy``."""
    if labels is not None:
        return linear_cross_entropy(hidden, weight, labels, softcap)
    return _capped(output_logits(hidden, weight), softcap)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def gather_tokens(hidden: Tensor) -> Tensor:
    """Gather all tokens of a DTensor [..., H]; the ranks' gradients of it are summed."""
    assert isinstance(hidden, DTensor)
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


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
    ) -> Tensor:
        """``group``: the ranks that hold the rows of the whole weight, ``weight`` of each, in their order."""
        whole_labels = labels
        if group is not None:
            labels = labels - group.rank() * weight.shape[0]
        log_sum = torch.full(labels.shape, -torch.inf, dtype=torch.float32, device=hidden.device)
        target = torch.full_like(log_sum, torch.nan)  # the label's logit
        for start in range(0, weight.shape[0], VOCABULARY_BLOCK):
            logits = F.linear(hidden, weight[start : start + VOCABULARY_BLOCK]).float()  # [..., block]
            logits = _capped(logits, softcap)
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(dim=-1))
            column, inside = _columns(labels, start, logits.shape[-1])
            target = torch.where(inside, logits.gather(-1, column.unsqueeze(-1)).squeeze(-1), target)
        if group is not None:
            log_sum, target = _combine(log_sum, target, whole_labels // weight.shape[0], group)
        ctx.save_for_backward(hidden, weight, labels, log_sum)
        ctx.softcap = softcap
        return log_sum - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        hidden, weight, labels, log_sum = ctx.saved_tensors
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        for start in range(0, weight.shape[0], VOCABULARY_BLOCK):
            rows = weight[start : start + VOCABULARY_BLOCK]
            # d loss / d logit = softmax - one_hot(label)
            grad_logits = _capped(F.linear(hidden, rows).float(), ctx.softcap)
            slope = None if ctx.softcap is None else 1 - (grad_logits / ctx.softcap).square()
            grad_logits = grad_logits.sub_(log_sum.unsqueeze(-1)).exp_()
            column, inside = _columns(labels, start, rows.shape[0])
            grad_logits.scatter_add_(-1, column.unsqueeze(-1), -inside.float().unsqueeze(-1))
            grad_logits = grad_logits if slope is None else grad_logits.mul_(slope)
            grad_logits = grad_logits.mul_(grad.unsqueeze(-1)).to(hidden.dtype)
            grad_hidden += grad_logits @ rows
            tokens = grad_logits.flatten(0, -2), hidden.flatten(0, -2)  # [T, block], [T, H]
            torch.mm(tokens[0].t(), tokens[1], out=grad_weight[start : start + VOCABULARY_BLOCK])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


def _combine(log_sum: Tensor, target: Tensor, owner: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Combine sums over each rank's rows into sums over all. ``owner`` int64 [...]: the rank with the label's row."""
    mine = torch.stack([log_sum, target])  # [2, ...]
    per_rank = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(per_rank, mine, group)
    log_sums, targets = torch.stack(per_rank, dim=1)  # [tp, ...] each
    owner = owner.clamp(0, group.size() - 1).unsqueeze(0)
    return log_sums.logsumexp(dim=0), targets.gather(0, owner).squeeze(0)


def _columns(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Each label's column in the block of ``width`` columns from ``start`` on, and whether it is in there."""
    column = labels - start
    return column.clamp(0, width - 1), (column >= 0) & (column < width)
