"""The wire format of every hop of a unit's weights and gradients, for a config.

    hop                                  format
    weights to other nodes, or to all    ``weights``; where copies are there, how their codes moved (wire/moves.py)
    weights within a node                ``weights_within_node``
    gradients within a node              ``gradients_within_node``
    gradients between nodes              ``gradients_between_nodes``

The collectives and the estimates of a run that is not started all read them here.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ..config import SCALE_DTYPES, ZeroPPConfig
from ..wire.format import WireFormat
from .unit import UnitPart

# What a moved code took, by its bits and over all steps of a run: docs/evidence/experiments.md, E12. None: bf16's own.
MOVED_BITS_PER_CODE = {8: 0.88, 6: 0.36, 4: 0.15, None: 5.6}


@dataclass(frozen=True)
class Formats:
    """The formats of units whose ranks are on ``num_nodes`` nodes.

    part: some or all parameters of a unit. dtype: of gathered weights, or of reduced gradients. step: optimizer steps
    before this one, for a warm-up of bits.
    """

    config: ZeroPPConfig
    num_nodes: int

    @cached_property
    def has_secondary_partition(self) -> bool:
        return self.config.hpz_partition_size > 1 and self.num_nodes > 1

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
        return part.format(bits, config.weight_block_size, dtype, config.weight_scaling, self._scale_dtype)

    def weights_within_node(self, part: UnitPart, dtype: torch.dtype) -> WireFormat | None:
        """Return the format of a node's shard of the secondary partition; None = as numbers, in ``dtype``."""
        config = self.config
        bits, scaling = config.weight_intra_bits, config.weight_intra_scaling
        if self.keeps_wires:
            return self.weights(part, dtype)
        if bits is None:
            return None
        return part.format(bits, config.weight_block_size, dtype, scaling, self._scale_dtype)

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
        whole = self.weights_within_node if self.has_secondary_partition else self.weights
        format = whole(part, dtype)
        return dtype.itemsize * part.numel if format is None else format.nbytes

    def gradients_within_node(self, part: UnitPart, dtype: torch.dtype) -> WireFormat:
        config = self.config
        bits, scaling = config.gradient_intra_bits, config.gradient_intra_scaling
        return part.format(bits, config.gradient_block_size, dtype, scaling, self._scale_dtype)

    def gradients_between_nodes(self, part: UnitPart, dtype: torch.dtype, step: float = math.inf) -> WireFormat:
        bits, scaling = self.config.gradient_code_at(step)
        # What stays unquantized is a node's sums: in fp32 where the others are quantized, since few are left.
        sums_dtype = dtype if self.config.gradient_bits is None else torch.float32
        return part.format(bits, self.config.gradient_block_size, sums_dtype, scaling, self._scale_dtype)

    def rotation(self, part: UnitPart, dtype: torch.dtype) -> WireFormat | None:
        """Return the format whose quantized parameters are rotated before both hops; None = none are."""
        config = self.config
        if not config.hadamard:
            return None
        bits = config.gradient_bits or config.gradient_intra_bits
        return part.format(bits, config.gradient_block_size, dtype, scale_dtype=self._scale_dtype)

    def node_sum(self, part: UnitPart) -> WireFormat:
        """Return the format of int8 sums of micro-batches. Small and one-dimensional parameters stay in fp32."""
        return part.format(8, self.config.gradient_block_size, torch.float32)

    @cached_property
    def _scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.config.scale_dtype]
