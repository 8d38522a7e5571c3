"""Attention: queries, keys and values of two kinds, and the kernels and masks by which tokens attend to each other."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn

from .decoder_config import DecoderConfig
from .layers import gather_tokens
from .rotary import apply_rotary
from .transformer import Transformer

VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in torch 2.11


class Attention(nn.Module):
    """Base class: how the queries of one block attend to keys, as a config says."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        """layer: number of the block in the whole model, from 0."""
        super().__init__()
        self.config, self.window = config, config.window_of(layer)
        options = {"scale": config.attention_scale, "softcap": config.attn_logit_softcapping}
        self.options = {name: value for name, value in options.items() if value is not None}
        self.sinks = Sinks(config.num_attention_heads) if config.has_sinks else None
        self.attention = attention  # see ``replace_attention``

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Compute ``attention`` -> [B, S, heads * head_dim of v]."""
        options: dict[str, Any] = dict(self.options)
        if self.sinks is not None:
            options["sinks"] = self.sinks()
        dropout = self.config.attention_dropout if self.training else 0.0
        return self.attention(q, k, v, documents, dropout, self.window, **options).flatten(2)


class Sinks(nn.Module):
    """One learned score per head, of a key without a value, which lets a head attend to nothing."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Return the scores of this rank's heads."""
        return self.bias.to_local() if isinstance(self.bias, DTensor) else self.bias


