"""What decoder-only transformers have in common: their flags, arithmetic, memory and stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_zpp.architectures.architecture import BlockActivations
from megatron_zpp.models.transformer import DecoderConfig
from megatron_zpp.parallel.stages import StageModules
from megatron_zpp.settings.checks import flag_of, require
from megatron_zpp.settings.groups import ModelSettings


def resolve(
    model: ModelSettings, seq_length: int, *, default_ffn_size: int, dropout: float, tied: bool
) -> ModelSettings:
    """Completed flags of the shape. Raises SettingsError where they do not fit together.

    model: of ``check_shape``. dropout, tied: the architecture's defaults.
    """
    assert model.hidden_size and model.num_attention_heads
    hidden, heads = model.hidden_size, model.num_attention_heads
    require(
        model.kv_channels is not None or hidden % heads == 0,
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; change one or give --kv-channels",
    )
    # Megatron's default of --num-query-groups is 1; without --group-query-attention every head has its own group.
    groups = (model.num_query_groups or 1) if model.group_query_attention else heads
    require(heads % groups == 0, f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}")
    positions = model.max_position_embeddings or seq_length
    require(
        seq_length <= positions,
        f"--seq-length {seq_length} is longer than --max-position-embeddings {positions}; raise the latter",
    )
    tie, untie = model.tie_embeddings_and_output_weights, model.untie_embeddings_and_output_weights
    require(
        not (tie and untie),
        "--tie-embeddings-and-output-weights and --untie-embeddings-and-output-weights exclude each other; give one",
    )
    tied = tie or (tied and not untie)
    return dataclasses.replace(
        model,
        ffn_hidden_size=model.ffn_hidden_size or default_ffn_size,
        kv_channels=model.kv_channels or hidden // heads,
        num_query_groups=groups,
        max_position_embeddings=positions,
        attention_dropout=dropout if model.attention_dropout is None else model.attention_dropout,
        hidden_dropout=dropout if model.hidden_dropout is None else model.hidden_dropout,
        untie_embeddings_and_output_weights=not tied,
        tie_embeddings_and_output_weights=tied,
    )


def check_shape(model: ModelSettings) -> None:
    """Raise SettingsError unless layers, width and heads are given."""
    shape = ("num_layers", "hidden_size", "num_attention_heads")
    missing = [flag_of(name) for name in shape if getattr(model, name) is None]
    require(not missing, f"how large is the model? give {', '.join(missing)}, or a model with --preset")


def check_described(model: ModelSettings, title: str, lacks: Sequence[str] = (), **truth: str) -> None:
    """Raise SettingsError for a flag that describes another network than this one.

    title: the architecture's. lacks: switches for what it does not have, by field name. truth: what flags with a value
    may say, by field name.
    """
    instead = "leave it out, or use the program of an architecture that has it"
    for name in lacks:
        require(not getattr(model, name), f"{flag_of(name)} does not fit: {title} does not have it; {instead}")
    for name, value in truth.items():
        given = getattr(model, name)
        require(given in (None, value), f"{flag_of(name)} {given} does not fit: {title} has {value}; {instead}")


def shape_of(model: ModelSettings, vocab_size: int) -> dict[str, Any]:
    """The fields that configs of decoder-only transformers share, of completed flags."""
    return dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        vocab_size=vocab_size,
        ffn_hidden_size=model.ffn_hidden_size,
        kv_channels=model.kv_channels,
        norm_epsilon=model.norm_epsilon,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        init_method_std=model.init_method_std,
        tie_embeddings=model.tie_embeddings_and_output_weights,
    )


def flags_of(config: DecoderConfig, positions: int, tied: bool) -> list[str]:
    """The trainer's flags that become ``config``. positions: the longest sequence. tied: the architecture's default."""
    flags = {
        "--num-layers": config.num_layers,
        "--hidden-size": config.hidden_size,
        "--ffn-hidden-size": config.ffn_size,
        "--num-attention-heads": config.num_attention_heads,
        "--kv-channels": config.head_dim,
        "--max-position-embeddings": positions,
        "--norm-epsilon": config.norm_epsilon,
        # However few ids the tokenizer has, they are padded to this.
        "--make-vocab-size-divisible-by": config.vocab_size,
        "--attention-dropout": config.attention_dropout,
        "--hidden-dropout": config.hidden_dropout,
        "--init-method-std": config.init_method_std,
    }
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    if config.num_groups != config.num_attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(config.num_groups)]
    if config.tie_embeddings != tied:
        words.append(f"--{'tie' if config.tie_embeddings else 'untie'}-embeddings-and-output-weights")
    return words


def flops_per_token(config: DecoderConfig, seq_length: int, mlp_layers: int) -> float:
    """Floating-point operations per token of one forward and backward pass, by Megatron-LM's convention.

    Each weight of a linear layer costs 6 (a multiplication and an addition, once forward and twice backward), the
    output layer with its padded vocabulary included. Attention is counted as causal: a token attends to half of the
    sequence. Embedding look-ups, norms and activation recomputation count nothing.

    mlp_layers: linear layers of a block's MLP, each of hidden_size * ffn_size weights.
    """
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_groups * config.head_dim

    attention_weights = hidden * (queries + 2 * keys) + queries * hidden
    mlp_weights = mlp_layers * hidden * config.ffn_size
    weights = config.num_layers * (attention_weights + mlp_weights) + hidden * config.vocab_size
    # Scores and their product with the values: each 2 * queries * (seq_length / 2) forward, and twice that backward.
    attention = config.num_layers * 6 * queries * seq_length
    return float(6 * weights + attention)


def activations(config: DecoderConfig, itemsize: int, mlp_outputs: int, mlp_kept: int) -> BlockActivations:
    """What autograd keeps of a block; ``itemsize``: bytes of an element.

    Of the MLP, in vectors of ffn_size a token: mlp_outputs that linear layers from hidden_size make, mlp_kept in all.
    """
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys, ffn = config.num_groups * config.head_dim, config.ffn_size
    attention = 2 * queries + 2 * keys  # q, k, v, result
    masks = 2 * hidden if config.hidden_dropout > 0 else 0  # a byte each
    return BlockActivations(
        everything=itemsize * (4 * hidden + attention + mlp_kept * ffn) + masks,
        linear_layers=itemsize * (3 * hidden + attention + mlp_outputs * ffn),
        input=itemsize * hidden,
    )


def stages(config: DecoderConfig, positions: tuple[str, ...] = ()) -> StageModules:
    """positions: modules that the embeddings of positions are."""
    return StageModules(
        first=("word_embeddings", *positions),
        last=("final_norm",) if config.tie_embeddings else ("final_norm", "output_layer"),
        tied="word_embeddings" if config.tie_embeddings else None,
    )
