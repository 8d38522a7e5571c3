"""Which model a checkpoint is of."""

from __future__ import annotations

import dataclasses
import reprlib
import typing
from collections.abc import Mapping
from typing import Any

from megatron_zpp.families import ARCHITECTURES, Architecture, find_architecture
from megatron_zpp.models.transformer import TransformerConfig

from .files import CheckpointError

_MOST_LAYERS = 10_000  # a module is built for each


def saved_model(meta: Mapping[str, Any], given: Architecture | None = None) -> tuple[Architecture, TransformerConfig]:
    """Architecture and shape of the model that a checkpoint is of. meta: of ``read_meta``.

    given: the user's own; without it the checkpoint's name must be one of ours. Raises CheckpointError.
    """
    name = meta["settings"].get("architecture")
    if given is not None:
        check_architecture(meta, given)
        architecture = given
    else:
        try:
            architecture = find_architecture(name)
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint is of the architecture {name}, which is none of ours ({error}): if it is yours, say "
                "where its record is with --architecture package.module:NAME"
            ) from error
    try:
        if architecture in ARCHITECTURES:  # what values others may have, only they know
            check_config(meta["model_config"], architecture.config_class)
        return architecture, (architecture.saved_config or architecture.config_class)(**meta["model_config"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's model_config is not one of {architecture.name} ({error})") from error


def check_config(values: Mapping[str, Any], config_class: type, within: str = "") -> None:
    """Raise ValueError where a value is not of its field's type, or a size is none that a model has."""
    for name, hint in typing.get_type_hints(config_class).items():
        kinds = typing.get_args(hint) or (hint,)
        if name not in values:
            continue
        value: Any = values[name]
        part = next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)
        if part is not None and isinstance(value, Mapping):
            check_config(value, part, f"{name}.")
            continue
        is_number = type(value) is int or (type(value) is float and float in kinds)
        largest = _MOST_LAYERS if name == "num_layers" else 2**31
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        if not fits or (is_number and not (0 if float in kinds else 1) <= value <= largest):
            raise ValueError(f"{within}{name} is {reprlib.repr(value)}")


def check_architecture(meta: Mapping[str, Any], architecture: Architecture) -> None:
    """Raise CheckpointError unless the checkpoint is of ``architecture``."""
    name = meta["settings"].get("architecture")
    if name != architecture.name:
        raise CheckpointError(
            f"the checkpoint is of the architecture {name}, not {architecture.name}: use the program or --architecture "
            f"of {name}"
        )
