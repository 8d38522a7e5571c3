"""Make a checkpoint to go on from, out of one of Megatron-LM or Megatron-DeepSpeed.

Takes Megatron's formats torch and torch_dist, DeepSpeed's model states and universal checkpoints, of any ranks. Prints
the trainer's flags for it. Runs nothing in the files. Needs memory for the largest tensors, not for the model.
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

from megatron_zpp.commands.common import given_tokenizer
from megatron_zpp.commands.convert.import_hf import NEXT, NULL_TOKENIZER, import_parser, parse_import, tokenizer_words
from megatron_zpp.convert.hf.checkpoint import save_imported, settings_of_import
from megatron_zpp.convert.hf.files import new_folder
from megatron_zpp.convert.hf.tokenizer import build
from megatron_zpp.convert.megatron import config as megatron
from megatron_zpp.convert.megatron.checkpoint import open_checkpoint, parameter_reader
from megatron_zpp.convert.megatron.config import size
from megatron_zpp.data.text.description import refuse_conflict
from megatron_zpp.data.text.tokenizers import TOKENIZER_FLAGS
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import padded_vocab_size
from megatron_zpp.metrics.progress import progress
from megatron_zpp.settings.flags import iterate_flags, local_path, number
from megatron_zpp.settings.tokenizer import TokenizerSettings

TOKENIZER_TYPES = next(flag.choices or () for flag in iterate_flags(TokenizerSettings) if flag.choices)


def import_(args: argparse.Namespace) -> str:
    """Save the checkpoint; return a message for the user. Raises ValueError, OSError or ImportError on a mistake."""
    saved = open_checkpoint(args.input, args.ckpt_step)
    chosen = given_tokenizer(args) or _their_tokenizer(saved.args)
    is_older = saved.args.get("tokenizer_sentencepiece_legacy", True) or saved.args.get("legacy_tokenizer")
    is_plain = chosen["tokenizer_type"] in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
    if saved.args.get("tokenizer_type") == "SentencePieceTokenizer" and is_older and is_plain:
        kind = "of Megatron-LM before February 2026, or with --tokenizer-sentencepiece-legacy or --legacy-tokenizer"
        added = f"the run's SentencePieceTokenizer ({kind}) added <EOD> and others to the model's ids"
        raise ValueError(f"{added}: give --tokenizer-type MegatronSentencePieceTokenizer")
    adds_nothing = "tokenizer_hf_no_include_special_tokens"  # no file of the tokenizer says this
    if chosen["tokenizer_type"] in ("HuggingFaceTokenizer", "HFTokenizer") and saved.args.get(adds_nothing):
        chosen[adds_nothing] = True
    tokenizer = build(chosen)
    refuse_conflict(tokenizer)
    multiple = size(saved.args, "make_vocab_size_divisible_by", 128)
    config = megatron.config_of(saved.args, padded_vocab_size(tokenizer.vocab_size, multiple), saved.names)
    architecture, counters = megatron.architecture_of(config), megatron.counters_of(saved)
    assert architecture.flags is not None
    flags = architecture.flags(config, megatron.max_positions(saved.args)) + tokenizer_words(chosen)
    precision = ["--fp16"] if saved.args.get("fp16") else []  # which has a loss scale
    length = size(saved.args, "seq_length")
    settings = settings_of_import(architecture, config, [*flags, *precision], length, tokenizer)
    model = architecture.build_empty(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found_rows = set[int]()
    read = parameter_reader(saved, config, shapes, tokenizer.vocab_size, found_rows)
    with new_folder(args.save, "--save") as folder, progress("writing the checkpoint"):
        states = (*megatron.MOMENTS, "step") if saved.has_moments else ()
        save_imported(folder, architecture, config, settings, read, tokenizer, counters, states)
    load = ["--load", str(args.save), *([] if saved.has_moments else ["--no-load-optim"])]
    text = (
        f"{args.save}: {architecture.name} with {architecture.num_parameters(config):,} parameters"
        f"{' and their moments' if saved.has_moments else ''} from {saved.path}, a checkpoint of {saved.kind}, at "
        f"iteration {counters.iteration} after {counters.consumed_train_samples:,} samples. Go on from it with\n"
        f"    megatron-zpp pretrain-{architecture.name} {shlex.join([*load, *flags])}\n{NEXT}"
    )
    if not saved.has_moments:
        text += "\nnote: this format does not have the optimizer's state whole: Adam starts over (--no-load-optim)"
    rows = max(found_rows, default=0)
    if rows >= tokenizer.vocab_size + multiple * size(saved.args, "tensor_model_parallel_size", 1):
        ids = f"{rows:,} rows of the vocabulary for the {tokenizer.vocab_size:,} ids of the tokenizer"
        kept = f"{config.vocab_size:,} were kept: is this the run's own tokenizer?"
        text += f"\nnote: the checkpoint has {ids}, and {kept}"
    return text


def _their_tokenizer(args: megatron.Args) -> dict[str, Any]:
    """Return the run's tokenizer by field name, if it needs no file. Raises ValueError."""
    found = {name: args[name] for name in TOKENIZER_FLAGS if args.get(name) not in (None, False)}
    files = [str(found[name]) for name in ("tokenizer_model", "vocab_file", "merge_file") if name in found]
    kind = found.get("tokenizer_type")
    if files or kind not in TOKENIZER_TYPES:
        why = f"a path in a checkpoint, {files[0]}, is not opened" if files else f"it is a {kind}"
        unknown = f"the tokenizer that the checkpoint names cannot be built ({why})"
        raise ValueError(f"{unknown}: give it with --tokenizer-type and its files; {NULL_TOKENIZER}")
    if kind != "NullTokenizer":
        found.pop("vocab_size", None)  # some versions keep what the tokenizer said
    return found


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    description = "Make a checkpoint out of one of Megatron-LM or Megatron-DeepSpeed."
    parser = import_parser(description, "tokenizer, if it is not where the checkpoint says")
    add, iteration = parser.add_argument, number(int, at_least=0)
    add("--input", type=local_path(Path), required=True, metavar="DIR", help="what was given to --save there")
    add("--ckpt-step", type=iteration, metavar="N", help="iteration to import; default the latest")
    return parse_import(parser, argv)


@reports_errors
def main() -> None:
    print(import_(parse_arguments()))
