"""Generate texts, id by id, many at a time. A text does not depend on the texts beside it.

A cache takes the place of ``attention.attention`` and ``document_attention``, as context parallelism does, so no
layer knows of it. A row has room for C ids, one per column; rows that are shorter are padded on the left.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .attention import Attention, attention, replace_attention
from .moe import MoE
from .transformer import Transformer


@dataclass(frozen=True)
class Drawing:
    """Sampling of the next id from a model's logits: temperature first, then top-k, then top-p."""

    temperature: float = 1.0  # 0 takes the likeliest
    top_k: int = 0  # draw from the k likeliest; 0 = all
    top_p: float = 1.0  # keep the likeliest tokens up to this probability, with the one that crosses it
    seed: int = 1234  # the first text's seed; text i draws with seed + i


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
    text's next id depends on its ``window``. Afterwards the model is for generation alone.

    cached: keep keys and values. Else every id is a forward pass over the whole window, one text after the other, which
    works for any model.
    """
    for module in model.modules():
        if isinstance(module, MoE):  # which tokens are beside it would decide whether an expert has room for one
            module.config = dataclasses.replace(module.config, expert_capacity_factor=None, eval_capacity_factor=None)
    texts = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(drawing.seed + number) for number in range(len(texts))]
    ended = [False] * len(texts)
    columns = min(context_length, max(map(len, prompts)) + num_tokens)
    read = CachedModel(model, context_length, columns).read if cached else partial(read_again, model, context_length)
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
    """Return what the model sees of a text: all of it, or its end, half to all of the context.

    The window moves by half the context at a time: if it moved with every id, no computed keys could be kept.
    """
    half = max(1, context_length // 2)
    return text[math.ceil(max(0, len(text) - context_length) / half) * half :]


def read_again(model: Transformer, context_length: int, texts: list[list[int]]) -> Tensor:
    """Do what ``CachedModel.read`` does, but compute every window again."""
    device = next(model.parameters()).device
    windows = [torch.tensor([window(text, context_length)], device=device) for text in texts]
    return torch.cat([model(tokens)[:, -1] for tokens in windows])


def draw(logits: Tensor, drawing: Drawing, generator: torch.Generator) -> int:
    """Draw one id from ``logits`` [V]."""
    if drawing.temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.float().topk(min(drawing.top_k or len(logits), len(logits)))  # the likeliest first
    # Drawn on the CPU, so that a seed gives the same text on every device, up to rounding.
    shares = (values / drawing.temperature).softmax(dim=-1).cpu()
    if drawing.top_p < 1:
        shares[shares.cumsum(dim=-1) - shares >= drawing.top_p] = 0  # likelier ones have enough already
    choice = torch.multinomial(shares, 1, generator=generator)
    return int(candidates[int(choice)])


class CachedModel:
    """A model that reads each id once, B rows at a time, and keeps keys and values. It cannot train."""

    def __init__(self, model: Transformer, context_length: int, columns: int) -> None:
        """columns: C. Raises ValueError for a layer without ``attention.Attention``."""
        self.model, self.context_length, self.columns = model, context_length, columns
        self.filled = 0  # columns
        self.padding = torch.empty(0, dtype=torch.int64)  # [B]: columns on the left that hold no id
        # Per attention: keys and values [B, groups, C, head_dim], so that one head's keys are contiguous.
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}
        for number, layer in enumerate(model.layers):
            if not any(isinstance(module, Attention) for module in layer.modules()):
                raise ValueError(f"layer {number} of {type(model).__name__} has no Attention, so nothing to cache")
        replace_attention(model, self.mask, lambda layer: partial(self.attention, id(layer)))

    def read(self, texts: list[list[int]]) -> Tensor:
        """Texts -> logits [B, V] of what follows them; called again when each has one id more."""
        device = next(self.model.parameters()).device
        # The longest window has no padding, so the cache is full when that one moves, and none moves earlier.
        if self.filled not in (0, self.context_length):
            return self._read_on(torch.tensor([text[-1:] for text in texts], device=device))
        rows = [window(text, self.context_length) for text in texts]
        length = max(map(len, rows))
        self.caches.clear()
        self.filled = 0
        self.padding = torch.tensor([length - len(row) for row in rows], device=device)
        return self._read_on(torch.tensor([[0] * (length - len(row)) + row for row in rows], device=device))

    def _read_on(self, tokens: Tensor) -> Tensor:
        """The next ids of all rows, int64 [B, Q] -> logits [B, V] of what follows them."""
        columns = torch.arange(self.filled, self.filled + tokens.shape[1], device=tokens.device)  # [Q]
        positions = (columns - self.padding.unsqueeze(1)).clamp(min=0)  # [B, Q]
        logits = self.model(tokens, position_ids=positions)
        self.filled += tokens.shape[1]
        return logits[:, -1]

    def mask(
        self, cu_seqlens: Tensor | None, tokens: Tensor, dtype: torch.dtype, needs_mask: bool, window: int | None = None
    ) -> Tensor:
        """Replace ``document_attention``: the columns that ids [B, Q] attend to, 0 or -inf [B, 1, Q, K].

        K columns are filled then. Padding attends to itself: an empty row would become NaN, and spread.
        """
        total = self.filled + tokens.shape[1]
        keys = torch.arange(total, device=tokens.device)  # [K]
        queries = keys[self.filled :].unsqueeze(1)  # [Q, 1]
        seen = keys <= queries  # [Q, K]
        if window is not None:
            seen = seen & (queries - keys <= window)
        padding = self.padding.view(-1, 1, 1)  # [B, 1, 1]
        seen = seen & ((keys >= padding) | (keys == queries))  # [B, Q, K]
        # Not as bool, which each layer's attention would turn into this.
        return torch.zeros(seen.shape, dtype=dtype, device=tokens.device).masked_fill(~seen, -torch.inf).unsqueeze(1)

    def attention(
        self, name: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *settings: Any, **options: Any
    ) -> Tensor:
        """Replace ``attention.attention``: q [B, Q, heads, head_dim] and k, v [B, Q, groups, head_dim] of new ids."""
        if name not in self.caches:
            batch, _, groups, head_dim = k.shape
            shape = (batch, groups, self.columns, head_dim)
            self.caches[name] = k.new_empty(shape), v.new_empty(shape)
        keys, values = self.caches[name]
        # narrow and copy_: for one id, indexing would take longer than the attention itself.
        for cache, new in (keys, k), (values, v):
            cache.narrow(2, self.filled, q.shape[1]).copy_(new.transpose(1, 2))
        total = self.filled + q.shape[1]
        k, v = (cache.narrow(2, 0, total).transpose(1, 2) for cache in (keys, values))  # [B, K, groups, head_dim]
        return attention(q, k, v, mask, *settings, **options)
