"""Which model a checkpoint is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_zpp.architectures import Architecture, find_architecture
from megatron_zpp.models.transformer import TransformerConfig

from .folder import CheckpointError


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
        return architecture, architecture.config_class(**meta["model_config"])
    except TypeError as error:
        raise CheckpointError(f"the checkpoint's model_config is not one of {architecture.name} ({error})") from error


def check_architecture(meta: Mapping[str, Any], architecture: Architecture) -> None:
    """Raise CheckpointError unless the checkpoint is of ``architecture``."""
    name = meta["settings"].get("architecture")
    if name != architecture.name:
        raise CheckpointError(
            f"the checkpoint is of the architecture {name}, not {architecture.name}: use the program or --architecture "
            f"of {name}"
        )
