"""Small models of both families, with every option somewhere and weights that nothing repeats."""

from __future__ import annotations

import torch
from megatron_zpp.huggingface.names import build_empty
from torch import nn

from megatron_zpp.models.gpt import GPT, GPTConfig
from megatron_zpp.models.llama import Llama, LlamaConfig

POSITIONS = 64
CONFIGS: dict[str, GPTConfig | LlamaConfig] = {
    "gpt": GPTConfig(2, 32, 4, 101, POSITIONS, ffn_hidden_size=128, kv_channels=8),
    "gpt-untied": GPTConfig(
        3, 32, 2, 101, POSITIONS, ffn_hidden_size=48, kv_channels=16, norm_epsilon=1e-3, tie_embeddings=False
    ),
    "llama": LlamaConfig(2, 32, 4, 101, ffn_hidden_size=40, num_query_groups=4, kv_channels=8),
    "llama-grouped": LlamaConfig(
        3,
        32,
        4,
        101,
        ffn_hidden_size=64,
        num_query_groups=2,
        kv_channels=8,
        norm_epsilon=1e-6,
        attention_dropout=0.1,
        rotary_base=500000,
        rope_scaling_factor=8.0,
    ),
    "llama-tied": LlamaConfig(
        2, 32, 4, 101, ffn_hidden_size=64, num_query_groups=1, kv_channels=16, tie_embeddings=True
    ),
}


def build(config: GPTConfig | LlamaConfig, seed: int = 0) -> GPT | Llama:
    """Our model with random weights in every place, norms and biases too; ready to compute logits."""
    model = build_empty(config).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
    return model
