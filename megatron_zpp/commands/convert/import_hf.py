"""Make a checkpoint to train on from, out of a model of Hugging Face transformers.

Prints the trainer's flags for it. Keeps the checkpoint only if its logits equal transformers'. Needs the extra
``hf``, and memory for two transformer blocks and the embeddings, not for the model.
"""

import argparse
import functools
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.commands.common import add_tokenizer_flags, given_architecture, given_tokenizer
from megatron_zpp.convert.hf import files
from megatron_zpp.convert.hf.checkpoint import parameter_reader, save_imported, settings_of_import
from megatron_zpp.convert.hf.compare import compare
from megatron_zpp.convert.hf.tokenizer import build, find_tokenizer
from megatron_zpp.data.text.description import format_description, refuse_conflict
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import ARCHITECTURES, Architecture, Weight
from megatron_zpp.metrics.progress import progress
from megatron_zpp.settings.flags import local_path

CONSTANTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")  # that older versions saved with weights
NULL_TOKENIZER = "a NullTokenizer with --vocab-size serves data that is ids already"
NEXT = "and the flags of the run: sequence length, batches, data, learning rate, --save"


def import_(args: argparse.Namespace, architectures: Sequence[Architecture] = ARCHITECTURES) -> str:
    """Save the checkpoint; return a message for the user. architectures: those that the model may have."""
    files.require_packages()
    if not args.input.is_dir():
        raise ValueError(f"--input {args.input} is not a folder: give the one that holds the model's config.json")
    hf_config = files.read_config(args.input, files.model_types(architectures))
    architecture, config, positions = files.from_hf_config(hf_config, architectures)
    hf_config.pop("quantization_config", None)  # compare with the unquantized model
    # Not the first that can express the config: a Phi-3 may equal a Mistral, whose tensors have other names.
    mapping = next(each for each in architecture.huggingface if each.model_type == hf_config["model_type"])
    stored = files.WeightFiles(args.input)
    # Blocks after the last one predict further tokens; transformers has none either.
    first, number = hf_config.get("num_hidden_layers", 0), hf_config.get("num_nextn_predict_layers") or 0
    layers = tuple(f"model.layers.{layer}." for layer in range(first, first + number))
    next_tokens = {name for name in stored.shapes if name.startswith(layers)}
    shapes = files.their_shapes(architecture, config, mapping)
    name_of = match_names(stored, shapes, hf_config["tie_word_embeddings"], next_tokens)
    chosen = given_tokenizer(args) or find_tokenizer(args.input)
    if not chosen:
        none = f"{args.input} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json and merges.txt)"
        raise ValueError(f"{none}: give its own with --tokenizer-type and its files; {NULL_TOKENIZER}")
    tokenizer = build(chosen)
    refuse_conflict(tokenizer)
    assert architecture.flags is not None
    flags = architecture.flags(config, positions) + tokenizer_words(chosen)
    settings = settings_of_import(architecture, config, flags, positions, tokenizer)

    def theirs(name: str) -> Tensor:
        return stored.read(name_of[name])

    @functools.lru_cache(maxsize=1)  # ours that are parts of one weight come in a row
    def join(weight: Weight) -> tuple[Tensor, ...]:
        return weight.join(*(theirs(name).float() for name in weight.theirs))

    parts = {ours: (weight, part) for weight in mapping.weights(config) for part, ours in enumerate(weight.ours)}

    def ours(name: str, state: str) -> Tensor:
        weight, part = parts[name]
        tensor = join(weight)[part]
        if not tensor.isfinite().all():
            raise ValueError(f"{', '.join(weight.theirs)} of {args.input} has NaN or Inf")
        return tensor

    with files.new_folder(args.save, "--save") as folder:
        with progress("writing the checkpoint"):
            checkpoint, meta = save_imported(
                folder, architecture, config, settings, ours, tokenizer, unpadded_vocabulary=True
            )
        with progress("comparing logits"):
            model = architecture.build_empty(config)
            ours_read, theirs_read = parameter_reader(checkpoint, meta), files.in_memory(mapping, config, theirs)
            difference = compare(model, ours_read, hf_config, theirs_read, positions)
    is_ours = architecture in ARCHITECTURES
    trainer = f"megatron-zpp pretrain-{architecture.name}" if is_ours else architecture.script
    return (
        f"{args.save}: {architecture.name} with {architecture.num_parameters(config):,} parameters from {args.input}; "
        f"its logits differ from transformers' by {difference:.1e} at most. "
        f"Its tokenizer: {format_description(meta['tokenizer'])}. "
        f"{'Layers that predict further tokens (MTP) are left out. ' if next_tokens else ''}Train from it with\n"
        f"    {trainer} --load {shlex.quote(str(args.save))} --finetune {shlex.join(flags)}\n{NEXT}"
    )


