"""Parts of a unit, and the wire format of every hop of its weights and gradients: of a run, and of its estimate.

hop                                  format, by default                              and its function
weights to other nodes, or to all    int8 with qwZ, or how codes moved (wire/moves.py)  ``weights``
weights within a node                unquantized                                     ``weights_within_node``
gradients within a node              int8                                            ``gradients_within_node``
gradients between nodes              int4, with LoCo's error added                   ``gradients_between_nodes``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..config import SCALE_DTYPES, ZeroPPConfig
from ..wire.format import WireFormat, wire_format
from ..wire.layout import ParameterShard, WireLayout

# Bits that a moved code took, by its width, over all steps of a run: docs/evidence/experiments.md, E12. None: bf16's.
MOVED_BITS_PER_CODE = {8: 0.88, 6: 0.36, 4: 0.15, None: 5.6}

Layouts = tuple[WireLayout, WireLayout] | None  # a unit's, and its part's; None = numbers


@dataclass(frozen=True)
class UnitPart:
    """The parameters with these ``indices``, in order, of a unit with these ``shards``."""

    shards: tuple[ParameterShard, ...]
    indices: tuple[int, ...]

    @classmethod
    def whole(cls, parameters: Sequence[ParameterShard]) -> UnitPart:
        """Return the part that is all of a unit."""
        return cls(tuple(parameters), tuple(range(len(parameters))))

    @cached_property
    def is_whole(self) -> bool:
        """Whether the part is all of the unit, and ``select`` and ``insert`` copy nothing."""
        return len(self.indices) == len(self.shards)

    @cached_property
    def parameters(self) -> tuple[ParameterShard, ...]:
        return tuple(self.shards[index] for index in self.indices)

    @cached_property
    def numel(self) -> int:
        """Elements of a rank's shard, l."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def columns(self) -> list[slice]:
        """Each parameter's elements of a shard [L]."""
        stops = list(accumulate(shard.numel for shard in self.shards))
        return [slice(stops[index] - self.shards[index].numel, stops[index]) for index in self.indices]

    def select(self, shards: Tensor, layouts: Layouts = None) -> Tensor:
        """Return the part [..., l] of shards [..., L]; with ``layouts``, of wire buffers uint8 [..., nbytes]."""
        if self.is_whole:
            return shards
        if layouts is None:
            return torch.cat([shards[..., column] for column in self.columns], dim=-1)
        selected = shards.new_zeros(*shards.shape[:-1], layouts[1].nbytes)
        for in_unit, in_part in self._places(layouts):
            selected[..., in_part] = shards[..., in_unit]
        return selected

    def insert(self, values: Tensor, shards: Tensor, layouts: Layouts = None) -> Tensor:
        """Write the part's values over it in ``shards``; return these, or the values if they are all."""
        if self.is_whole:
            return values
        for in_unit, in_part in self._places(layouts):
            shards[..., in_unit] = values[..., in_part]
        return shards

    def _places(self, layouts: Layouts) -> list[tuple[slice, slice]]:
        if layouts is None:
            return list(zip(self.columns, UnitPart.whole(self.parameters).columns, strict=True))
        # Blocks never span parameters, so a parameter's bytes are the same in both.
        return [
            pair
            for position, index in enumerate(self.indices)
            for pair in zip(layouts[0].bytes_of(index), layouts[1].bytes_of(position), strict=True)
        ]


