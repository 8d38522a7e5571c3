"""Samples text from a checkpoint, in one process.

    python tools/generate_text.py --load runs/quickstart/zeropp --prompt "def " --num-tokens 100

The checkpoint says which model and tokenizer it is of; it may have been saved by any number of ranks. The model
computes in fp32, on the GPU where there is one. Every token is a forward pass over the text so far: meant for a look
at what a model has learned, not for serving it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.architectures import Architecture
from megatron_zpp.checkpoint import CheckpointError, find_checkpoint, iterate_parameters, problems, read_meta
from megatron_zpp.checkpoint.model import saved_model
from megatron_zpp.data.tokenizers import Tokenizer, build_tokenizer
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.settings.flags import number
from megatron_zpp.tools.given_architecture import given_architecture
from megatron_zpp.tools.run import report_errors


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


def load_tokenizer(settings: dict[str, Any], args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that the run was trained with; flags say where its files are now, if they were moved."""
    return build_tokenizer(
        settings["tokenizer_type"],
        args.tokenizer_model or settings["tokenizer_model"],
        args.vocab_file or settings["vocab_file"],
        args.merge_file or settings["merge_file"],
        settings["vocab_size"],
        settings.get("tiktoken_pattern"),  # checkpoints of earlier versions have none
        settings.get("tiktoken_num_special_tokens"),
    )


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    num_tokens: int,
    *,
    vocab_size: int,
    context_length: int,
    eod: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> list[int]:
    """The ids that follow ``prompt``: ``num_tokens`` of them, or fewer if the document ends.

    ``temperature`` 0 takes the likeliest token; ``top_k`` > 0 draws from the ``top_k`` likeliest. Ids from
    ``vocab_size`` on pad the model's vocabulary and are never drawn. The model sees the last ``context_length`` ids.
    """
    device = next(model.parameters()).device
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids[-context_length:]], device=device))[0, -1, :vocab_size]  # [V]
        ids.append(draw(logits, temperature, top_k, generator))
        if ids[-1] == eod:
            break
    return ids[len(prompt) :]


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    """One id from ``logits`` [V]."""
    if temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.float().topk(min(top_k or len(logits), len(logits)))
    # Drawn on the CPU, so that a seed gives the same text on every device, up to rounding.
    choice = torch.multinomial((values / temperature).softmax(dim=-1).cpu(), 1, generator=generator)
    return int(candidates[int(choice)])


def run(args: argparse.Namespace, given: Architecture | None = None) -> str:
    """Prompt and continuation. Raises ValueError or OSError on a user's mistake.

    given: the checkpoint's architecture, where it is none of ours.
    """
    checkpoint = find_checkpoint(args.load, args.ckpt_step)
    if checkpoint is None:
        raise CheckpointError(f"{args.load} holds no checkpoint: give --load what was given to --save in training")
    meta = read_meta(checkpoint)
    settings = meta["settings"]
    tokenizer = load_tokenizer(settings, args)
    # A document without a beginning begins where the one before it ended.
    prompt = tokenizer.tokenize(args.prompt) or [tokenizer.eod]
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    continuation = generate(
        load_model(checkpoint, meta, device, given),
        prompt,
        args.num_tokens,
        vocab_size=tokenizer.vocab_size,
        context_length=settings["seq_length"],
        eod=tokenizer.eod,
        temperature=args.temperature,
        top_k=args.top_k,
        generator=torch.Generator().manual_seed(args.seed),
    )
    return tokenizer.detokenize([i for i in prompt + continuation if i != tokenizer.eod])


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sample text from a checkpoint.", allow_abbrev=False)
    parser.add_argument("--load", required=True, metavar="DIR", help="what was given to --save in training")
    parser.add_argument(
        "--ckpt-step", type=number(int, at_least=0), metavar="N", help="iteration to load; default the latest"
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue; default a new document")
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
        "--seed", type=number(int, at_least=0), default=1234, metavar="N", help="of the drawing; default 1234"
    )
    parser.add_argument(
        "--device", type=device, metavar="NAME", help="such as cpu or cuda:1; default the GPU, if there is one"
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
    return report_errors(lambda: print(run(args, given_architecture(args))))


if __name__ == "__main__":
    sys.exit(main())
