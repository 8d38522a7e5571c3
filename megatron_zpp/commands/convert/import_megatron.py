"""Makes a checkpoint to go on from, out of one of Megatron-LM or Megatron-DeepSpeed.

    python tools/import_megatron.py --input megatron/checkpoints --save runs/gpt

Takes Megatron's formats torch and torch_dist, DeepSpeed's model states and universal checkpoints, of any ranks. Prints
the trainer's flags for it. Nothing in the files is run. Needs memory for the largest tensors, not for the model.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from megatron_zpp.commands.common import add_tokenizer_flags, given_tokenizer, report_errors
from megatron_zpp.convert.hf.checkpoint import save_imported, settings_of_import
from megatron_zpp.convert.hf.files import new_folder
from megatron_zpp.convert.hf.tokenizer import build
from megatron_zpp.convert.megatron.checkpoint import open_checkpoint, parameter_reader
from megatron_zpp.convert.megatron.config import Args, architecture_of, config_of, counters_of, longest, size
from megatron_zpp.data.text.tokenizers import TOKENIZER_FLAGS, TOKENIZER_TYPES
from megatron_zpp.families import padded_vocab_size
from megatron_zpp.metrics.progress import progress
from megatron_zpp.settings.flags import number


def import_(args: argparse.Namespace) -> str:
    """Save the checkpoint; returns what to tell the user. Raises ValueError, OSError or ImportError on a mistake."""
    saved = open_checkpoint(args.input, args.ckpt_step)
    chosen = given_tokenizer(args) or their_tokenizer(saved.args)
    tokenizer = build(chosen)
    multiple = size(saved.args, "make_vocab_size_divisible_by", 128)
    config = config_of(saved.args, padded_vocab_size(tokenizer.vocab_size, multiple))
    architecture, counters = architecture_of(config), counters_of(saved)
    assert architecture.flags is not None
    flags = architecture.flags(config, longest(saved.args))
    flags += [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    precision = ["--fp16"] if saved.args.get("fp16") else []  # which has a loss scale
    length = size(saved.args, "seq_length")
    settings = settings_of_import(architecture, config, [*flags, *precision], length, tokenizer)
    model = architecture.build_empty(config)
    read = parameter_reader(saved, config, {name: parameter.shape for name, parameter in model.named_parameters()})
    with new_folder(args.save, "--save") as folder, progress("writing the checkpoint"):
        adam_of = read if saved.moments else None
        save_imported(folder, architecture, config, settings, lambda name: read(name, ""), counters, adam_of)
    notes = []
    if not saved.moments:
        notes.append("this format does not have the optimizer's state whole: Adam starts over (--no-load-optim)")
    load = ["--load", str(args.save), *([] if saved.moments else ["--no-load-optim"])]
    return "\n".join(
        [
            f"{args.save}: {architecture.name} with {architecture.num_parameters(config):,} parameters"
            f"{' and their moments' if saved.moments else ''} from {saved.path}, a checkpoint of {saved.kind}, at "
            f"iteration {counters.iteration} after {counters.consumed_train_samples:,} samples. Go on from it with",
            f"    megatron-zpp pretrain-{architecture.name} {shlex.join([*load, *flags])}",
            "and the flags of the run: sequence length, batches, data, learning rate, --save",
            *(f"note: {note}" for note in notes),
        ]
    )


def their_tokenizer(args: Args) -> dict[str, Any]:
    """The tokenizer that the run had, by field name, if it is here. Raises ValueError."""
    found = {name: args[name] for name in TOKENIZER_FLAGS if args.get(name) is not None}
    files = [str(found[name]) for name in ("tokenizer_model", "vocab_file", "merge_file") if name in found]
    if files or found.get("tokenizer_type") not in TOKENIZER_TYPES:
        why = (
            f"a path in a checkpoint, {files[0]}, is not opened" if files else f"it is a {found.get('tokenizer_type')}"
        )
        raise ValueError(
            f"the tokenizer that the checkpoint names cannot be built ({why}): give it with --tokenizer-type and its "
            "files; a NullTokenizer with --vocab-size serves data that is ids already"
        )
    if found["tokenizer_type"] != "NullTokenizer":
        found.pop("vocab_size", None)  # some versions keep what the tokenizer said
    return found


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make a checkpoint out of one of Megatron-LM or Megatron-DeepSpeed.", allow_abbrev=False
    )
    parser.add_argument("--input", type=Path, required=True, metavar="DIR", help="what was given to --save there")
    parser.add_argument(
        "--ckpt-step", type=number(int, at_least=0), metavar="N", help="iteration to import; default the latest"
    )
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="folder of the checkpoint; must be new")
    add_tokenizer_flags(parser, "tokenizer, if it is not where the checkpoint says")
    args = parser.parse_args(argv)
    if given_tokenizer(args) and args.tokenizer_type is None:
        parser.error("which kind is the tokenizer? give --tokenizer-type too")
    return args


def main() -> int:
    args = parse_arguments()
    return report_errors(lambda: print(import_(args)))


if __name__ == "__main__":
    sys.exit(main())
