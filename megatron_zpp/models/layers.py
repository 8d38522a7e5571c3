"""Layers of the models: attention, rotary embeddings, norms, and the loss that never holds all logits at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.varlen import varlen_attn

from .transformer import Transformer

# Rows of the vocabulary whose logits exist at one time: 8 KiB of fp32 per token, and large enough matrix products.
VOCABULARY_BLOCK = 2048


class SelfAttention(nn.Module):
    """Causal multi-head attention, with grouped key/value heads (GQA) when ``num_query_groups < num_heads``.

    The rows of ``linear_qkv`` are packed as in Megatron, group by group: ``[q ... q, k, v]``, each ``head_dim`` rows.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_query_groups: int,
        head_dim: int,
        bias: bool,
        dropout: float,
        qkv_bias: bool | None = None,
        head_norm: Callable[[int], nn.Module] | None = None,
        window: int | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        """qkv_bias: default ``bias``. head_norm: makes a norm of ``head_dim`` channels; queries get one, and keys.
        window: how many tokens before it a token attends to; default all. rotary_interleaved: neighboring channels
        are rotated together, as in ``apply_rotary``."""
        super().__init__()
        self.num_heads = num_heads
        self.num_query_groups = num_query_groups
        self.head_dim = head_dim
        self.dropout = dropout
        self.window = window
        self.rotary_interleaved = rotary_interleaved
        rows = (num_heads + 2 * num_query_groups) * head_dim
        self.linear_qkv = nn.Linear(hidden_size, rows, bias=bias if qkv_bias is None else qkv_bias)
        self.linear_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.q_layernorm = None if head_norm is None else head_norm(head_dim)
        self.k_layernorm = None if head_norm is None else head_norm(head_dim)
        self.attention = attention  # see ``replace_attention``

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """``x`` [B, S, H] -> [B, S, H]. ``cos`` and ``sin`` are the ``rotary_table``; without it there is no rotation.

        ``documents``, of ``document_attention``, keeps tokens from attending to another document than their own, or
        beyond the window.
        """
        queries_per_group = self.num_heads // self.num_query_groups
        qkv = self.linear_qkv(x)  # under tensor parallelism of this rank's heads alone
        batch, length, _ = qkv.shape
        qkv = qkv.view(batch, length, -1, queries_per_group + 2, self.head_dim)
        q, k, v = qkv.split([queries_per_group, 1, 1], dim=3)
        q = q.reshape(batch, length, -1, self.head_dim)  # [B, S, heads, head_dim]
        k, v = k.squeeze(3), v.squeeze(3)  # [B, S, groups, head_dim]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if cos is not None and sin is not None:
            q, k = (apply_rotary(x, cos, sin, self.rotary_interleaved) for x in (q, k))
        attended = self.attention(q, k, v, documents, self.dropout if self.training else 0.0, self.window)
        return self.linear_proj(attended.flatten(2))


