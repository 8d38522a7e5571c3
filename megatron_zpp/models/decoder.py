"""A decoder-only transformer that its config describes: GPT, Llama, Mistral, Qwen, and mixtures of their parts.

From the bottom up: the config, the two MLPs, a block, the model. Attention, norms and the loss are in ``layers``.
Modules and parameters have Megatron's names. Weights are garbage until ``init_weights`` has filled them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    LayerNorm1p,
    OutputLayer,
    RMSNorm1p,
    SelfAttention,
    document_attention,
    frequencies,
    head_size,
    losses_or_logits,
    rotary_table,
    scaled_as_llama3,
    scaled_as_yarn,
    yarn_magnitude,
)
from .moe import MoE, MoEConfig, Routed, auxiliary_losses, finish_step, observations
from .transformer import ModelOutput, Transformer

NORMS = {
    ("LayerNorm", False): nn.LayerNorm,
    ("LayerNorm", True): LayerNorm1p,
    ("RMSNorm", False): nn.RMSNorm,
    ("RMSNorm", True): RMSNorm1p,
}
POSITIONS = ("learned_absolute", "rope", "yarn", "none")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. Defaults are Megatron-LM's, which make it a GPT."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int  # padded
    max_position_embeddings: int | None = None  # rows of learned positions; other kinds have none
    ffn_hidden_size: int | None = None  # width of the MLP; see default_ffn_size
    num_query_groups: int | None = None  # key/value heads; default one per query head
    kv_channels: int | None = None  # width of one head; default hidden_size / num_attention_heads
    normalization: str = "LayerNorm"  # or RMSNorm
    norm_epsilon: float = 1e-5
    layernorm_1p: bool = False  # norms multiply by 1 + weight
    qk_layernorm: bool = False  # a norm for the queries of each head, and one for the keys
    swiglu: bool = False  # in the MLP, else GELU,
    exact_gelu: bool = False  # by the error function, as Megatron's is with --no-bias-gelu-fusion; else by tanh
    add_bias_linear: bool = True  # all linear layers have biases, but for the output layer
    add_qkv_bias: bool = False  # queries, keys and values have them
    window_size: int | None = None  # tokens before it that a token attends to; default all
    position_embedding_type: str = "learned_absolute"  # one of POSITIONS
    rotary_percent: float = 1.0  # share of a head's channels that are rotated
    rotary_base: float = 10000
    rotary_interleaved: bool = False  # channels 2i and 2i + 1 are rotated together, not i and i + half of them
    rope_scaling_factor: float | None = None  # Llama 3.1's scaling of rope; it uses 8
    yarn_scaling_factor: float | None = None  # and what else yarn takes
    yarn_original_context: int | None = None
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02
    tie_embeddings: bool = True
    moe: MoEConfig | None = None  # experts in place of MLPs,
    moe_layer_freq: int = 1  # in every k-th block,
    moe_first_layer: int = 1  # starting with this one, counted from 1
    moe_experts_per_layer: str | None = None  # "32,64": of each block with experts, where they differ

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be built."""
        if (self.normalization, self.layernorm_1p) not in NORMS:
            raise ValueError(f"normalization is {self.normalization!r}; choose LayerNorm or RMSNorm")
        if self.window_size is not None and self.window_size < 1:
            raise ValueError(f"window_size is {self.window_size}; a token attends to at least 1 before it")
        if self.position_embedding_type not in POSITIONS:
            raise ValueError(
                f"position_embedding_type is {self.position_embedding_type!r}; choose from {', '.join(POSITIONS)}"
            )
        if self.position_embedding_type == "learned_absolute" and self.max_position_embeddings is None:
            raise ValueError("learned positions need max_position_embeddings")
        if len(self.experts_of_layers) != len(self.layers_with_experts):
            raise ValueError(
                f"moe_experts_per_layer has {len(self.experts_of_layers)} numbers, and {len(self.layers_with_experts)} "
                "blocks have experts"
            )
        if self.position_embedding_type == "yarn" and None in (self.yarn_scaling_factor, self.yarn_original_context):
            raise ValueError("yarn needs yarn_scaling_factor and yarn_original_context")

    @property
    def num_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return head_size(self.hidden_size, self.num_attention_heads, self.num_groups, self.kv_channels)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or default_ffn_size(self.hidden_size, self.swiglu)

    @property
    def layers_with_experts(self) -> range:
        return range(self.moe_first_layer - 1, self.num_layers if self.moe is not None else 0, self.moe_layer_freq)

    @property
    def experts_of_layers(self) -> list[int]:
        """The number of experts in each of ``layers_with_experts``."""
        if self.moe is None:
            return []
        if self.moe_experts_per_layer is None:
            return [self.moe.num_experts] * len(self.layers_with_experts)
        return [int(number) for number in self.moe_experts_per_layer.split(",")]