@dataclass(frozen=True)
class Formats:
    """The formats of units whose ranks are on ``num_nodes`` nodes.

    dtype: of gathered weights, or of reduced gradients. step: optimizer steps before, for a warm-up of bits.
    """

    config: ZeroPPConfig
    num_nodes: int

    @cached_property
    def has_secondary_partition(self) -> bool:
        return self.config.keeps_copies and self.num_nodes > 1

    @cached_property
    def sends_moves(self) -> bool:
        """Whether weights are sent to other nodes as moves of the codes in the copies that are there."""
        return self.config.weight_moves and self.num_nodes > 1

    @cached_property
    def keeps_wires(self) -> bool:
        """Whether the secondary partition is kept as it arrived, in wire buffers."""
        has_nf4 = self.has_secondary_partition and self.config.frozen_dtype is not None
        return self.config.hpz_secondary_dtype == "int8" or self.sends_moves or has_nf4

    def weights(self, part: UnitPart, dtype: torch.dtype) -> WireFormat:
        """Return the format of shards themselves."""
        config = self.config
        bits = config.weight_bits if config.quantized_weights else None
        return self._format(part, bits, config.weight_block_size, dtype, config.weight_scaling)

    def weights_within_node(self, part: UnitPart, dtype: torch.dtype) -> WireFormat | None:
        """Return the format of a shard in the gather after the secondary partition, or the only one; None = numbers."""
        config, bits = self.config, self.config.weight_intra_bits
        if self.keeps_wires or not self.has_secondary_partition:
            return self.weights(part, dtype)
        if bits is None:
            return None
        return self._format(part, bits, config.weight_block_size, dtype, config.weight_intra_scaling)

    def bytes_between_nodes(self, part: UnitPart, dtype: torch.dtype) -> int:
        """Return the bytes that one rank sends to each other node's once per step; of moves about, over a whole run."""
        whole = self.weights(part, dtype)
        if not self.sends_moves:
            return whole.nbytes
        coded = sum(segment.stop - segment.start for segment in whole.quantized or whole.unquantized)
        in_full = coded * (whole.bits or 8 * dtype.itemsize) / 8
        return whole.nbytes - round(in_full - coded * MOVED_BITS_PER_CODE[whole.bits] / 8)

    def secondary_bytes(self, part: UnitPart, dtype: torch.dtype) -> int:
        """Return the bytes of one node's shard in the secondary partition."""
        return self.weights(part, dtype).nbytes if self.keeps_wires else dtype.itemsize * part.numel

    def resident_bytes(self, part: UnitPart, dtype: torch.dtype) -> int:
        """Return the bytes of one rank's shard among the resident weights, of which a rank keeps all shards."""
        format = self.weights_within_node(part, dtype)
        return dtype.itemsize * part.numel if format is None else format.nbytes

    def gradients_within_node(self, part: UnitPart, dtype: torch.dtype) -> WireFormat:
        config, bits = self.config, self.config.gradient_intra_bits
        return self._format(part, bits, config.gradient_block_size, dtype, config.gradient_intra_scaling)

    def gradients_between_nodes(self, part: UnitPart, dtype: torch.dtype, step: float = math.inf) -> WireFormat:
        bits, scaling = self.config.gradient_bits, self.config.gradient_scaling
        if (warmup := self.config.warmup) is not None and step < warmup[0]:
            bits, scaling = warmup[1], None
        # Unquantized values are a node's sums: in fp32 where the others are quantized, since few are left.
        sums_dtype = dtype if self.config.gradient_bits is None else torch.float32
        return self._format(part, bits, self.config.gradient_block_size, sums_dtype, scaling)

    def rotation(self, part: UnitPart, dtype: torch.dtype) -> WireFormat | None:
        """Return the format whose quantized parameters are rotated before both hops; None = none are."""
        config = self.config
        if not config.hadamard:
            return None
        bits = config.gradient_bits or config.gradient_intra_bits
        return self._format(part, bits, config.gradient_block_size, dtype)

    def node_sum(self, part: UnitPart) -> WireFormat:
        """Return the format of int8 sums of micro-batches. Small and one-dimensional parameters stay in fp32."""
        return wire_format(part.parameters, 8, self.config.gradient_block_size, torch.float32)

    def _format(
        self, part: UnitPart, bits: int | None, block_size: int | None, dtype: torch.dtype, scaling: str | None = None
    ) -> WireFormat:
        return wire_format(part.parameters, bits, block_size, dtype, scaling, SCALE_DTYPES[self.config.scale_dtype])