def replace_attention(
    model: Transformer,
    documents: Callable[..., Tensor | None],
    attention_of: Callable[[SelfAttention], Callable[..., Tensor]],
) -> None:
    """Replace how tokens of ``model`` attend to each other, for context parallelism or a cache of keys.

    documents: in place of ``document_attention``. attention_of: gives each layer's function in place of ``attention``.
    """
    model.document_attention = documents
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.attention = attention_of(module)  # type: ignore[assignment]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    dropout: float,
    window: int | None = None,
    key_documents: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [B, Q, heads, head_dim] to k, v [B, K, groups, head_dim] -> [B, Q, heads, head_dim].

    ``documents`` is what ``document_attention`` returns for this ``window``; None only for Q = K. Where it is a
    cu_seqlens and K is not Q, ``key_documents`` is that of the keys: the last query of a document is where its last
    key is, the one before it a key earlier.
    """
    grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[2] < q.shape[2] else {}
    if documents is not None and documents.dim() == 1:
        # All documents of the batch side by side, [B * Q, heads, head_dim]; the right edge of the kernel's window is
        # causal, and -1 is no left edge.
        queries, keys, values = (tensor.flatten(0, 1) for tensor in (q, k, v))
        key_documents = documents if key_documents is None else key_documents
        edges = (-1 if window is None else window, 0)
        attended = varlen_attn(
            queries, keys, values, documents, key_documents, q.shape[1], k.shape[1], window_size=edges, **grouped
        )
        assert isinstance(attended, Tensor)
        return attended.view(q.shape)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [B, heads, Q, head_dim]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=documents,
        dropout_p=dropout,
        is_causal=documents is None,
        **grouped,
    ).transpose(1, 2)


def document_attention(
    cu_seqlens: Tensor | None, tokens: Tensor, dtype: torch.dtype, dropout: bool, window: int | None = None
) -> Tensor | None:
    """Make the ``documents`` of ``SelfAttention``, once for all layers; None if attention is only causal.

    ``cu_seqlens`` int32 [D + 1] says where the documents of the flattened batch ``tokens`` [B, S] begin; None where
    each row is one. It is itself what PyTorch's kernel for variable lengths takes, on GPUs in 16 bit and without
    dropout of attention weights; elsewhere a mask bool [B or 1, 1, S, S], True where a token attends, does the same
    with ``scaled_dot_product_attention``. ``window``: how many tokens before it a token attends to; None for all.
    """
    batch, length = tokens.shape
    if window is not None and window >= length - 1:
        window = None
    if cu_seqlens is None and window is None:
        return None
    if takes_variable_lengths(tokens.device, dtype, dropout):
        return whole_rows(batch, length, tokens.device) if cu_seqlens is None else cu_seqlens
    if cu_seqlens is None:
        batch, cu_seqlens = 1, whole_rows(1, length, tokens.device)  # the same mask for all
    position = torch.arange(batch * length, device=tokens.device, dtype=cu_seqlens.dtype)
    document = torch.bucketize(position, cu_seqlens, right=True).view(batch, 1, length)
    mask = (document.unsqueeze(-1) == document.unsqueeze(-2)).tril()
    return mask if window is None else mask.triu(-window)


def whole_rows(batch: int, length: int, device: torch.device) -> Tensor:
    """Return the ``cu_seqlens`` of a batch whose rows are one document each."""
    return torch.arange(0, (batch + 1) * length, length, device=device, dtype=torch.int32)


def takes_variable_lengths(device: torch.device, dtype: torch.dtype, dropout: bool) -> bool:
    """Return whether PyTorch's kernel for variable lengths can be used."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not dropout


# Rotary tables are cheap, so each forward pass makes them again; a buffer would have to survive ``to_empty``.


def frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    """Return base^(-2i / dim) for each pair i of ``dim`` rotated channels: fp32 [dim / 2]."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def scaled_as_llama3(frequency: Tensor, factor: float) -> Tensor:
    """Llama 3.1's scaling: wavelengths beyond the original context of 8192 tokens are stretched by the factor, those
    below a quarter of it are kept, and those between are interpolated."""
    low, high, original_context = 1.0, 4.0, 8192
    turns = original_context * frequency / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: high frequency, kept; 0: low frequency, stretched
    return keep * frequency + (1 - keep) * frequency / factor


def scaled_as_yarn(
    frequency: Tensor, base: float, factor: float, original_context: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """YaRN's scaling (Peng et al., arXiv 2309.00071): pairs of channels that turn ``beta_fast`` times or more within
    the original context are kept, those that turn ``beta_slow`` times or less are stretched by the factor, and between
    those two the share that is stretched grows with the pair's number."""
    pairs = frequency.shape[0]

    def pair_with(turns: float) -> float:
        return pairs * math.log(original_context / (turns * 2 * math.pi)) / math.log(base)

    first, last = max(math.floor(pair_with(beta_fast)), 0), min(math.ceil(pair_with(beta_slow)), 2 * pairs - 1)
    number = torch.arange(pairs, dtype=torch.float32, device=frequency.device)
    stretched = ((number - first) / max(last - first, 0.001)).clamp(0, 1)
    return stretched * frequency / factor + (1 - stretched) * frequency


