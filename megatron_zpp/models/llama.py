"""Llama: rotary positions, RMSNorm before each sublayer, SwiGLU, grouped-query attention, no biases, untied output."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    OutputLayer,
    SelfAttention,
    document_attention,
    head_size,
    losses_or_logits,
    rotary_table,
)
from .transformer import Transformer


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int  # padded
    ffn_hidden_size: int | None = None  # default 8/3 * hidden_size, see default_ffn_size
    num_query_groups: int | None = None  # key/value heads; default one per query head
    kv_channels: int | None = None  # width of one head; default hidden_size / num_attention_heads
    norm_epsilon: float = 1e-5
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    rotary_base: float = 10000
    rope_scaling_factor: float | None = None  # Llama 3.1's scaling of the rotary frequencies; it uses 8
    init_method_std: float = 0.02
    tie_embeddings: bool = False

    @property
    def num_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return head_size(self.hidden_size, self.num_attention_heads, self.num_groups, self.kv_channels)

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or default_ffn_size(self.hidden_size)


def default_ffn_size(hidden_size: int) -> int:
    """Megatron's width of a SwiGLU MLP: 8/3 of the hidden size, rounded down to a multiple of 64; at least 64."""
    return int(hidden_size * 8 / 3 / 64) * 64 or 64


class SwiGLU(nn.Module):
    """Megatron's stacked ``linear_fc1`` is two layers here, so that a tensor-parallel rank has its rows of both."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.linear_fc1_gate = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.linear_fc1_up = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.linear_fc2 = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1_gate(x)) * self.linear_fc1_up(x))


class LlamaBlock(nn.Module):
    """One transformer block, [B, S, H] -> [B, S, H]; ``cos`` and ``sin`` are the ``rotary_table`` of the positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.self_attention = SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_groups,
            config.head_dim,
            bias=False,
            dropout=config.attention_dropout,
        )
        self.pre_mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.self_attention(self.input_norm(x), (cos, sin), documents))
        return x + self.dropout(self.mlp(self.pre_mlp_norm(x)))


class Llama(Transformer):
    """The whole model. Weights are garbage until ``init_weights`` has filled them."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.document_attention = document_attention  # parallel.context has another one
        if not config.tie_embeddings:
            self.output_layer = OutputLayer(config.hidden_size, config.vocab_size)
            self.ends = ("word_embeddings", "output_layer")

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """``tokens``, ``labels`` int64 [B, S] -> each token's loss, fp32 [B, S]; without labels: logits [B, S, V].

        ``position_ids`` int64 [B, S] or [1, S]: default 0 to S - 1. ``cu_seqlens`` int32 [D + 1]: where documents
        begin in the flattened batch, and B * S, for attention within documents.

        A model that is one stage of a pipeline takes the hidden states [B, S, H] of the stage before it in place of
        ``tokens``, and returns its own unless it is the last.
        """
        config = self.config
        x = tokens if tokens.is_floating_point() else self.dropout(self.word_embeddings(tokens))  # [B, S, H]
        ids = tokens if labels is None else labels  # [B, S], which hidden states may have a part of
        length, device = ids.shape[1], ids.device
        cos, sin = rotary_table(
            length, config.head_dim, config.rotary_base, config.rope_scaling_factor, device, position_ids
        )
        # Megatron's rule: angles in fp32, their cosines and sines in the dtype of the activations.
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        dropout = self.training and config.attention_dropout > 0
        documents = self.document_attention(cu_seqlens, ids, x.dtype, dropout)
        for layer in self.layers:
            x = layer(x, cos, sin, documents)
        if not hasattr(self, "final_norm"):
            return x
        x = self.final_norm(x)
        if config.tie_embeddings:
            return losses_or_logits(x, self.word_embeddings.weight, labels)
        return self.output_layer(x, labels)
