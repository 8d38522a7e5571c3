"""How much work a model is: its parameters, and the floating-point operations of training on one token."""

from __future__ import annotations

import torch

from .gpt import GPT, GPTConfig
from .llama import Llama, LlamaConfig


def num_parameters(config: GPTConfig | LlamaConfig) -> int:
    """Parameters of the model, tied embeddings counted once."""
    with torch.device("meta"):  # allocates nothing
        model = GPT(config) if isinstance(config, GPTConfig) else Llama(config)
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(config: GPTConfig | LlamaConfig, seq_length: int) -> float:
    """Floating-point operations per token of one forward and backward pass, by Megatron-LM's convention.

    Each weight of a matrix product costs 6 (a multiplication and an addition, once forward and twice backward), the
    output layer with its padded vocabulary included. Attention is counted as causal: a token attends to half of the
    sequence. Embedding look-ups, norms and activation recomputation count nothing.
    """
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_groups * config.head_dim
    fc1_copies = 2 if isinstance(config, LlamaConfig) else 1  # SwiGLU: gate and up

    attention_weights = hidden * (queries + 2 * keys) + queries * hidden
    mlp_weights = (fc1_copies + 1) * hidden * config.ffn_size
    weights = config.num_layers * (attention_weights + mlp_weights) + hidden * config.vocab_size
    # Scores and their product with the values: each 2 * queries * (seq_length / 2) forward, and twice that backward.
    attention = config.num_layers * 6 * queries * seq_length
    return float(6 * weights + attention)
