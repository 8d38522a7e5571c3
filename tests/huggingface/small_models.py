"""Small models of both families, with every option somewhere and weights that nothing repeats."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_zpp.architectures import HuggingFaceMapping
from megatron_zpp.models.gpt import GPTConfig
from megatron_zpp.models.llama import LlamaConfig
from megatron_zpp.models.transformer import Transformer
from tests.architectures.find import architecture_of

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


def mapping_of(config: GPTConfig | LlamaConfig) -> HuggingFaceMapping:
    return architecture_of(config).require_huggingface()


def to_hf_config(config: GPTConfig | LlamaConfig, positions: int = POSITIONS) -> dict[str, Any]:
    return mapping_of(config).to_config(config, positions)


def build_empty(config: GPTConfig | LlamaConfig) -> Transformer:
    return architecture_of(config).build_empty(config)


def build(config: GPTConfig | LlamaConfig, seed: int = 0) -> Transformer:
    """Our model with random weights in every place, norms and biases too; ready to compute logits."""
    model = build_empty(config).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
    return model
