"""Writes a checkpoint as a model of Hugging Face transformers: weights, config.json and tokenizer.

    python tools/export_hf.py --load runs/quickstart/zeropp --output runs/hf

The architecture's mapping says which of transformers' models it becomes. The result is kept only if transformers
computes our logits from it. Needs the extra ``hf``, and memory for one file of weights (``--max-file-size``), not for
the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError, find_checkpoint, problems, read_meta
from megatron_zpp.checkpoint.meta import saved_model
from megatron_zpp.checkpoint.tokenizer import settings_with_tokenizer
from megatron_zpp.commands.common import add_tokenizer_flags, given_architecture, given_tokenizer, report_errors
from megatron_zpp.convert.hf import files
from megatron_zpp.convert.hf.checkpoint import parameter_reader
from megatron_zpp.convert.hf.compare import compare
from megatron_zpp.convert.hf.files import generation_settings
from megatron_zpp.convert.hf.mapping import in_memory, their_shapes
from megatron_zpp.convert.hf.tokenizer import build, write_tokenizer
from megatron_zpp.data.text.tokenizers import Tokenizer
from megatron_zpp.families import Architecture
from megatron_zpp.metrics.progress import progress
from megatron_zpp.settings.flags import number

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checkpoint_to_export(load: str, iteration: int | None) -> tuple[Path, dict[str, Any]]:
    """Its folder and its meta.json; iteration None: the latest. Raises CheckpointError."""
    checkpoint = find_checkpoint(load, iteration)
    if checkpoint is None:
        raise CheckpointError(f"{load} holds no checkpoint: give --load what was given to --save in training")
    with progress("verifying the checkpoint"):
        wrong = problems(checkpoint)
    if wrong:
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(wrong)}. Export another one with --ckpt-step")
    return checkpoint, read_meta(checkpoint)


def export(args: argparse.Namespace, given: Architecture | None = None) -> str:
    """Write the folder; returns what to tell the user. Raises ValueError, OSError or ImportError on a mistake.

    given: the checkpoint's architecture, where it is none of ours.
    """
    files.require_packages()
    checkpoint, meta = checkpoint_to_export(args.load, args.ckpt_step)
    architecture, config = saved_model(meta, given)
    mapping, settings = (
        architecture.huggingface_model(config),
        settings_with_tokenizer(checkpoint, meta) | given_tokenizer(args),
    )
    tokenizer = None if args.no_tokenizer else load_tokenizer(settings, config.vocab_size)
    if args.trim_vocab and tokenizer is not None:
        config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)  # type: ignore[type-var]
    positions = settings["max_position_embeddings"]
    hf_config = mapping.to_config(config, positions)
    saved = parameter_reader(checkpoint, meta)

    @functools.lru_cache(maxsize=1)  # what one of ours is split into is asked for in a row
    def ours(name: str) -> Tensor:
        tensor = saved(name)
        if name in mapping.with_vocabulary:
            tensor = tensor[: config.vocab_size]
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} of {checkpoint} has NaN or Inf: export an earlier one with --ckpt-step")
        rounded = tensor.to(DTYPES[args.dtype])
        if not rounded.isfinite().all():
            raise ValueError(f"{name} has values beyond the range of {args.dtype}: give --dtype bfloat16 or float32")
        return rounded

    parts = {theirs: (weight, part) for weight in mapping.weights(config) for part, theirs in enumerate(weight.theirs)}

    def theirs(name: str) -> Tensor:
        weight, part = parts[name]
        return weight.split(ours(weight.ours))[part]

    with files.new_folder(args.output, "--output") as folder:
        tokens: dict[str, int] = {}
        if tokenizer is not None:
            with progress("writing the tokenizer"):
                tokens = write_tokenizer(settings, tokenizer, folder)
        special, generation = generation_settings(settings, tokens)
        files.write_config(folder, hf_config, special, generation, args.dtype)
        with progress("writing weights"):
            shapes = their_shapes(architecture, config)
            written = files.write_weights(folder, shapes, DTYPES[args.dtype], theirs, args.max_file_size)
        with progress("comparing logits"):
            model, stored = architecture.build_empty(config), files.WeightFiles(folder)
            written_config = files.read_config(folder, [mapping.model_type])
            difference = compare(model, ours, written_config, in_memory(mapping, config, stored.read), positions)
    weights = f"{len(written)} file{'s' if len(written) > 1 else ''} of {args.dtype} weights"
    has_tokenizer = (args.output / "tokenizer_config.json").exists()  # NullTokenizer has none to write
    return (
        f"{args.output}: {hf_config['architectures'][0]} of {checkpoint}, {weights}"
        f"{' and the tokenizer' if has_tokenizer else ', no tokenizer'}; "
        f"transformers' logits differ from ours by {difference:.1e} at most"
    )


def load_tokenizer(settings: dict[str, Any], vocab_size: int) -> Tokenizer:
    """The tokenizer that the run was trained with, or that of the flags. vocab_size: the model's."""
    try:
        tokenizer = build(settings)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}: say where the tokenizer's files are now, or export the weights alone with --no-tokenizer"
        ) from error
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, but the model only {vocab_size}")
    return tokenizer


def file_size(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 2GB")
    return text


def export_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the flags of every export."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--load", required=True, metavar="DIR", help="what was given to --save in training")
    parser.add_argument(
        "--ckpt-step", type=number(int, at_least=0), metavar="N", help="iteration to export; default the latest"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must be new")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the weights; default float32, as trained"
    )
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = export_parser("Write a checkpoint as a model of Hugging Face transformers.")
    parser.add_argument(
        "--max-file-size", type=file_size, default="2GB", metavar="SIZE", help="of one file of weights; default 2GB"
    )
    parser.add_argument(
        "--trim-vocab",
        action="store_true",
        help="leave out the rows that pad the vocabulary beyond the tokenizer's ids",
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="write weights and config.json alone")
    parser.add_argument("--architecture", metavar="MODULE:NAME", help="the checkpoint's, where it is none of ours")
    add_tokenizer_flags(parser, "tokenizer, where its files are no longer where they were in training")
    args = parser.parse_args(argv)
    if args.no_tokenizer and (args.trim_vocab or given_tokenizer(args)):
        parser.error("--no-tokenizer excludes --trim-vocab and the tokenizer's flags")
    return args


def main() -> int:
    args = parse_arguments()
    return report_errors(lambda: print(export(args, given_architecture(args))))


if __name__ == "__main__":
    sys.exit(main())