class SelfAttention(Attention):
    """Causal multi-head attention, with grouped key/value heads (GQA) where there are fewer of them than query heads.

    The rows of ``linear_qkv`` are packed as in Megatron, group by group: ``[q ... q, k, v]``, each ``head_dim`` rows.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        heads, groups, self.head_dim = config.num_attention_heads, config.num_groups, config.head_dim
        has_bias = config.add_bias_linear or config.attention_bias
        rows = (heads + 2 * groups) * self.head_dim
        self.linear_qkv = nn.Linear(config.hidden_size, rows, bias=has_bias or config.add_qkv_bias)
        self.linear_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=has_bias)
        # Queries have a norm, and keys: of each head, or of all heads at once.
        q_heads, k_heads = (heads, groups) if config.qk_layernorm_whole else (1, 1)
        self.q_layernorm = config.make_norm(q_heads * self.head_dim) if config.qk_layernorm else None
        self.k_layernorm = config.make_norm(k_heads * self.head_dim) if config.qk_layernorm else None

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """``x`` [B, S, H] -> [B, S, H]. ``cos`` and ``sin`` are the ``rotary_table``; without it there is no rotation.

        ``documents``, of ``document_attention``, keeps tokens from attending to another document than their own, or
        beyond the window.
        """
        queries_per_group = self.config.num_attention_heads // self.config.num_groups
        qkv = self.linear_qkv(x)  # under tensor parallelism of this rank's heads alone
        batch, length, _ = qkv.shape
        qkv = qkv.view(batch, length, -1, queries_per_group + 2, self.head_dim)
        q, k, v = qkv.split([queries_per_group, 1, 1], dim=3)
        q = q.reshape(batch, length, -1, self.head_dim)  # [B, S, heads, head_dim]
        k, v = k.squeeze(3), v.squeeze(3)  # [B, S, groups, head_dim]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            if self.config.qk_layernorm_whole:
                q, k = self.q_layernorm(q.flatten(2)).view_as(q), self.k_layernorm(k.flatten(2)).view_as(k)
            else:
                q, k = self.q_layernorm(q), self.k_layernorm(k)
        if cos is not None and sin is not None:
            q, k = (apply_rotary(x, cos, sin, self.config.rotary_interleaved) for x in (q, k))
        return self.linear_proj(self.attend(q, k, v, documents))


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values of all heads come from one narrow latent vector per token, and all heads share one rotated key.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        heads, hidden_size = config.num_attention_heads, config.hidden_size
        q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        norm = partial(config.make_norm, epsilon=config.latent_norm_epsilon) if config.qk_layernorm else nn.Identity
        q_rows = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        if q_rank is None:
            self.linear_q_proj = nn.Linear(hidden_size, q_rows, bias=False)
        else:
            self.linear_q_down_proj = nn.Linear(hidden_size, q_rank, bias=False)
            self.q_layernorm = norm(q_rank)
            self.linear_q_up_proj = nn.Linear(q_rank, q_rows, bias=False)
        self.linear_kv_down_proj = nn.Linear(hidden_size, kv_rank + config.qk_pos_emb_head_dim, bias=False)
        self.kv_layernorm = norm(kv_rank)
        self.linear_kv_up_proj = nn.Linear(kv_rank, heads * (config.qk_head_dim + config.v_head_dim), bias=False)
        self.linear_proj = nn.Linear(heads * config.v_head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None) -> Tensor:
        """``x`` [B, S, H] -> [B, S, H]. ``cos``, ``sin`` and ``documents`` as in ``SelfAttention``."""
        plain_dim, rotated_dim = self.config.qk_head_dim, self.config.qk_pos_emb_head_dim
        kv_rank, v_dim = self.config.kv_lora_rank, self.config.v_head_dim
        if self.config.q_lora_rank is not None:
            q = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x)))
        else:
            q = self.linear_q_proj(x)
        q = q.unflatten(-1, (-1, plain_dim + rotated_dim))  # [B, S, heads, plain + rotated]
        latent, shared = self.linear_kv_down_proj(x).split([kv_rank, rotated_dim], dim=-1)
        kv = self.linear_kv_up_proj(self.kv_layernorm(latent)).unflatten(-1, (-1, plain_dim + v_dim))
        k, v = kv.split([plain_dim, v_dim], dim=-1)  # [B, S, heads, ...]
        shared = (gather_tokens(shared) if isinstance(shared, DTensor) else shared).unsqueeze(2)  # [B, S, 1, rotated]
        plain_q, rotated_q = q.split([plain_dim, rotated_dim], dim=-1)
        q = torch.cat([plain_q, apply_rotary(rotated_q, cos, sin)], dim=-1)
        k = torch.cat([k, apply_rotary(shared, cos, sin).expand(*k.shape[:3], -1)], dim=-1)
        # Kernels, caches and context parallelism want values as wide as keys.
        v = F.pad(v, (0, k.shape[-1] - v_dim))
        attended = self.attend(q, k, v, documents).unflatten(-1, (-1, k.shape[-1]))
        return self.linear_proj(attended[..., :v_dim].flatten(2))


def replace_attention(
    model: Transformer,
    documents: Callable[..., Tensor | None],
    attention_of: Callable[[Attention], Callable[..., Tensor]],
) -> None:
    """Replace ``document_attention`` by ``documents``, and each layer's ``attention``, for parallelism or a cache."""
    model.document_attention = documents
    for module in model.modules():
        if isinstance(module, Attention):
            module.attention = attention_of(module)  # type: ignore[assignment]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    dropout: float,
    window: int | None = None,
    key_documents: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [B, Q, heads, head_dim] to k, v [B, K, groups, head_dim] -> [B, Q, heads, head_dim].

    ``documents`` is what ``document_attention`` returns for this ``window``; None only for Q = K. Where it is a
    cu_seqlens and K is not Q, ``key_documents`` describes the keys: the last query of a document is where its last
    key is, the one before it a key earlier. ``scale``, ``softcap``, ``sinks``: see ``plain_attention``.
    """
    if softcap is not None or sinks is not None:
        return plain_attention(q, k, v, documents, scale, softcap, sinks)  # such configs have no dropout
    options: dict[str, Any] = {"enable_gqa": True} if k.shape[2] < q.shape[2] else {}
    options |= {} if scale is None else {"scale": scale}
    if documents is not None and documents.dim() == 1:
        # All documents of the batch side by side, [B * Q, heads, head_dim]; the right edge of the kernel's window is
        # causal, and -1 is no left edge.
        queries, keys, values = (tensor.flatten(0, 1) for tensor in (q, k, v))
        key_documents = documents if key_documents is None else key_documents
        edges = (-1 if window is None else window, 0)
        if options.get("enable_gqa") and not VARLEN_HAS_GQA:
            keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=1) for x in (keys, values))
            del options["enable_gqa"]
        attended = varlen_attn(
            *(queries, keys, values, documents, key_documents, q.shape[1], k.shape[1]), window_size=edges, **options
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
        **options,
    ).transpose(1, 2)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute ``attention`` with all scores [B, heads, Q, K] in memory: no kernel of PyTorch has what follows.

    ``softcap`` c turns a score s into c * tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2). ``sinks`` [heads] are one
    more score per head, of a key without a value. ``mask`` [B or 1, 1, Q, K]: True where a query attends, or added to
    scores; None: causal.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads or groups, Q or K, head_dim]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    batch, _, queries, keys = scores.shape
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(batch, -1, queries, 1)], dim=-1)
    shares = scores.softmax(dim=-1)[..., :keys].to(v.dtype)
    return (shares @ v).transpose(1, 2)


def document_attention(
    cu_seqlens: Tensor | None, tokens: Tensor, dtype: torch.dtype, needs_mask: bool, window: int | None = None
) -> Tensor | None:
    """Make the ``documents`` of ``SelfAttention``, once for all layers; None if attention is only causal.

    ``cu_seqlens`` int32 [D + 1] says where the documents of the flattened batch ``tokens`` [B, S] begin; None where
    each row is one. It is itself what PyTorch's kernel for variable lengths takes, on GPUs in 16 bit, unless it
    ``needs_mask``: the kernel has no dropout of attention weights, no soft-caps and no sinks. Elsewhere a mask bool
    [B or 1, 1, S, S], True where a token attends, does the same with ``scaled_dot_product_attention``. ``window``: how
    many tokens before it a token attends to; None for all.
    """
    batch, length = tokens.shape
    if window is not None and window >= length - 1:
        window = None
    if cu_seqlens is None and window is None:
        return None
    if takes_variable_lengths(tokens.device, dtype, needs_mask):
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


def takes_variable_lengths(device: torch.device, dtype: torch.dtype, needs_mask: bool) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not needs_mask
