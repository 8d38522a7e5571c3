"""Read parameters of our checkpoints one at a time, and save imported ones."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint import CheckpointError, read_meta, save_tensors
from megatron_zpp.checkpoint.index import read_index
from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.checkpoint.storage import read_tensor
from megatron_zpp.data.text.description import describe_tokenizer
from megatron_zpp.data.text.tokenizers import Tokenizer
from megatron_zpp.families import Architecture
from megatron_zpp.models.transformer import TransformerConfig
from megatron_zpp.optim.gradients import LossScaler
from megatron_zpp.settings.flags import flat_values
from megatron_zpp.settings.groups import Settings


def parameter_reader(checkpoint: Path, meta: Mapping[str, Any]) -> Callable[[str], Tensor]:
    """Return a function that reads one whole parameter by name, or raises CheckpointError."""
    index = read_index(checkpoint, meta)

    def read(name: str) -> Tensor:
        if f"model.{name}" not in index.tensors:
            raise CheckpointError(f"{checkpoint} is damaged: it lacks the parameter {name}")
        try:
            return read_tensor(index, f"model.{name}")
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{checkpoint} is damaged: {name} cannot be read ({error})") from error

    return read


def settings_of_import(
    architecture: Architecture, config: TransformerConfig, flags: list[str], positions: int, tokenizer: Tokenizer
) -> Settings:
    """Build the settings that an imported checkpoint keeps. flags: of its model and tokenizer. Raises ValueError."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, but the model only {config.vocab_size}")
    run = ["--mock-data", "--seq-length", str(positions), "--micro-batch-size", "1", "--train-iters", "1", "--lr", "0"]
    settings = parse_settings(architecture, [*flags, *run], note=lambda text: None)
    trained = architecture.build_model(settings.model, tokenizer.vocab_size).config
    if trained != config:
        raise ValueError(f"the trainer's flags cannot express this model: {config} becomes {trained}")
    return settings


def save_imported(
    folder: Path,
    architecture: Architecture,
    config: TransformerConfig,
    settings: Settings,
    read: Callable[[str, str], Tensor],
    tokenizer: Tokenizer,
    counters: Counters | None = None,
    states: Collection[str] = (),
    unpadded_vocabulary: bool = False,
) -> tuple[Path, dict[str, Any]]:
    """Save a checkpoint of imported parameters; return its folder and its ``read_meta``.

    read: returns a parameter by name and "", or its optimizer state by name and one of ``states``.
    unpadded_vocabulary: evaluation and export keep rows beyond the tokenizer's ids, which padded no vocabulary.
    """
    counters = counters or Counters()
    imported = {"architecture": settings.architecture, "seq_length": settings.training.seq_length}
    meta = {
        "settings": imported | flat_values(settings.model) | flat_values(settings.tokenizer),
        "tokenizer": describe_tokenizer(settings.tokenizer.tokenizer_type or "", tokenizer),
        "unpadded_vocabulary": unpadded_vocabulary,
        "model_config": dataclasses.asdict(config),
        "counters": dataclasses.asdict(counters),
        "schedule": None,
        "loss_scaler": LossScaler(settings.precision).state_dict(),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    sources = {}
    model = architecture.build_empty(config)
    trained = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        for state in ("", *states) if name in trained else ("",):
            key = f"optimizer.{name}.{state}" if state else f"model.{name}"
            shapes[key] = () if state == "step" else tuple(tensor.shape)
            sources[key] = name, state
    checkpoint = save_tensors(str(folder), shapes, lambda key: read(*sources[key]), meta, counters.iteration)
    return checkpoint, read_meta(checkpoint)
