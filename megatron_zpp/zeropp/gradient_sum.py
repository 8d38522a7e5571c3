"""Gradients that are added up only when they are needed, so that one pass may add up and encode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .element_scales import ScaledFormat
from .wire_format import WireFormat
from .wire_layout import Compensation


@dataclass(frozen=True)
class GradientSum:
    """Gradients [..., L]: one rank's own, or the sum of what G ranks sent; and ``plus``, if there is any.

    parts: [..., L] of any float type; with a ``format`` uint8 [G, ..., nbytes] in it.
    """

    parts: Tensor
    format: WireFormat | ScaledFormat | None = None
    plus: Tensor | None = None  # fp32 [..., L]

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @property
    def rows(self) -> torch.Size:
        """The shape but for L."""
        return self.parts.shape[:-1] if self.format is None else self.parts.shape[1:-1]

    def only_piece(self) -> GradientSum:
        """[..., L] of [1, ..., L]."""
        parts = self.parts[0] if self.format is None else self.parts[:, 0]
        return replace(self, parts=parts, plus=self.plus[0] if self.plus is not None else None)

    def compute(self) -> Tensor:
        """Add up in fp32, in rank order: [..., L], in the memory of ``plus`` if there is any."""
        if self.format is None:
            return self.parts.to(torch.float32, copy=True) if self.plus is None else self.plus.add_(self.parts)
        if self.plus is not None:
            return self.format.decode_sum(self.parts, out=self.plus, accumulate=True)
        return self.format.decode_sum(self.parts, out=torch.empty(*self.rows, self.format.numel, device=self.device))

    def computed(self) -> GradientSum:
        """The same with nothing left to add up."""
        is_sum = self.format is not None or self.plus is not None
        return GradientSum(self.compute()) if is_sum else self

    def encode(
        self, format: WireFormat | ScaledFormat, noise_seed: int | None, compensation: Compensation | None = None
    ) -> Tensor:
        """Add up and encode: uint8 [..., nbytes]."""
        if isinstance(format, ScaledFormat):  # there is no kernel that adds up on the way
            return format.encode(self.computed().parts, noise_seed, compensation)
        if self.format is None:
            return format.encode(self.parts, noise_seed, plus=self.plus, compensation=compensation)
        assert isinstance(self.format, WireFormat)  # what has scales of elements has come to the end of its way
        return format.encode_sum(self.parts, self.format, noise_seed, plus=self.plus, compensation=compensation)