def default_ffn_size(hidden_size: int, swiglu: bool) -> int:
    """Megatron's width of the MLP: 4 times the hidden size; of SwiGLU 8/3 of it, rounded down to a multiple of 64."""
    return (int(hidden_size * 8 / 3 / 64) * 64 or 64) if swiglu else 4 * hidden_size


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.ffn_size, bias=config.add_bias_linear)
        self.linear_fc2 = nn.Linear(config.ffn_size, config.hidden_size, bias=config.add_bias_linear)
        self.approximate = "none" if config.exact_gelu else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate=self.approximate))


class SwiGLU(nn.Module):
    """Megatron's stacked ``linear_fc1`` is two layers here, so that a tensor-parallel rank has its rows of both."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.linear_fc1_gate = nn.Linear(config.hidden_size, config.ffn_size, bias=config.add_bias_linear)
        self.linear_fc1_up = nn.Linear(config.hidden_size, config.ffn_size, bias=config.add_bias_linear)
        self.linear_fc2 = nn.Linear(config.ffn_size, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1_gate(x)) * self.linear_fc1_up(x))


class Block(nn.Module):
    """Attention and an MLP, a norm before each, [B, S, H] -> [B, S, H]."""

    def __init__(self, config: DecoderConfig, mlp: nn.Module) -> None:
        """mlp: [B, S, H] -> [B, S, H], or to that and a ``Routed``."""
        super().__init__()
        self.input_norm = make_norm(config, config.hidden_size)
        self.self_attention = SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_groups,
            config.head_dim,
            bias=config.add_bias_linear,
            qkv_bias=config.add_bias_linear or config.add_qkv_bias,
            dropout=config.attention_dropout,
            head_norm=partial(make_norm, config) if config.qk_layernorm else None,
            window=config.window_size,
            rotary_interleaved=config.rotary_interleaved,
        )
        self.pre_mlp_norm = make_norm(config, config.hidden_size)
        self.mlp = mlp
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Routed]:
        """``cos`` and ``sin``: the ``rotary_table``, where positions are rotary. ``documents``: of
        ``document_attention``. What experts did comes along: FSDP2 must see all that the loss depends on."""
        x = x + self.dropout(self.self_attention(self.input_norm(x), cos, sin, documents))
        y = self.mlp(self.pre_mlp_norm(x))
        if isinstance(y, Tensor):
            return x + self.dropout(y)
        y, routed = y
        return x + self.dropout(y), routed


def make_norm(config: DecoderConfig, width: int) -> nn.Module:
    return NORMS[config.normalization, config.layernorm_1p](width, eps=config.norm_epsilon)


def make_mlp(config: DecoderConfig, layer: int) -> nn.Module:
    """Build the MLP, or the experts, of the block with number ``layer``."""
    if config.moe is None or layer not in config.layers_with_experts:
        return SwiGLU(config) if config.swiglu else MLP(config)
    shared_size, shared = config.moe.shared_expert_size, None
    if shared_size is not None:
        shared = make_mlp(replace(config, ffn_hidden_size=shared_size, moe=None), layer)
    moe = replace(config.moe, num_experts=config.experts_of_layers[config.layers_with_experts.index(layer)])
    return MoE(moe, config.hidden_size, config.swiglu, shared, config.add_bias_linear, config.exact_gelu)


class Decoder(Transformer):
    """The whole model."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding_type == "learned_absolute":
            assert config.max_position_embeddings is not None  # by the config
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(Block(config, make_mlp(config, i)) for i in range(config.num_layers))
        self.final_norm = make_norm(config, config.hidden_size)
        self.document_attention = document_attention  # see ``replace_attention``
        if not config.tie_embeddings:
            self.output_layer = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
            self.ends = ("word_embeddings", "output_layer")

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | ModelOutput:
        """``tokens``, ``labels`` int64 [B, S] -> each token's loss, fp32 [B, S]; without labels: logits [B, S, V].
        With experts and labels a ``ModelOutput``.

        ``position_ids`` int64 [B, S] or [1, S]: default 0 to S - 1. ``cu_seqlens`` int32 [D + 1]: where documents
        begin in the flattened batch, and B * S, for attention within documents.

        A model that is one stage of a pipeline takes the hidden states [B, S, H] of the stage before it in place of
        ``tokens``, and returns its own unless it is the last.
        Raises ValueError when the sequence is longer than the learned positions.
        """
        config = self.config
        x = tokens if tokens.is_floating_point() else self.embed(tokens, position_ids)
        ids = tokens if labels is None else labels  # [B, S], which hidden states may have a part of
        cos, sin = self.rotary(ids, position_ids, x.dtype)
        dropout = self.training and config.attention_dropout > 0
        documents = self.document_attention(cu_seqlens, ids, x.dtype, dropout, config.window_size)
        routed_layers: list[Routed] = []
        for layer in self.layers:
            x = layer(x, cos, sin, documents)
            if isinstance(x, tuple):
                x, routed = x
                routed_layers.append(routed)
        output = x
        if hasattr(self, "final_norm"):
            x = self.final_norm(x)
            tied = config.tie_embeddings
            output = losses_or_logits(x, self.word_embeddings.weight, labels) if tied else self.output_layer(x, labels)
        if config.moe is None or labels is None or not routed_layers:
            return output
        observed = observations(routed_layers, config.moe, len(config.layers_with_experts))
        return ModelOutput(output, auxiliary_losses(routed_layers, config.moe), observed)

    def finish_step(self, moved: bool, add_up: Callable[[Tensor], None]) -> None:
        if self.config.moe is not None:
            finish_step([layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)], moved, add_up)

    def embed(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        """``tokens`` int64 [B, S] -> [B, S, H]."""
        x = self.word_embeddings(tokens)
        if self.config.position_embedding_type == "learned_absolute":
            length, longest = tokens.shape[1], self.position_embeddings.num_embeddings
            if length > longest:
                raise ValueError(f"sequence of {length} tokens, but max_position_embeddings is {longest}")
            if position_ids is None:
                position_ids = torch.arange(length, device=tokens.device).unsqueeze(0)  # [1, S]
            x = x + self.position_embeddings(position_ids)
        return self.dropout(x)

    def rotary(
        self, ids: Tensor, position_ids: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Compute the ``rotary_table`` of the positions of ``ids`` [B, S]; Nones if positions are not rotary."""
        config = self.config
        if config.position_embedding_type not in ("rope", "yarn"):
            return None, None
        frequency, magnitude = frequencies(config.rotary_dim, config.rotary_base, ids.device), 1.0
        if config.position_embedding_type == "yarn":
            assert config.yarn_scaling_factor is not None and config.yarn_original_context is not None
            magnitude = yarn_magnitude(config.yarn_scaling_factor)
            frequency = scaled_as_yarn(
                frequency,
                config.rotary_base,
                config.yarn_scaling_factor,
                config.yarn_original_context,
                config.yarn_beta_fast,
                config.yarn_beta_slow,
            )
        elif config.rope_scaling_factor is not None:
            frequency = scaled_as_llama3(frequency, config.rope_scaling_factor)
        cos, sin = rotary_table(frequency, ids.shape[1], position_ids)
        # Megatron's rule: angles in fp32, their cosines and sines in the dtype of the activations.
        return (cos * magnitude).to(dtype), (sin * magnitude).to(dtype)
