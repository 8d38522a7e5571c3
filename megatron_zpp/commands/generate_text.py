"""Writes text with a checkpoint's model, in one process.

    python tools/generate_text.py --load runs/quickstart/zeropp --prompt "def " --num-tokens 100

The checkpoint says which model and tokenizer it is of; it may have been saved by any number of ranks. The model
computes in fp32, on the GPU where there is one: meant for a look at what a model has learned, not for serving it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.checkpoint import CheckpointError, find_checkpoint, iterate_parameters, problems, read_meta
from megatron_zpp.checkpoint.meta import saved_model
from megatron_zpp.checkpoint.tokenizer import settings_with_tokenizer
from megatron_zpp.commands.common import given_architecture, report_errors
from megatron_zpp.convert.hf.files import generation_settings
from megatron_zpp.data.text.chat_template import apply_chat_template, read_chat_template
from megatron_zpp.data.text.tokenizers import HuggingFaceTokenizer, Tokenizer, build_tokenizer, huggingface_path
from megatron_zpp.families import Architecture
from megatron_zpp.files import read_text
from megatron_zpp.models.generate import Drawing, generate
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.settings.flags import number


def load_model(
    checkpoint: Path, meta: dict[str, Any], device: torch.device, given: Architecture | None = None
) -> Transformer:
    """The checkpoint's model on one device, in fp32 and in evaluation mode. Raises CheckpointError.

    given: the checkpoint's architecture, where it is none of ours.
    """
    wrong = problems(checkpoint)
    if wrong:
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(wrong)}")
    architecture, config = saved_model(meta, given)
    model = architecture.build_empty(config).to_empty(device=device)
    state = model.state_dict()
    for name, tensor in iterate_parameters(checkpoint, meta):
        if name not in state or state[name].shape != tensor.shape:
            raise CheckpointError(f"{checkpoint} is damaged: {name} {[*tensor.shape]} is not of its model_config")
        state[name].copy_(tensor)
    return model.eval()


def moved(settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The checkpoint's settings, but that flags say where the tokenizer's files are now."""
    flags = ("tokenizer_model", "vocab_file", "merge_file")
    return settings | {flag: getattr(args, flag) for flag in flags if getattr(args, flag)}


