"""Parameters of our checkpoints, one at a time, and the flags that train on from an imported one."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint import CheckpointError, read_meta, save_parameters
from megatron_zpp.checkpoint.storage import CheckpointReader, read_index
from megatron_zpp.data.tokenizers import Tokenizer
from megatron_zpp.models.gpt import GPTConfig
from megatron_zpp.models.llama import LlamaConfig
from megatron_zpp.optim.loss_scaler import LossScaler
from megatron_zpp.settings.groups import Settings
from megatron_zpp.training.model import build_model
from megatron_zpp.training.setup import Counters

from .names import build_empty


def saved_config(meta: Mapping[str, Any]) -> GPTConfig | LlamaConfig:
    """The model that a checkpoint is of. meta: of ``read_meta``."""
    return (GPTConfig if meta["settings"]["architecture"] == "gpt" else LlamaConfig)(**meta["model_config"])


def parameter_reader(checkpoint: Path, meta: Mapping[str, Any]) -> Callable[[str], Tensor]:
    """A function that reads one whole parameter by its name. Raises CheckpointError."""
    metadata, places = read_index(checkpoint, meta)
    reader = CheckpointReader(checkpoint, metadata, places)

    def read(name: str) -> Tensor:
        saved = metadata.state_dict_metadata.get(f"model.{name}")
        if saved is None:
            raise CheckpointError(f"{checkpoint} is damaged: it lacks the parameter {name}")
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)  # type: ignore[union-attr]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist says that we know
                dcp.load({f"model.{name}": tensor}, storage_reader=reader, no_dist=True)
        except dcp.api.CheckpointException as error:
            cause, _ = error.failures[min(error.failures)]
            raise CheckpointError(f"{checkpoint} is damaged: {name} cannot be read ({cause})") from error
        return tensor

    return read


def model_flags(config: GPTConfig | LlamaConfig, positions: int) -> list[str]:
    """The trainer's flags for a model. positions: the longest sequence it is made for."""
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
    if isinstance(config, LlamaConfig):
        words += ["--rotary-base", str(config.rotary_base)]
        if config.num_groups != config.num_attention_heads:
            words += ["--group-query-attention", "--num-query-groups", str(config.num_groups)]
        if config.rope_scaling_factor is not None:
            words += ["--use-rope-scaling", "--rope-scaling-factor", str(config.rope_scaling_factor)]
    tied_unless_asked = isinstance(config, GPTConfig)
    if config.tie_embeddings != tied_unless_asked:
        words.append(f"--{'tie' if config.tie_embeddings else 'untie'}-embeddings-and-output-weights")
    return words


def settings_of_import(
    config: GPTConfig | LlamaConfig, flags: list[str], positions: int, tokenizer: Tokenizer
) -> Settings:
    """The settings that an imported checkpoint keeps: those of its flags, which are the model's and the tokenizer's.

    Raises ValueError for what cannot be trained.
    """
    architecture = "gpt" if isinstance(config, GPTConfig) else "llama"
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model only {config.vocab_size}: give the "
            "model's own with --tokenizer-type and its files"
        )
    run = ["--mock-data", "--seq-length", str(positions), "--micro-batch-size", "1", "--train-iters", "1", "--lr", "0"]
    settings = parse_settings(architecture, [*flags, *run], note=lambda text: None)
    trained = build_model(architecture, settings.model, tokenizer.vocab_size).config
    if trained != config:
        raise ValueError(f"the trainer's flags cannot express this model: {config} becomes {trained}")
    return settings


def save_imported(
    folder: Path, config: GPTConfig | LlamaConfig, settings: Settings, tensor_of: Callable[[str], Tensor]
) -> tuple[Path, dict[str, Any]]:
    """Save a checkpoint at iteration 0 of parameters from elsewhere; its folder and what ``read_meta`` says of it."""
    of_no_run = {"architecture": settings.architecture, "seq_length": settings.training.seq_length}
    meta = {
        "settings": of_no_run | dataclasses.asdict(settings.model) | dataclasses.asdict(settings.tokenizer),
        "model_config": dataclasses.asdict(config),
        "counters": dataclasses.asdict(Counters()),
        "schedule": None,
        "loss_scaler": LossScaler.from_settings(settings.precision).state_dict(),
    }
    parts = [(name, tuple(parameter.shape)) for name, parameter in build_empty(config).named_parameters()]
    checkpoint = save_parameters(str(folder), parts, tensor_of, meta)
    return checkpoint, read_meta(checkpoint)
