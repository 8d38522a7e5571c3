"""Texts that a model writes, id by id, many at a time. A text is the same whichever others are written beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .kv_cache import CachedModel
from .moe import MoE
from .transformer import Transformer


@dataclass(frozen=True)
class Drawing:
    """How the next id is drawn from a model's logits: temperature first, then top-k, then top-p."""

    temperature: float = 1.0  # 0 takes the likeliest
    top_k: int = 0  # draw from the k likeliest; 0 = all
    top_p: float = 1.0  # of the likeliest that together have this probability; the one that crosses it is among them
    seed: int = 1234  # of the first text; each text has one of its own


def generate(
    model: Transformer,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    vocab_size: int,
    context_length: int,
    ends: Collection[int],
    drawing: Drawing,
    cached: bool = True,
) -> Iterator[list[int | None]]:
    """Yield each step's next ids, one per text, None for those that have ended: ``num_tokens`` steps, or fewer.

    A text ends with one of ``ends``. Ids from ``vocab_size`` on pad the model's vocabulary and are never drawn. A
    text's next id depends on its ``window``. The model is for generation alone from then on.

    cached: keep keys and values. Else every id is a forward pass over the whole window, one text after the other; that
    works for any model.
    """
    for module in model.modules():
        if isinstance(module, MoE):  # which tokens are beside it would decide whether an expert has room for one
            module.config = dataclasses.replace(module.config, expert_capacity_factor=None, eval_capacity_factor=None)
    texts = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(drawing.seed + number) for number in range(len(texts))]
    ended = [False] * len(texts)
    if cached:
        longest = max(map(len, prompts)) + num_tokens
        read = read_once(model, context_length, columns=min(context_length, longest))
    else:
        read = read_again(model, context_length)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = read(texts)[:, :vocab_size]  # [B, V]
        ids = [draw(row, drawing, generator) for row, generator in zip(logits, generators, strict=True)]
        for text, i in zip(texts, ids, strict=True):
            text.append(i)
        yield [None if over else i for i, over in zip(ids, ended, strict=True)]
        ended = [over or i in ends for i, over in zip(ids, ended, strict=True)]
        if all(ended):
            return


def window(text: list[int], context_length: int) -> list[int]:
    """What the model sees of a text: all of it, and beyond the context its end, half to all of the context.

    Its beginning moves by half the context at a time: if it moved with every id, so would all positions, and nothing
    that was computed could be kept.
    """
    half = max(1, context_length // 2)
    return text[math.ceil(max(0, len(text) - context_length) / half) * half :]


def read_once(model: Transformer, context_length: int, columns: int) -> Callable[[list[list[int]]], Tensor]:
    """Texts -> logits [B, V] of what follows them; called again when each of them has one id more.

    columns: no window is longer.
    """
    cached = CachedModel(model, columns)
    device = next(model.parameters()).device

    def read(texts: list[list[int]]) -> Tensor:
        # The longest window has no padding, so the cache is full when that one moves, and none moves earlier.
        if cached.filled in (0, context_length):
            return cached.read([window(text, context_length) for text in texts])
        return cached.read_on(torch.tensor([text[-1:] for text in texts], device=device))

    return read


def read_again(model: Transformer, context_length: int) -> Callable[[list[list[int]]], Tensor]:
    """Like ``read_once``, but compute every window again."""
    device = next(model.parameters()).device

    def read(texts: list[list[int]]) -> Tensor:
        windows = [torch.tensor([window(text, context_length)], device=device) for text in texts]
        return torch.cat([model(tokens)[:, -1] for tokens in windows])

    return read


def draw(logits: Tensor, drawing: Drawing, generator: torch.Generator) -> int:
    """One id from ``logits`` [V]."""
    if drawing.temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.float().topk(min(drawing.top_k or len(logits), len(logits)))  # the likeliest first
    # Drawn on the CPU, so that a seed gives the same text on every device, up to rounding.
    shares = (values / drawing.temperature).softmax(dim=-1).cpu()
    if drawing.top_p < 1:
        shares[shares.cumsum(dim=-1) - shares >= drawing.top_p] = 0  # likelier ones have enough already
    choice = torch.multinomial(shares, 1, generator=generator)
    return int(candidates[int(choice)])