def yarn_magnitude(factor: float) -> float:
    """Return what YaRN multiplies cosines and sines by, so that attention over more tokens stays as sharp."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_table(frequency: Tensor, length: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine [S, 1, dim / 2], fp32, of the angles position * ``frequency``.

    ``positions`` int [B, S] instead of 0 to S - 1 make these [B, S, 1, dim / 2].
    """
    if positions is None:
        positions = torch.arange(length, device=frequency.device)
    angle = positions.float().unsqueeze(-1) * frequency  # [..., S, dim / 2]
    return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of ``x`` [B, S, heads, head_dim]; channel i forms a pair with channel i + dim / 2.

    interleaved: channel 2i forms a pair with channel 2i + 1. Channels beyond the ``dim`` that the table is of stay as
    they are.
    """
    dim = 2 * cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([apply_rotary(x[..., :dim], cos, sin, interleaved), x[..., dim:]], dim=-1)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def head_size(hidden_size: int, num_heads: int, num_query_groups: int, kv_channels: int | None) -> int:
    """Width of one attention head. Raises ValueError for heads that do not divide."""
    if num_heads % num_query_groups:
        raise ValueError(
            f"num_attention_heads {num_heads} is not divisible by num_query_groups {num_query_groups}; "
            "every group needs the same number of heads"
        )
    if kv_channels is None and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads}; "
            "change one of them or set kv_channels"
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


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token: ``hidden`` [..., H], ``weight`` [V, H], ``labels`` int64 [...] -> fp32 [...].

    As in Megatron the matrix products are taken in the inputs' dtype and the softmax in fp32. The logits [..., V] never
    exist whole: forward and backward walk over blocks of the vocabulary, and backward computes each block's logits
    again.
    The loss of a label outside [0, V) is NaN.

    Not ``torch.nn.functional.linear_cross_entropy`` (torch 2.13), because that one returns the losses in the inputs'
    dtype: in bf16 they keep two digits, and so do the gradients that come back for them.

    Under tensor parallelism ``weight`` is a DTensor and each rank has its rows; ``hidden`` is one too, whole or
    sharded along the sequence. Ranks exchange two numbers per token, never logits.
    """
    if isinstance(weight, DTensor):
        return _LinearCrossEntropy.apply(_whole(hidden), weight.to_local(), labels, weight.device_mesh.get_group())
    return _LinearCrossEntropy.apply(hidden, weight, labels, None)


def output_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [..., V] of ``hidden`` [..., H], whole on every rank."""
    if isinstance(weight, DTensor):
        mine = F.linear(_whole(hidden), weight.to_local())
        return DTensor.from_local(mine, weight.device_mesh, [Shard(mine.dim() - 1)], run_check=False).full_tensor()
    return F.linear(hidden, weight)


class OutputLayer(nn.Linear):
    """The linear layer [V, H] to the vocabulary, and the loss after it: hidden states [..., H] and labels int64 [...]
    -> each token's loss, fp32 [...]; without labels: logits [..., V]."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        return losses_or_logits(hidden, self.weight, labels)


def losses_or_logits(hidden: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
    """Compute what ``OutputLayer`` returns, with ``weight`` [V, H]."""
    return output_logits(hidden, weight) if labels is None else linear_cross_entropy(hidden, weight, labels)


def _whole(hidden: Tensor) -> Tensor:
    """Gather all tokens of a DTensor [..., H]; the ranks' gradients of it are summed."""
    assert isinstance(hidden, DTensor)
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class _LinearCrossEntropy(torch.autograd.Function):
    """Blocks are rows of ``weight``, not tokens: one matrix product then completes a block's weight gradient, and only
    the gradient of ``hidden``, which is small, needs an fp32 accumulator."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """``group``: the ranks that hold the rows of the whole weight, ``weight`` of each, in their order."""
        whole_labels = labels
        if group is not None:
            labels = labels - group.rank() * weight.shape[0]
        log_sum = torch.full(labels.shape, -torch.inf, dtype=torch.float32, device=hidden.device)
        target = torch.full_like(log_sum, torch.nan)  # the label's logit
        for start in range(0, weight.shape[0], VOCABULARY_BLOCK):
            logits = F.linear(hidden, weight[start : start + VOCABULARY_BLOCK]).float()  # [..., block]
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(dim=-1))
            column, inside = _columns(labels, start, logits.shape[-1])
            target = torch.where(inside, logits.gather(-1, column.unsqueeze(-1)).squeeze(-1), target)
        if group is not None:
            log_sum, target = _combine(log_sum, target, whole_labels // weight.shape[0], group)
        ctx.save_for_backward(hidden, weight, labels, log_sum)
        return log_sum - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        hidden, weight, labels, log_sum = ctx.saved_tensors
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        for start in range(0, weight.shape[0], VOCABULARY_BLOCK):
            rows = weight[start : start + VOCABULARY_BLOCK]
            # d loss / d logit = softmax - one_hot(label)
            grad_logits = F.linear(hidden, rows).float().sub_(log_sum.unsqueeze(-1)).exp_()
            column, inside = _columns(labels, start, rows.shape[0])
            grad_logits.scatter_add_(-1, column.unsqueeze(-1), -inside.float().unsqueeze(-1))
            grad_logits = grad_logits.mul_(grad.unsqueeze(-1)).to(hidden.dtype)
            grad_hidden += grad_logits @ rows
            tokens = grad_logits.flatten(0, -2), hidden.flatten(0, -2)  # [T, block], [T, H]
            torch.mm(tokens[0].t(), tokens[1], out=grad_weight[start : start + VOCABULARY_BLOCK])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


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
