"""Which of our architectures a model of transformers is, and the tensors that it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.meta import check_config
from megatron_zpp.families import Architecture, HuggingFaceMapping
from megatron_zpp.models.transformer import TransformerConfig


def from_hf_config(
    hf: Mapping[str, Any], architectures: Sequence[Architecture]
) -> tuple[Architecture, TransformerConfig, int]:
    """Our architecture and configuration, with every width filled in, and the number of positions.

    hf: config.json with all keys, defaults included. Raises ValueError for a model that none of ``architectures`` is,
    and ValueError that names each key whose value it cannot express.
    """
    # The last that has it: GPT's flags describe all models, but a Llama's are shorter.
    kinds = {mapping.model_type: (each, mapping) for each in architectures for mapping in each.huggingface}
    kind = hf.get("model_type")
    if kind not in kinds:
        *others, last = kinds
        raise ValueError(f"model_type is {kind}; {', '.join(others)} and {last} can be imported")
    if hf.get("quantization_config") is not None:
        raise ValueError("the weights are quantized (quantization_config); import the model they were made from")
    architecture, mapping = kinds[kind]
    config, positions = mapping.from_config(hf)
    check_config(dataclasses.asdict(config), type(config))  # before any memory is asked for
    return architecture, config, positions


def in_memory(
    mapping: HuggingFaceMapping, config: TransformerConfig, read: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """``read``, which reads a tensor of transformers' files by its name, for the parameters of its model."""
    made = {parameter.name: parameter for parameter in mapping.in_memory(config)}

    def read_parameter(name: str) -> Tensor:
        return made[name].join(*map(read, made[name].tensors)) if name in made else read(name)

    return read_parameter


def their_shapes(architecture: Architecture, config: TransformerConfig) -> dict[str, torch.Size]:
    """{name: shape} of every tensor in the files of transformers' model."""
    ours = dict(architecture.build_empty(config).named_parameters())
    return {
        name: tensor.shape
        for weight in architecture.huggingface_model(config).weights(config)
        for name, tensor in zip(weight.theirs, weight.split(ours[weight.ours]), strict=True)
    }
