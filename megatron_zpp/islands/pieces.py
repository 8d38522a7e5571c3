"""How the parameters that a rank holds are cut into a piece for each island to add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_zpp.zeropp.wire.layout import ParameterShard, rows_per_rank


class Pieces:
    """Some parameters of a rank, each of whose elements are cut into K equal parts, the last ones padded with zeros.

    A piece [L] is the concatenation of one part of each parameter, so that blocks never span two.
    """

    def __init__(self, parts: Mapping[str, Tensor], num_islands: int) -> None:
        """parts: what the rank holds of each parameter; only names and shapes are taken."""
        self.num_islands = num_islands
        self.shapes = [part.shape for part in parts.values()]
        self.shards = tuple(
            ParameterShard(name, rows_per_rank(part.numel(), num_islands), quantizable=part.ndim >= 2)
            for name, part in parts.items()
        )

    @property
    def numel(self) -> int:
        """L."""
        return sum(shard.numel for shard in self.shards)

    def cut(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the parameters' shapes as pieces, fp32 [K, L]."""
        pieces = torch.zeros(self.num_islands, self.numel, device=tensors[0].device if tensors else None)
        for tensor, column in zip(tensors, self._columns(pieces), strict=True):
            padded = column.new_zeros(column.numel())
            padded[: tensor.numel()] = tensor.reshape(-1)
            column.copy_(padded.view_as(column))
        return pieces

    def join(self, pieces: Tensor) -> list[Tensor]:
        """The inverse: [K, L] as tensors of the parameters' shapes."""
        return [
            column.reshape(-1)[: shape.numel()].view(shape)
            for column, shape in zip(self._columns(pieces), self.shapes, strict=True)
        ]

    def _columns(self, pieces: Tensor) -> Sequence[Tensor]:
        """Each parameter's parts [K, l]."""
        return pieces.split([shard.numel for shard in self.shards], dim=1)
