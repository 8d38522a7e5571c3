"""Helpers for commands. Imports torch only for a command that needs a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zpp.data.text.tokenizers import TOKENIZER_FLAGS
from megatron_zpp.settings.flags import iterate_flags, number
from megatron_zpp.settings.tokenizer import TokenizerSettings

if TYPE_CHECKING:
    from megatron_zpp.families import Architecture


def open_verified(load: str, iteration: int | None) -> tuple[Path, dict[str, Any]]:
    """Return the folder and meta.json of a checkpoint; iteration None: the latest. Raises CheckpointError."""
    from megatron_zpp.checkpoint import CheckpointError, problems, read_meta, require_checkpoint
    from megatron_zpp.metrics.progress import progress

    checkpoint = require_checkpoint(load, iteration)
    with progress("verifying the checkpoint"):
        wrong = problems(checkpoint)
    if wrong:
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(wrong)}. Give another one with --ckpt-step")
    return checkpoint, read_meta(checkpoint)


def given_architecture(args: argparse.Namespace) -> Architecture | None:
    """Load the architecture that ``--architecture`` names; None without the flag. Raises ValueError."""
    from megatron_zpp.families import load_architecture

    return load_architecture(args.architecture) if args.architecture else None


def add_number(parser: argparse._ActionsContainer, flag: str, default: float, help: str, **bounds: float) -> None:
    """Add a flag for a number within ``bounds``."""
    read = number(type(default), **bounds)
    parser.add_argument(flag, type=read, default=default, metavar="N", help=f"{help}; default {default:,g}")


def add_tokenizer_flags(parser: argparse.ArgumentParser, title: str, required: bool = False) -> None:
    section = parser.add_argument_group(title)
    for flag in iterate_flags(TokenizerSettings):
        flag.add_to(section, required=required and flag.name == "--tokenizer-type")


def given_tokenizer(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of ``add_tokenizer_flags`` that were given, as arguments of ``build_tokenizer``."""
    given = {name: getattr(args, name) for name in TOKENIZER_FLAGS}
    return {name: value for name, value in given.items() if value is not None}
