"""A model that reads each id once: the keys and values of what it has read are kept, and later ids attend to them.

The cache takes the place of ``layers.attention`` and ``layers.document_attention``, as context parallelism does, so no
layer knows of it. A row has room for C ids, one per column; rows that are shorter are padded on the left.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import SelfAttention, replace_attention
from .transformer import Transformer


class CachedModel:
    """``model`` for reading on, B rows at a time. Its attention must be ``layers.SelfAttention``; it cannot train."""

    def __init__(self, model: Transformer, columns: int) -> None:
        """columns: C. Raises ValueError for a layer that has no attention of ours."""
        self.model = model
        self.columns = columns
        self.filled = 0  # columns
        self.padding = torch.empty(0, dtype=torch.int64)  # [B]: columns on the left that hold no id
        self.is_padded = False  # some row is
        # Of each attention: keys and values [B, groups, C, head_dim], where what a query reads of a head is in a row.
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}
        for number, layer in enumerate(model.layers):
            if not any(isinstance(module, SelfAttention) for module in layer.modules()):
                raise ValueError(f"layer {number} of {type(model).__name__} has no SelfAttention, so nothing to cache")
        replace_attention(model, self.mask, lambda layer: partial(self.attention, id(layer)))

    def read(self, rows: list[list[int]]) -> Tensor:
        """Forget everything, and read rows of ids -> logits [B, V] of what follows each row."""
        device = next(self.model.parameters()).device
        length = max(map(len, rows))
        self.caches.clear()
        self.filled = 0
        self.padding = torch.tensor([length - len(row) for row in rows], device=device)
        self.is_padded = any(len(row) < length for row in rows)
        return self.read_on(torch.tensor([[0] * (length - len(row)) + row for row in rows], device=device))

    def read_on(self, tokens: Tensor) -> Tensor:
        """The next ids of all rows, int64 [B, Q] -> logits [B, V] of what follows them."""
        columns = torch.arange(self.filled, self.filled + tokens.shape[1], device=tokens.device)  # [Q]
        positions = (columns - self.padding.unsqueeze(1)).clamp(min=0)  # [B, Q]
        logits = self.model(tokens, position_ids=positions)
        self.filled += tokens.shape[1]
        return logits[:, -1]

    def mask(
        self,
        cu_seqlens: Tensor | None,
        tokens: Tensor,
        dtype: torch.dtype,
        dropout: bool,
        window: int | None = None,
    ) -> Tensor | None:
        """In place of ``document_attention``: which columns the ids [B, Q] attend to, 0 or -inf [B, 1, Q, K].

        K columns are filled with them; None: they attend to all of these. Padding attends to itself: a row of nothing
        would become NaN, and spread.
        """
        if tokens.shape[1] == 1 and window is None and not self.is_padded:
            return None
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
        self,
        name: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout: float,
        window: int | None = None,
    ) -> Tensor:
        """In place of ``layers.attention``: q [B, Q, heads, head_dim] and k, v [B, Q, groups, head_dim] of new ids."""
        if name not in self.caches:
            batch, _, groups, head_dim = k.shape
            shape = (batch, groups, self.columns, head_dim)
            self.caches[name] = k.new_empty(shape), v.new_empty(shape)
        keys, values = self.caches[name]
        # narrow and copy_: for one id, indexing would take longer than the attention itself.
        for cache, new in (keys, k), (values, v):
            cache.narrow(2, self.filled, q.shape[1]).copy_(new.transpose(1, 2))
        total = self.filled + q.shape[1]
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.narrow(2, 0, total),  # [B, groups, K, head_dim]
            values.narrow(2, 0, total),
            attn_mask=mask,
            enable_gqa=k.shape[2] < q.shape[2],
        )
        return attended.transpose(1, 2)
