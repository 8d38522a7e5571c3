"""Some of a unit's parameters, which are sent without the others: where they are in shards and wire buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .wire_format import WireFormat
from .wire_layout import ParameterShard, WireLayout


@dataclass(frozen=True)
class UnitPart:
    """The parameters with these ``indices``, in order, of a unit whose parameters are ``of_unit``."""

    of_unit: tuple[ParameterShard, ...]
    indices: tuple[int, ...]
    _formats: dict[tuple[object, ...], WireFormat] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def whole(cls, parameters: Sequence[ParameterShard]) -> UnitPart:
        """Return the part that is all of a unit."""
        return cls(tuple(parameters), tuple(range(len(parameters))))

    @cached_property
    def is_whole(self) -> bool:
        """Whether the part is all of the unit, and ``take`` and ``put`` copy nothing."""
        return len(self.indices) == len(self.of_unit)

    @cached_property
    def parameters(self) -> tuple[ParameterShard, ...]:
        return tuple(self.of_unit[index] for index in self.indices)

    @cached_property
    def numel(self) -> int:
        """Elements of a rank's shard, l."""
        return sum(parameter.numel for parameter in self.parameters)

    def format(
        self,
        bits: int | None,
        block_size: int | None,
        dtype: torch.dtype,
        scaling: str | None = None,
        scale_dtype: torch.dtype = torch.float32,
    ) -> WireFormat:
        """Return the part's ``WireFormat`` of these arguments, made once."""
        key = bits, block_size, dtype, scaling, scale_dtype
        if key not in self._formats:
            self._formats[key] = WireFormat(self.parameters, bits, block_size, dtype, scaling, scale_dtype)
        return self._formats[key]

    @cached_property
    def columns(self) -> list[slice]:
        """Each parameter's elements of a shard [L]."""
        stops = torch.tensor([parameter.numel for parameter in self.of_unit]).cumsum(0).tolist()
        return [slice(stops[index] - self.of_unit[index].numel, stops[index]) for index in self.indices]

    def take(self, shards: Tensor) -> Tensor:
        """The part [..., l] of shards [..., L]."""
        return shards if self.is_whole else torch.cat([shards[..., column] for column in self.columns], dim=-1)

    def put(self, values: Tensor, shards: Tensor) -> Tensor:
        """Write values [..., l] over the part of shards [..., L], and return the shards; all of a unit: the values."""
        if self.is_whole:
            return values
        pieces = values.split([parameter.numel for parameter in self.parameters], dim=-1)
        for column, piece in zip(self.columns, pieces, strict=True):
            shards[..., column] = piece
        return shards

    def take_wires(self, wires: Tensor, of_unit: WireLayout, of_part: WireLayout) -> Tensor:
        """The same for wire buffers uint8 [..., nbytes]: those of the part in its own format ``of_part``."""
        if self.is_whole:
            return wires
        taken = wires.new_zeros(*wires.shape[:-1], of_part.nbytes)
        for in_unit, in_part in self._places(of_unit, of_part):
            taken[..., in_part] = wires[..., in_unit]
        return taken

    def put_wires(self, own: Tensor, wires: Tensor, of_unit: WireLayout, of_part: WireLayout) -> Tensor:
        """Write the part's own wire buffers over those of it in the unit's, and return these."""
        if self.is_whole:
            return own
        for in_unit, in_part in self._places(of_unit, of_part):
            wires[..., in_unit] = own[..., in_part]
        return wires

    def _places(self, of_unit: WireLayout, of_part: WireLayout) -> list[tuple[slice, slice]]:
        # Blocks never span parameters, so a parameter's bytes are the same in both.
        return [
            pair
            for position, index in enumerate(self.indices)
            for pair in zip(of_unit.bytes_of(index), of_part.bytes_of(position), strict=True)
        ]
