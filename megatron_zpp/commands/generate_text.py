"""Sample text from a checkpoint's model, in one process and in fp32."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.checkpoint import CheckpointError, iterate_parameters
from megatron_zpp.checkpoint.meta import nonfinite, saved_model
from megatron_zpp.checkpoint.tokenizer import settings_with_tokenizer
from megatron_zpp.commands.common import add_tokenizer_flags, given_architecture, given_tokenizer, open_verified
from megatron_zpp.convert.hf.files import generation_settings
from megatron_zpp.convert.hf.tokenizer import build_kept
from megatron_zpp.data.text.tokenizers import Tokenizer, chat_tokenizer
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import Architecture
from megatron_zpp.files import read_text
from megatron_zpp.models.generate import Drawing, generate
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.publish import PublishError, WeightReader
from megatron_zpp.settings.flags import local_path, number, path_or_url


def open_checkpoint(args: argparse.Namespace) -> tuple[Path, dict[str, Any], dict[str, Any], Tokenizer]:
    """Find what ``add_checkpoint_flags`` names: checkpoint, meta, settings and tokenizer. Raises CheckpointError."""
    checkpoint, meta = open_verified(args.load, args.ckpt_step)
    if any(name.startswith("model.") for name in meta["nonfinite"]):
        raise CheckpointError(f"{nonfinite(checkpoint, meta)}: give an earlier one with --ckpt-step")
    return checkpoint, meta, *open_tokenizer(args, checkpoint, meta)


def open_tokenizer(args: argparse.Namespace, folder: Path, meta: dict[str, Any]) -> tuple[dict[str, Any], Tokenizer]:
    """Return the run's settings, and its tokenizer, whose files are in ``folder`` or where ``args`` say."""
    settings = settings_with_tokenizer(folder, meta) | given_tokenizer(args)
    return settings, build_kept(settings, folder, meta)


def chosen_device(args: argparse.Namespace) -> torch.device:
    return torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_model(
    checkpoint: Path, meta: dict[str, Any], device: torch.device, given: Architecture | None = None
) -> Transformer:
    """Load a verified checkpoint's model, of the ``given`` architecture if there is one. Raises CheckpointError."""
    architecture, config = saved_model(meta, given)
    model = architecture.build_empty(config).to_empty(device=device)
    state = model.state_dict()
    for name, tensor in iterate_parameters(checkpoint, meta):
        if name not in state or state[name].shape != tensor.shape:
            raise CheckpointError(f"{checkpoint} is damaged: {name} {[*tensor.shape]} is not of its model_config")
        state[name].copy_(tensor)
    return model.eval()


