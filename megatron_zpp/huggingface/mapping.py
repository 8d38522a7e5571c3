"""Which of our architectures a model of transformers is, and the tensors that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_zpp.architectures import Architecture
from megatron_zpp.models.transformer import TransformerConfig


def from_hf_config(
    hf: Mapping[str, Any], architectures: Sequence[Architecture]
) -> tuple[Architecture, TransformerConfig, int]:
    """Our architecture and configuration, with every width filled in, and the number of positions.

    hf: config.json with all keys, defaults included. Raises ValueError for a model that none of ``architectures`` is,
    and ValueError that names each key whose value it cannot express.
    """
    kinds = {a.huggingface.model_type: (a, a.huggingface) for a in architectures if a.huggingface is not None}
    kind = hf.get("model_type")
    if kind not in kinds:
        raise ValueError(f"model_type is {kind}; {' and '.join(kinds)} can be imported")
    if hf.get("quantization_config") is not None:
        raise ValueError("the weights are quantized (quantization_config); import the model they were made from")
    architecture, mapping = kinds[kind]
    config, positions = mapping.from_config(hf)
    return architecture, config, positions


def their_shapes(architecture: Architecture, config: TransformerConfig) -> dict[str, torch.Size]:
    """{name: shape} of every tensor of transformers' model."""
    ours = dict(architecture.build_empty(config).named_parameters())
    return {
        name: tensor.shape
        for weight in architecture.require_huggingface().weights(config)
        for name, tensor in zip(weight.theirs, weight.split(ours[weight.ours]), strict=True)
    }