def load_tokenizer(settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the run was trained with."""
    return build_tokenizer(
        settings["tokenizer_type"],
        settings["tokenizer_model"],
        settings["vocab_file"],
        settings["merge_file"],
        settings["vocab_size"],
        settings.get("tiktoken_pattern"),  # checkpoints of earlier versions have none
        settings.get("tiktoken_num_special_tokens"),
    )


def end_tokens(settings: dict[str, Any], tokenizer: Tokenizer) -> set[int]:
    """Ids that end a text: of a document, and what the model's generation_config.json names."""
    ends = generation_settings(settings, {"eos_token_id": tokenizer.eod})[1]["eos_token_id"]
    return {tokenizer.eod, *(ends if isinstance(ends, list) else [ends])}


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Texts to continue, of all flags that give them. Raises OSError."""
    of_file = read_text(args.prompt_file).splitlines() if args.prompt_file else []
    return [*args.prompt, *of_file] or [""]


def as_chat(prompts: list[str], settings: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """Each prompt as a user's message, up to where the answer begins. Raises ValueError."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):  # others read special tokens as text
        raise ValueError(
            f"--chat: {settings['tokenizer_type']} has no chat template; HuggingFaceTokenizer may have one"
        )
    template, tokens = read_chat_template(huggingface_path(settings["tokenizer_model"]))
    return [apply_chat_template(template, tokens, [{"role": "user", "content": text}]) for text in prompts]


def stream(written: Iterator[list[int | None]], text: list[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """What to print of one text: its beginning, then what is written behind it, character by character."""
    shown = ""
    for ids in itertools.chain([[]], written):
        text += [i for i in ids if i is not None]
        so_far = decode(text)
        if not so_far.endswith("\ufffd"):  # the first bytes of a character, whose others are still to come
            yield so_far[len(shown) :]
            shown = so_far
    yield decode(text)[len(shown) :]


def collect(
    written: Iterator[list[int | None]], texts: list[list[int]], decode: Callable[[list[int]], str]
) -> Iterator[str]:
    """The same of several texts, when all are written: each below a line with its number."""
    for ids in written:
        for text, i in zip(texts, ids, strict=True):
            text += [] if i is None else [i]
    yield "\n".join(f"== {number}\n{decode(text)}" for number, text in enumerate(texts, start=1))


def run(args: argparse.Namespace, given: Architecture | None = None) -> Iterator[str]:
    """What to print, piece by piece. Raises ValueError or OSError on a user's mistake.

    given: the checkpoint's architecture, where it is none of ours.
    """
    checkpoint = find_checkpoint(args.load, args.ckpt_step)
    if checkpoint is None:
        raise CheckpointError(f"{args.load} holds no checkpoint: give --load what was given to --save in training")
    meta = read_meta(checkpoint)
    settings = moved(settings_with_tokenizer(checkpoint, meta), args)
    tokenizer = load_tokenizer(settings)
    ends = end_tokens(settings, tokenizer)
    texts = read_prompts(args)
    if args.chat:
        texts = as_chat(texts, settings, tokenizer)
    # A document without a beginning begins where the one before it ended.
    prompts = [tokenizer.tokenize(text) or [tokenizer.eod] for text in texts]
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    written = generate(
        load_model(checkpoint, meta, device, given),
        prompts,
        args.num_tokens,
        vocab_size=tokenizer.vocab_size,
        context_length=settings["seq_length"],
        ends=ends,
        drawing=Drawing(args.temperature, args.top_k, args.top_p, args.seed),
        cached=not args.no_kv_cache,
    )

    def decode(ids: list[int]) -> str:
        return tokenizer.detokenize([i for i in ids if i not in ends])

    beginnings: list[list[int]] = [[] for _ in prompts] if args.chat else prompts
    if len(prompts) == 1:
        yield from stream(written, list(beginnings[0]), decode)
    else:
        yield from collect(written, [list(ids) for ids in beginnings], decode)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sample text from a checkpoint.", allow_abbrev=False)
    parser.add_argument("--load", required=True, metavar="DIR", help="what was given to --save in training")
    parser.add_argument(
        "--ckpt-step", type=number(int, at_least=0), metavar="N", help="iteration to load; default the latest"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; give it again for several at once; default a new document",
    )
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="texts to continue, one a line")
    parser.add_argument(
        "--chat", action="store_true", help="prompts are a user's messages, by the tokenizer's chat template"
    )
    parser.add_argument(
        "--num-tokens", type=number(int, at_least=1), default=100, metavar="N", help="to add; default 100"
    )
    parser.add_argument(
        "--temperature", type=temperature, default=1.0, metavar="X", help="0 = likeliest token; default 1"
    )
    parser.add_argument(
        "--top-k",
        type=number(int, at_least=0),
        default=0,
        metavar="N",
        help="draw from the N likeliest; default 0 = all",
    )
    parser.add_argument(
        "--top-p",
        type=number(float, above=0, at_most=1),
        default=1.0,
        metavar="X",
        help="draw from the likeliest that together have probability X; default 1 = all",
    )
    parser.add_argument(
        "--seed", type=number(int, at_least=0), default=1234, metavar="N", help="of the drawing; default 1234"
    )
    parser.add_argument(
        "--device", type=device, metavar="NAME", help="such as cpu or cuda:1; default the GPU, if there is one"
    )
    parser.add_argument(
        "--no-kv-cache", action="store_true", help="read the whole text again for each token; slow, for any model"
    )
    parser.add_argument("--architecture", metavar="MODULE:NAME", help="the checkpoint's, where it is none of ours")
    group = parser.add_argument_group("tokenizer, where its files are no longer where they were in training")
    group.add_argument("--tokenizer-model", metavar="PATH", help="SentencePiece model, or tokenizer.json or its folder")
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    return parser.parse_args(argv)


def temperature(word: str) -> float:
    value: float = number(float, at_least=0)(word)
    if 0 < value < 1e-30:  # logits divided by it overflow
        raise argparse.ArgumentTypeError(f"must be 0, for the likeliest token, or at least 1e-30, got {word}")
    return value


def device(word: str) -> torch.device:
    try:
        return torch.empty(0, device=word).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without CUDA
        raise argparse.ArgumentTypeError(f"{word} cannot be used: {str(error).splitlines()[0]}") from None


def main() -> int:
    args = parse_arguments()

    def write() -> None:
        for piece in run(args, given_architecture(args)):
            print(piece, end="", flush=True)
        print()

    return report_errors(write)


if __name__ == "__main__":
    sys.exit(main())
