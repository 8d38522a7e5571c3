"""Helpers for commands. Imports torch only for a command that needs a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zpp.data.text.tokenizers import TOKENIZER_FLAGS, TOKENIZER_TYPES
from megatron_zpp.settings.flags import local_path, number

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
    """Add the trainer's flags of the same names."""
    add = parser.add_argument_group(title).add_argument
    types = ", ".join(TOKENIZER_TYPES)
    add("--tokenizer-type", required=required, choices=TOKENIZER_TYPES, metavar="NAME", help=types)
    add(
        "--tokenizer-model",
        type=local_path(str),
        metavar="PATH",
        help="SentencePiece model; .tiktoken file or JSON vocabulary; tokenizer.json, its folder, or its model's name "
        "in Hugging Face's cache",
    )
    add("--vocab-file", type=local_path(str), metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", type=local_path(str), metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    size = "ids of NullTokenizer, and of TikTokenizer with a JSON vocabulary: default 131072"
    add("--vocab-size", type=number(int, at_least=1), metavar="N", help=size)
    pattern = "how TikTokenizer splits words: gpt2, cl100k_base, o200k_base, v1, v2 or a regular expression"
    add("--tiktoken-pattern", metavar="P", help=pattern)
    bare = "HuggingFaceTokenizer puts nothing around a text, such as the BOS of its post-processor"
    add("--tokenizer-hf-no-include-special-tokens", action="store_true", default=None, help=bare)
    special = "ids before the tokens of TikTokenizer's JSON vocabulary; default 1000"
    add("--tiktoken-num-special-tokens", type=number(int, at_least=3), metavar="N", help=special)


def given_tokenizer(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of ``add_tokenizer_flags`` that were given, as arguments of ``build_tokenizer``."""
    given = {name: getattr(args, name) for name in TOKENIZER_FLAGS}
    return {name: value for name, value in given.items() if value is not None}
