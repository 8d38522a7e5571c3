"""GPT: learned positions, LayerNorm before each sublayer, GELU, biases everywhere, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import OutputLayer, SelfAttention, document_attention, head_size, losses_or_logits
from .transformer import Transformer


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int  # padded
    max_position_embeddings: int
    ffn_hidden_size: int | None = None  # default 4 * hidden_size
    kv_channels: int | None = None  # width of one head; default hidden_size / num_attention_heads
    norm_epsilon: float = 1e-5
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02
    tie_embeddings: bool = True

    @property
    def num_groups(self) -> int:
        """Key/value heads: GPT has one per query head."""
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return head_size(self.hidden_size, self.num_attention_heads, self.num_groups, self.kv_channels)

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or default_ffn_size(self.hidden_size)


def default_ffn_size(hidden_size: int) -> int:
    """Width of the MLP."""
    return 4 * hidden_size


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.ffn_size)
        self.linear_fc2 = nn.Linear(config.ffn_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        # Megatron's fused bias + GELU is the tanh approximation.
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class GPTBlock(nn.Module):
    """One transformer block, [B, S, H] -> [B, S, H]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self.self_attention = SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_groups,
            config.head_dim,
            bias=True,
            dropout=config.attention_dropout,
        )
        self.pre_mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.self_attention(self.input_norm(x), documents=documents))
        return x + self.dropout(self.mlp(self.pre_mlp_norm(x)))


class GPT(Transformer):
    """The whole model. Weights are garbage until ``init_weights`` has filled them."""

    config: GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(GPTBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
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
        Raises ValueError when the sequence is longer than the learned positions.
        """
        x = tokens if tokens.is_floating_point() else self.embed(tokens, position_ids)
        ids = tokens if labels is None else labels  # [B, S], which hidden states may have a part of
        dropout = self.training and self.config.attention_dropout > 0
        documents = self.document_attention(cu_seqlens, ids, x.dtype, dropout)
        for layer in self.layers:
            x = layer(x, documents)
        if not hasattr(self, "final_norm"):
            return x
        x = self.final_norm(x)
        if self.config.tie_embeddings:
            return losses_or_logits(x, self.word_embeddings.weight, labels)
        return self.output_layer(x, labels)

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """``tokens`` int64 [B, S] -> [B, S, H]."""
        length = tokens.shape[1]
        if length > self.config.max_position_embeddings:
            raise ValueError(
                f"sequence of {length} tokens, but max_position_embeddings is {self.config.max_position_embeddings}"
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=tokens.device).unsqueeze(0)  # [1, S]
        return self.dropout(self.word_embeddings(tokens) + self.position_embeddings(position_ids))