def tokenizer_words(tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the words of the flags that choose a tokenizer. tokenizer: their values by field name."""
    words = []
    for name, value in tokenizer.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def match_names(
    stored: files.WeightFiles, shapes: Mapping[str, torch.Size], tied: bool, left_out: Collection[str]
) -> dict[str, str]:
    """Return {name in transformers' model: name in the files}. Raises ValueError unless they hold exactly that model.

    Files that were saved without the output layer lack the first part of the names, "transformer." or "model.".
    left_out: names in the files that are of no interest.
    """
    name_of = {}
    for name, shape in shapes.items():
        short = name.partition(".")[2]
        name_of[name] = name if name in stored.shapes or short not in stored.shapes else short
        found = stored.shapes.get(name_of[name])
        if found != shape:
            there = "is missing" if found is None else f"is {list(found)}, where config.json says {list(shape)}"
            raise ValueError(f"the weights in {stored.folder} do not fit its config.json: {name} {there}")
        dtype = stored.dtypes[name_of[name]]
        if dtype not in ("F32", "BF16", "F16"):
            raise ValueError(f"{name} in {stored.folder} is {dtype}; F32, BF16 or F16 can be read")
    left_over = {name for name in stored.shapes.keys() - set(name_of.values()) if not CONSTANTS.search(name)}
    left_over.difference_update(left_out)
    if tied and "lm_head.weight" in left_over:
        embeddings = next(iter(shapes))
        if not stored.read("lm_head.weight").equal(stored.read(name_of[embeddings])):
            other = f"config.json of {stored.folder} ties the output layer to the embeddings, but lm_head.weight is"
            raise ValueError(f'{other} another matrix: set "tie_word_embeddings": false there if that was trained')
        left_over.remove("lm_head.weight")
    if left_over:
        names = f"{', '.join(sorted(left_over)[:3])}{' and more' if len(left_over) > 3 else ''}"
        raise ValueError(f"the weights in {stored.folder} hold what its config.json has no place for: {names}")
    return name_of


def import_parser(description: str, tokenizer: str) -> argparse.ArgumentParser:
    """Build a parser with the flags of every import. tokenizer: title of the tokenizer's flags."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    folder = "folder of the checkpoint; must be new"
    parser.add_argument("--save", type=local_path(Path), required=True, metavar="DIR", help=folder)
    add_tokenizer_flags(parser, tokenizer)
    return parser


def parse_import(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if given_tokenizer(args) and args.tokenizer_type is None:
        parser.error("which kind is the tokenizer? give --tokenizer-type too")
    return args


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    kinds = " or ".join(files.model_types(ARCHITECTURES))
    description = f"Make a checkpoint out of a model of Hugging Face transformers, of model_type {kinds}."
    parser = import_parser(description, "tokenizer, if it is not in the folder")
    folder = "folder with config.json and weights"
    parser.add_argument("--input", type=local_path(Path), required=True, metavar="DIR", help=folder)
    parser.add_argument("--architecture", metavar="MODULE:NAME", help="another one that the model may have")
    return parse_import(parser, argv)


@reports_errors
def main() -> None:
    args = parse_arguments()
    given = given_architecture(args)
    print(import_(args, ARCHITECTURES if given is None else (*ARCHITECTURES, given)))