def stream(written: Iterator[list[int | None]], text: list[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Yield one text in pieces: its beginning, then each added character."""
    shown = ""
    for ids in itertools.chain([[]], written):
        text += [i for i in ids if i is not None]
        so_far = decode(text)
        if not so_far.endswith("\ufffd"):  # an incomplete character
            yield so_far[len(shown) :]
            shown = so_far
    yield decode(text)[len(shown) :]


def run(args: argparse.Namespace, given: Architecture | None = None) -> Iterator[str]:
    if args.follow is not None:
        yield from follow(args, given)
        return
    checkpoint, meta, settings, tokenizer = open_checkpoint(args)
    yield from write(args, settings, tokenizer, load_model(checkpoint, meta, chosen_device(args), given))


def follow(args: argparse.Namespace, given: Architecture | None) -> Iterator[str]:
    """Yield the output of each version of the weights in ``--follow``, as long as the process runs."""
    reader, model = WeightReader(args.follow), None
    print(f"waiting for weights in {args.follow}", file=sys.stderr, flush=True)
    while True:
        if not reader.update():
            time.sleep(0.1)
            continue
        if not {"settings", "model_config", "files"} <= reader.about.keys():
            raise PublishError(f"{args.follow} does not say what its model is: only the trainer's --publish does")
        if model is None:
            architecture, config = saved_model(reader.about, given)
            model = architecture.build_empty(config).to_empty(device=chosen_device(args)).eval()
        reader.load_into(model)
        yield f"== step {reader.step}\n"
        yield from write(args, *open_tokenizer(args, reader.folder, reader.about), model)
        yield "\n"


def write(
    args: argparse.Namespace, settings: dict[str, Any], tokenizer: Tokenizer, model: Transformer
) -> Iterator[str]:
    texts = [*args.prompt, *(read_text(args.prompt_file).splitlines() if args.prompt_file else [])] or [""]
    if args.chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = chat_tokenizer(tokenizer, settings["tokenizer_type"]).apply_chat_template(chats)
    yield from continue_texts(args, settings, tokenizer, model, texts, is_chat=args.chat)


def continue_texts(
    args: argparse.Namespace,
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    model: Transformer,
    texts: list[str],
    is_chat: bool = True,
) -> Iterator[str]:
    """Yield what ``model`` adds to the texts, in pieces, and what it adds it to unless ``is_chat``."""
    # A text ends with the end of a document, and with the end tokens of the model's generation_config.json.
    eos = generation_settings(settings, {"eos_token_id": tokenizer.eod})[1]["eos_token_id"]
    ends = {tokenizer.eod, *(eos if isinstance(eos, list) else [eos])}
    # A new document follows the end of one.
    prompts = [tokenizer.tokenize(text, add_special_tokens=not is_chat) or [tokenizer.eod] for text in texts]
    written = generate(
        model,
        prompts,
        args.num_tokens,
        vocab_size=tokenizer.vocab_size,
        context_length=settings["seq_length"],
        ends=ends,
        drawing=Drawing(args.temperature, args.top_k, args.top_p, args.seed),
        cached=not args.no_kv_cache,
    )

    def decode(ids: list[int]) -> str:
        return tokenizer.detokenize([i for i in ids if i not in (*ends, *tokenizer.special.prefix)])

    beginnings: list[list[int]] = [[] for _ in prompts] if is_chat else prompts
    if len(prompts) == 1:
        yield from stream(written, list(beginnings[0]), decode)
    else:
        written_texts = [list(ids) for ids in beginnings]
        for ids in written:
            for text, i in zip(written_texts, ids, strict=True):
                text += [] if i is None else [i]
        yield "\n".join(f"== {number}\n{decode(text)}" for number, text in enumerate(written_texts, start=1))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sample text from a checkpoint.", allow_abbrev=False)
    add = parser.add_argument
    text = "text to continue; repeat for several at once; default a new document"
    add("--prompt", type=utf8_text, action="append", default=[], metavar="TEXT", help=text)
    add("--prompt-file", type=local_path(Path), metavar="FILE", help="texts to continue, one per line")
    add("--chat", action="store_true", help="format prompts as a user's messages, by the tokenizer's chat template")
    add_drawing_flags(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--load", type=path_or_url, metavar="DIR|URL", help="folder given to --save in training")
    following = "folder given to --publish in training: write again for each version there"
    source.add_argument("--follow", type=local_path(str), metavar="DIR", help=following)
    add_checkpoint_flags(parser)
    return parser.parse_args(argv)


def add_drawing_flags(parser: argparse.ArgumentParser, num_tokens: int = 100) -> None:
    """Add the flags that say how many tokens a model writes, and how it chooses them."""
    add, natural, share = parser.add_argument, number(int, at_least=0), number(float, above=0, at_most=1)
    tokens, added = number(int, at_least=1), f"tokens to add; default {num_tokens}"
    add("--num-tokens", type=tokens, default=num_tokens, metavar="N", help=added)
    add("--temperature", type=temperature, default=1.0, metavar="X", help="0 = likeliest token; default 1")
    add("--top-k", type=natural, default=0, metavar="N", help="draw from the N likeliest; default 0 = all")
    top_p = "draw from the likeliest that together have probability X; default 1 = all"
    add("--top-p", type=share, default=1.0, metavar="X", help=top_p)
    add("--seed", type=natural, default=1234, metavar="N", help="seed of the drawing; default 1234")
    uncached = "process the whole text again for each token: slow, but works with any model"
    add("--no-kv-cache", action="store_true", help=uncached)


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a checkpoint below ``--load``, its tokenizer, and where it computes."""
    add = parser.add_argument
    step = number(int, at_least=0)
    add("--ckpt-step", type=step, metavar="N", help="iteration to load; default the latest")
    add("--device", type=device, metavar="NAME", help="such as cpu or cuda:1; default the GPU, if there is one")
    add("--architecture", metavar="MODULE:NAME", help="the checkpoint's, if it is not built in")
    add_tokenizer_flags(parser, "tokenizer, if its files have moved since training")


def temperature(word: str) -> float:
    value: float = number(float, at_least=0)(word)
    if 0 < value < 1e-30:  # logits divided by it overflow
        raise argparse.ArgumentTypeError(f"must be 0, for the likeliest token, or at least 1e-30, got {word}")
    return value


def utf8_text(word: str) -> str:
    try:
        word.encode()
    except UnicodeEncodeError:  # Python keeps other bytes of the command line as surrogates
        raise argparse.ArgumentTypeError(f"{word!a} is not UTF-8 text") from None
    return word


def device(word: str) -> torch.device:
    try:
        return torch.empty(0, device=word).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without CUDA
        raise argparse.ArgumentTypeError(f"{word} cannot be used: {str(error).splitlines()[0]}") from None


@reports_errors
def main() -> None:
    args = parse_arguments()
    for piece in run(args, given_architecture(args)):
        print(piece, end="", flush=True)
    print()
