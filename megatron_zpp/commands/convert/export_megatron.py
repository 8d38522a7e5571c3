"""Write a checkpoint for Megatron-LM, in its format torch_dist: weights, flags and counters.

Megatron-LM goes on from it with --no-load-optim --no-load-rng, on any ranks. Needs memory for the largest tensors, not
for the model.
"""

import argparse

from torch import Tensor

from megatron_zpp.checkpoint.meta import Counters, saved_model
from megatron_zpp.commands.common import open_verified
from megatron_zpp.commands.convert.export_hf import DTYPES, converted, export_parser
from megatron_zpp.convert.hf.checkpoint import parameter_reader
from megatron_zpp.convert.hf.files import new_folder
from megatron_zpp.convert.megatron.config import args_of
from megatron_zpp.convert.megatron.torch_dist import write_torch_dist
from megatron_zpp.convert.megatron.weights import EXPERT_BIAS
from megatron_zpp.data.text.tokenizers import TOKENIZER_FLAGS
from megatron_zpp.errors import reports_errors
from megatron_zpp.metrics.progress import progress
from megatron_zpp.models.decoder import DecoderConfig


def export(args: argparse.Namespace) -> str:
    """Write the folder; return a message for the user. Raises ValueError or OSError on a mistake."""
    checkpoint, meta = open_verified(args.load, args.ckpt_step)
    _, config = saved_model(meta)
    assert isinstance(config, DecoderConfig)
    settings, counters, saved = meta["settings"], Counters.from_meta(meta), parameter_reader(checkpoint, meta)
    flags = args_of(config, settings["max_position_embeddings"] or settings["seq_length"])
    flags.seq_length = settings["seq_length"]
    flags.make_vocab_size_divisible_by = settings["make_vocab_size_divisible_by"]
    flags.params_dtype = DTYPES[args.dtype]
    flags.bf16, flags.fp16 = args.dtype == "bfloat16", args.dtype == "float16"
    vars(flags).update({name: settings.get(name) for name in TOKENIZER_FLAGS if name != "tiktoken_pattern"})
    if flags.tokenizer_type == "MegatronSentencePieceTokenizer":
        flags.tokenizer_type, flags.legacy_tokenizer = "SentencePieceTokenizer", True
    elif flags.tokenizer_type == "SentencePieceTokenizer":
        flags.tokenizer_sentencepiece_legacy = False  # older versions of Megatron have no such flag, and add tokens

    def read(name: str) -> Tensor:
        return converted(saved(name), name, checkpoint, "float32" if name.endswith(EXPERT_BIAS) else args.dtype)

    with new_folder(args.output, "--output") as folder, progress("writing the checkpoint"):
        write_torch_dist(folder, config, flags, counters, read)
    return (
        f"{args.output}: {checkpoint} for Megatron-LM (--ckpt-format torch_dist), {args.dtype} weights, iteration "
        f"{counters.iteration}, {counters.consumed_train_samples:,} samples. Its --load needs --no-load-optim "
        "--no-load-rng"
    )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    return export_parser("Write a checkpoint for Megatron-LM.").parse_args(argv)


@reports_errors
def main() -> None:
    print(export(parse_arguments()))
