"""Write a checkpoint as a model of Hugging Face transformers: weights, config.json and tokenizer.

Keeps the result only if transformers computes our logits from it. Needs the extra ``hf``, and memory for one file of
weights (``--max-file-size``), not for the model.
"""

import argparse
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint import CheckpointError
from megatron_zpp.checkpoint.meta import saved_model
from megatron_zpp.checkpoint.tokenizer import settings_with_tokenizer
from megatron_zpp.commands.common import add_tokenizer_flags, given_architecture, given_tokenizer, open_verified
from megatron_zpp.convert.hf import files
from megatron_zpp.convert.hf.checkpoint import parameter_reader
from megatron_zpp.convert.hf.compare import compare
from megatron_zpp.convert.hf.tokenizer import build_kept, write_tokenizer
from megatron_zpp.data.text.tokenizers import Tokenizer
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import Architecture, Weight
from megatron_zpp.metrics.progress import progress
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.settings.flags import local_path, number, path_or_url

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(args: argparse.Namespace, given: Architecture | None = None) -> str:
    """Write the folder; return a message for the user. given: an architecture that is not one of ours."""
    files.require_packages()
    checkpoint, meta = open_verified(args.load, args.ckpt_step)
    architecture, config = saved_model(meta, given)
    mapping = architecture.huggingface_model(config)
    settings = settings_with_tokenizer(checkpoint, meta) | given_tokenizer(args)
    tokenizer = None if args.no_tokenizer else _build_tokenizer(settings, checkpoint, meta, config.vocab_size)
    num_rows = config.vocab_size
    if tokenizer is not None and not (args.keep_padded_vocab or meta.get("unpadded_vocabulary")):
        config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)  # type: ignore[type-var]
    positions = settings["max_position_embeddings"]
    hf_config = mapping.to_config(config, positions)
    saved = parameter_reader(checkpoint, meta)

    def ours(name: str) -> Tensor:
        tensor = saved(name)
        if name in Transformer.with_vocabulary:
            tensor = tensor[: config.vocab_size]
        return converted(tensor, name, checkpoint, args.dtype)

    @functools.lru_cache(maxsize=1)  # theirs that are parts of one weight come in a row
    def split(weight: Weight) -> tuple[Tensor, ...]:
        return weight.split(*map(ours, weight.ours))

    parts = {theirs: (weight, part) for weight in mapping.weights(config) for part, theirs in enumerate(weight.theirs)}

    def theirs(name: str) -> Tensor:
        weight, part = parts[name]
        return split(weight)[part]

    with files.new_folder(args.output, "--output") as folder:
        tokens: dict[str, int] = {}
        if tokenizer is not None:
            with progress("writing the tokenizer"):
                tokens = write_tokenizer(settings, tokenizer, folder)
        special, generation = files.generation_settings(settings, tokens)
        # Without a tokenizer no id is special; transformers' defaults belong to published models.
        special = {"bos_token_id": None, "eos_token_id": None} | special
        files.write_json(folder / "config.json", hf_config | special | {"torch_dtype": args.dtype})
        files.write_json(folder / "generation_config.json", generation)
        with progress("writing weights"):
            shapes = files.their_shapes(architecture, config, mapping)
            written = files.write_weights(folder, shapes, DTYPES[args.dtype], theirs, args.max_file_size)
        with progress("comparing logits"):
            model, stored = architecture.build_empty(config), files.WeightFiles(folder)
            written_config = files.read_config(folder, [mapping.model_type])
            difference = compare(model, ours, written_config, files.in_memory(mapping, config, stored.read), positions)
    weights = f"{len(written)} file{'s' if len(written) > 1 else ''} of {args.dtype} weights"
    cut = num_rows - config.vocab_size
    note = f"; {cut:,} rows that padded the vocabulary to {num_rows:,} were cut (--keep-padded-vocab)" if cut else ""
    has_tokenizer = (args.output / "tokenizer_config.json").exists()  # NullTokenizer has none to write
    return (
        f"{args.output}: {hf_config['architectures'][0]} of {checkpoint}, {weights}"
        f"{' and the tokenizer' if has_tokenizer else ', no tokenizer'}; "
        f"transformers' logits differ from ours by {difference:.1e} at most{note}"
    )


def converted(tensor: Tensor, name: str, checkpoint: Path, dtype: str) -> Tensor:
    """Convert a parameter to ``--dtype``. Raises ValueError for NaN, Inf, or values beyond the range of ``dtype``."""
    if not tensor.isfinite().all():
        raise CheckpointError(f"{name} of {checkpoint} has NaN or Inf: export an earlier one with --ckpt-step")
    rounded = tensor.to(DTYPES[dtype])
    if not rounded.isfinite().all():
        raise ValueError(f"{name} has values beyond the range of {dtype}: give --dtype bfloat16 or float32")
    return rounded


def _build_tokenizer(settings: dict[str, Any], checkpoint: Path, meta: dict[str, Any], vocab_size: int) -> Tokenizer:
    try:
        tokenizer = build_kept(settings, checkpoint, meta)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: say where it is now, or give --no-tokenizer") from error
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, but the model only {vocab_size}")
    return tokenizer


def _file_size(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 2GB")
    return text


def export_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add, iteration = parser.add_argument, number(int, at_least=0)
    add("--load", required=True, type=path_or_url, metavar="DIR|URL", help="what was given to --save in training")
    add("--ckpt-step", type=iteration, metavar="N", help="iteration to export; default the latest")
    add("--output", type=local_path(Path), required=True, metavar="DIR", help="folder to write; must be new")
    add("--dtype", choices=DTYPES, default="float32", help="of the weights; default float32, as trained")
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = export_parser("Write a checkpoint as a model of Hugging Face transformers.")
    add = parser.add_argument
    add("--max-file-size", type=_file_size, default="2GB", metavar="SIZE", help="of one weight file; default 2GB")
    padding = "keep the rows that pad the vocabulary beyond the tokenizer's ids"
    add("--keep-padded-vocab", action="store_true", help=padding)
    add("--no-tokenizer", action="store_true", help="write weights and config.json alone")
    add("--architecture", metavar="MODULE:NAME", help="the checkpoint's, if it is not one of ours")
    add_tokenizer_flags(parser, "tokenizer, if its files have moved since training")
    args = parser.parse_args(argv)
    if args.no_tokenizer and (args.keep_padded_vocab or given_tokenizer(args)):
        parser.error("--no-tokenizer excludes --keep-padded-vocab and the tokenizer's flags")
    return args


@reports_errors
def main() -> None:
    args = parse_arguments()
    print(export(args, given_architecture(args)))
