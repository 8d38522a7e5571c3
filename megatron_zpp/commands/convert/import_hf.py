"""Makes a checkpoint to train on from, out of a model of Hugging Face transformers.

    python tools/import_hf.py --input Llama-3.2-1B --save runs/llama

Prints the trainer's flags for it. The checkpoint is kept only if its logits are those of transformers. Needs the extra
``hf``, and memory for two transformer blocks and the embeddings, not for the model.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.commands.common import add_tokenizer_flags, given_architecture, given_tokenizer, report_errors
from megatron_zpp.convert.hf import files
from megatron_zpp.convert.hf.checkpoint import parameter_reader, save_imported, settings_of_import
from megatron_zpp.convert.hf.compare import compare
from megatron_zpp.convert.hf.mapping import from_hf_config, in_memory, their_shapes
from megatron_zpp.convert.hf.tokenizer import build, find_tokenizer
from megatron_zpp.families import ARCHITECTURES, Architecture
from megatron_zpp.metrics.progress import progress

NO_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")  # constants that older versions saved too


def import_(args: argparse.Namespace, architectures: Sequence[Architecture] = ARCHITECTURES) -> str:
    """Save the checkpoint; returns what to tell the user. Raises ValueError, OSError or ImportError on a mistake.

    architectures: one of which the model may be.
    """
    files.require_packages()
    if not args.input.is_dir():
        raise ValueError(f"--input {args.input} is not a folder: give the one that holds the model's config.json")
    hf_config = files.read_config(args.input, model_types(architectures))
    architecture, config, positions = from_hf_config(hf_config, architectures)
    mapping = architecture.huggingface_model(config)
    stored = files.WeightFiles(args.input)
    name_of = match_names(stored, their_shapes(architecture, config), hf_config["tie_word_embeddings"])
    chosen = given_tokenizer(args) or find_tokenizer(args.input)
    if not chosen:
        raise ValueError(
            f"{args.input} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json and merges.txt): give its "
            "own with --tokenizer-type and its files; a NullTokenizer with --vocab-size serves data that is ids already"
        )
    assert architecture.flags is not None
    flags = architecture.flags(config, positions)
    flags += [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    settings = settings_of_import(architecture, config, flags, positions, build(chosen))

    def theirs(name: str) -> Tensor:
        return stored.read(name_of[name])

    weights = {weight.ours: weight for weight in mapping.weights(config)}

    def ours(name: str) -> Tensor:
        tensor = weights[name].join(*(theirs(part).float() for part in weights[name].theirs))
        if not tensor.isfinite().all():
            raise ValueError(f"{', '.join(weights[name].theirs)} of {args.input} has NaN or Inf")
        return tensor

    with files.new_folder(args.save, "--save") as folder:
        with progress("writing the checkpoint"):
            checkpoint, meta = save_imported(folder, architecture, config, settings, ours)
        with progress("comparing logits"):
            model = architecture.build_empty(config)
            ours_read, theirs_read = parameter_reader(checkpoint, meta), in_memory(mapping, config, theirs)
            difference = compare(model, ours_read, hf_config, theirs_read, positions)
    is_ours = architecture in ARCHITECTURES
    trainer = f"megatron-zpp pretrain-{architecture.name}" if is_ours else architecture.script
    return (
        f"{args.save}: {architecture.name} with {architecture.num_parameters(config):,} parameters from {args.input}; "
        f"its logits differ from transformers' by {difference:.1e} at most. Train from it with\n"
        f"    {trainer} --load {shlex.quote(str(args.save))} --finetune {shlex.join(flags)}\n"
        "and the flags of the run: sequence length, batches, data, learning rate, --save"
    )


def model_types(architectures: Sequence[Architecture]) -> list[str]:
    """What transformers calls them in config.json."""
    return list(dict.fromkeys(mapping.model_type for each in architectures for mapping in each.huggingface))


def match_names(stored: files.WeightFiles, shapes: Mapping[str, torch.Size], tied: bool) -> dict[str, str]:
    """{a tensor of transformers' model: its name in the files}. Raises ValueError unless they hold exactly that model.

    Files that were saved without the output layer lack the first part of the names, "transformer." or "model.".
    """
    name_of = {}
    for name, shape in shapes.items():
        short = name.partition(".")[2]
        name_of[name] = name if name in stored.shapes or short not in stored.shapes else short
        found = stored.shapes.get(name_of[name])
        if found != shape:
            there = "is missing" if found is None else f"is {list(found)}, where config.json says {list(shape)}"
            raise ValueError(f"the weights in {stored.folder} do not fit its config.json: {name} {there}")
        if stored.dtypes[name_of[name]] not in ("F32", "BF16", "F16"):
            raise ValueError(
                f"{name} in {stored.folder} is {stored.dtypes[name_of[name]]}; F32, BF16 or F16 can be read"
            )
    left_over = {name for name in stored.shapes.keys() - set(name_of.values()) if not NO_WEIGHTS.search(name)}
    if tied and "lm_head.weight" in left_over:
        embeddings = next(iter(shapes))
        if not stored.read("lm_head.weight").equal(stored.read(name_of[embeddings])):
            raise ValueError(
                f"config.json of {stored.folder} ties the output layer to the embeddings, but lm_head.weight is "
                'another matrix: set "tie_word_embeddings": false there if that is what was trained'
            )
        left_over.remove("lm_head.weight")
    if left_over:
        raise ValueError(
            f"the weights in {stored.folder} hold what the model of its config.json has no place for: "
            f"{', '.join(sorted(left_over)[:3])}{' and more' if len(left_over) > 3 else ''}"
        )
    return name_of


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make a checkpoint out of a model of Hugging Face transformers, of model_type "
        f"{' or '.join(model_types(ARCHITECTURES))}.",
        allow_abbrev=False,
    )
    parser.add_argument("--input", type=Path, required=True, metavar="DIR", help="folder with config.json and weights")
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="folder of the checkpoint; must be new")
    parser.add_argument("--architecture", metavar="MODULE:NAME", help="what the model may be, beside ours")
    add_tokenizer_flags(parser, "tokenizer, if it is not in the folder")
    args = parser.parse_args(argv)
    if given_tokenizer(args) and args.tokenizer_type is None:
        parser.error("which kind is the tokenizer? give --tokenizer-type too")
    return args


def known_architectures(args: argparse.Namespace) -> tuple[Architecture, ...]:
    given = given_architecture(args)
    return ARCHITECTURES if given is None else (*ARCHITECTURES, given)


def main() -> int:
    args = parse_arguments()
    return report_errors(lambda: print(import_(args, known_architectures(args))))


if __name__ == "__main__":
    sys.exit(main())
