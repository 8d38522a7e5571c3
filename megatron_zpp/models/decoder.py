"""A decoder-only transformer that its config describes: GPT, Llama, DeepSeek, Gemma, and mixtures of their parts.

From the bottom up: a block and what it is made of, then the model. Modules and parameters have Megatron's names.
Weights are garbage until ``init_weights`` has filled them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from .attention import LatentAttention, SelfAttention, document_attention
from .decoder_config import DecoderConfig
from .layers import OutputLayer, output_logits
from .mlp import MLP, GatedMLP
from .moe import MoE, Routed, auxiliary_losses, finish_step, observations
from .rotary import frequencies, rotary_table, scaled_as_llama3, yarn_magnitude
from .transformer import ModelOutput, Transformer


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it, after it, or both: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.window = config.window_of(layer)
        self.has_rope, self.is_local = config.has_rope(layer), config.is_local(layer)
        self.residual_multiplier, self.is_parallel = config.residual_multiplier, config.use_parallel_residual
        no_norm = nn.Identity()
        self.input_norm = no_norm if config.no_pre_norms else config.make_norm(config.hidden_size)
        self.self_attention = (LatentAttention if config.multi_latent_attention else SelfAttention)(config, layer)
        self.post_attention_norm = config.make_norm(config.hidden_size) if config.post_self_attn_layernorm else no_norm
        self.pre_mlp_norm = no_norm if config.no_pre_norms else config.make_norm(config.hidden_size)
        self.mlp = make_mlp(config, layer)
        self.post_mlp_norm = config.make_norm(config.hidden_size) if config.post_mlp_layernorm else no_norm
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Routed]:
        """``cos`` and ``sin``: the ``rotary_table``, where positions are rotary. ``documents``: of
        ``document_attention``. What experts did comes along: FSDP2 must see all that the loss depends on."""
        before = x
        y = self.self_attention(self.input_norm(x), cos, sin, documents)
        x = self.add(x, self.post_attention_norm(y))
        y = self.mlp(self.pre_mlp_norm(before if self.is_parallel else x))
        if isinstance(y, Tensor):
            return self.add(x, self.post_mlp_norm(y))
        y, routed = y
        return self.add(x, self.post_mlp_norm(y)), routed

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        y = self.dropout(y)
        return x + (y if self.residual_multiplier == 1 else y * self.residual_multiplier)


def make_mlp(config: DecoderConfig, layer: int) -> nn.Module:
    """Build the MLP, or the experts, of the block with number ``layer``."""
    activation, bias = config.activation, config.add_bias_linear or config.mlp_bias
    mlp = GatedMLP if activation.is_gated else MLP
    if config.moe is None or layer not in config.layers_with_experts:
        return mlp(config.hidden_size, config.ffn_size, activation, bias)
    shared_size = config.moe.shared_expert_size
    shared = None if shared_size is None else mlp(config.hidden_size, shared_size, activation, bias)
    moe = replace(config.moe, num_experts=config.experts_of_layers[config.layers_with_experts.index(layer)])
    return MoE(moe, config.hidden_size, activation, shared, bias)


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
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.final_norm = config.make_norm(config.hidden_size)
        self.document_attention = document_attention  # see ``replace_attention``
        if not config.tie_embeddings:
            self.output_layer = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
            self.ends = ("word_embeddings", "output_layer")  # a tied weight stays in the root's unit

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | ModelOutput:
        """``tokens``, ``labels`` int64 [B, S] -> each token's loss, fp32 [B, S]; without labels: logits [B, S, V].

        With experts and labels a ``ModelOutput``. ``position_ids`` int64 [B, S] or [1, S]: default 0 to S - 1.
        ``cu_seqlens`` int32 [D + 1]: where documents begin in the flattened batch, and B * S, for attention within
        documents.

        A model that is one stage of a pipeline takes the hidden states [B, S, H] of the stage before it in place of
        ``tokens``, and returns its own unless it is the last.
        """
        config = self.config
        x = tokens if tokens.is_floating_point() else self.embed(tokens, position_ids)
        ids = tokens if labels is None else labels  # [B, S], which hidden states may have a part of
        # For all blocks at once: ``rotary`` by ``Block.is_local``, ``document_attention`` by window.
        needs_mask = config.changes_scores or (self.training and config.attention_dropout > 0)
        locals_, windows = {block.is_local for block in self.blocks}, {block.window for block in self.blocks}
        tables = {is_local: self.rotary(ids, position_ids, x.dtype, is_local) for is_local in locals_}
        documents = {size: self.document_attention(cu_seqlens, ids, x.dtype, needs_mask, size) for size in windows}
        routed_layers: list[Routed] = []
        for block in self.blocks:
            cos, sin = tables[block.is_local] if block.has_rope else (None, None)
            x = block(x, cos, sin, documents[block.window])
            if isinstance(x, tuple):
                x, routed = x
                routed_layers.append(routed)
        output = x
        if hasattr(self, "final_norm"):
            x, softcap = self.final_norm(x), config.final_logit_softcapping
            x = x if config.logits_scaling == 1 else x / config.logits_scaling
            compute: Callable[[Tensor, Tensor], Tensor] = partial(output_logits, softcap=softcap)
            if labels is not None:
                compute = partial(self.loss, labels=labels, softcap=softcap)
            output = compute(x, self.word_embeddings.weight) if config.tie_embeddings else self.output_layer(x, compute)
        if config.moe is None or labels is None or not routed_layers:
            return output
        observed = observations(routed_layers, config.moe, len(config.layers_with_experts))
        return ModelOutput(output, auxiliary_losses(routed_layers, config.moe), observed)

    @property
    def blocks(self) -> Sequence[Block]:
        return self.layers  # type: ignore[return-value]

    def finish_step(self, has_stepped: bool, add_up: Callable[[Tensor], None]) -> None:
        if self.config.moe is not None:
            finish_step([layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)], has_stepped, add_up)

    def embed(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        """``tokens`` int64 [B, S] -> [B, S, H]."""
        x = self.word_embeddings(tokens)
        if self.config.embedding_multiplier != 1:
            x = x * self.config.embedding_multiplier
        if self.config.position_embedding_type == "learned_absolute":
            length, longest = tokens.shape[1], self.position_embeddings.num_embeddings
            if length > longest:
                raise ValueError(f"sequence of {length} tokens, but max_position_embeddings is {longest}")
            if position_ids is None:
                position_ids = torch.arange(length, device=tokens.device).unsqueeze(0)  # [1, S]
            x = x + self.position_embeddings(position_ids)
        return self.dropout(x)

    def rotary(
        self, ids: Tensor, position_ids: Tensor | None, dtype: torch.dtype, is_local: bool = False
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Compute the ``rotary_table`` of the positions of ``ids`` [B, S]; Nones if positions are not rotary."""
        config = self.config
        if config.position_embedding_type not in ("rope", "yarn"):
            return None, None
        base = config.rotary_base_local if is_local and config.rotary_base_local else config.rotary_base
        frequency, magnitude = frequencies(config.rotary_dim, base, ids.device), 1.0
        if is_local:
            pass  # never scaled
        elif config.position_embedding_type == "yarn":
            frequency, magnitude = scaled_as_yarn(frequency, config)
        elif config.rope_scaling_factor is not None:
            frequency = scaled_as_llama3(frequency, config.rope_scaling_factor, config.yarn_original_context or 8192)
        elif config.rotary_seq_len_interpolation_factor is not None:
            frequency = frequency / config.rotary_seq_len_interpolation_factor
        cos, sin = rotary_table(frequency, ids.shape[1], position_ids)
        # Megatron's rule: angles in fp32, their cosines and sines in the dtype of the activations.
        return (cos * magnitude).to(dtype), (sin * magnitude).to(dtype)


def scaled_as_yarn(frequency: Tensor, config: DecoderConfig) -> tuple[Tensor, float]:
    """YaRN's scaling of frequencies, and its factor of queries and keys (Peng et al., arXiv 2309.00071).

    Pairs of channels that turn ``yarn_beta_fast`` times or more within the original context are kept, those that turn
    ``yarn_beta_slow`` times or less are stretched, and between those two the share that is stretched grows with the
    pair's number.
    """
    pairs, factor, context = frequency.shape[0], config.yarn_scaling_factor, config.yarn_original_context
    assert factor is not None and context is not None  # by the config
    first, last = (
        pairs * math.log(context / (turns * 2 * math.pi)) / math.log(config.rotary_base)
        for turns in (config.yarn_beta_fast, config.yarn_beta_slow)
    )
    if not config.no_yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    number = torch.arange(pairs, dtype=torch.float32, device=frequency.device)
    stretched = ((number - first) / max(last - first, 0.001)).clamp(0, 1)
    magnitude = yarn_magnitude(factor, config.mscale) / yarn_magnitude(factor, config.mscale_all_dim)
    return stretched * frequency / factor + (1 - stretched) * frequency, magnitude
