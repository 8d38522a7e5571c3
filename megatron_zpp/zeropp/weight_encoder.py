"""How one unit's weights are encoded, no matter how they are carried: formats, noise, and samples of the error."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import ZeroPPConfig
from .monitor import ErrorMonitor
from .quantization import mix_seed
from .topology import RankLayout
from .unit import Unit
from .wire_format import WireFormat, wire_format


class WeightEncoder:
    """The encoder of one unit's shards [L]. ``versions`` counts those of the parameters, so far."""

    def __init__(self, unit: Unit, layout: RankLayout, config: ZeroPPConfig, monitor: ErrorMonitor) -> None:
        self.unit, self.config, self.monitor = unit, config, monitor
        # On one node there is no secondary partition to be different from.
        self.sends_differences = config.weight_difference_bits is not None and layout.num_nodes > 1
        self.versions = 0
        self._sampled: dict[int, int] = {}  # by rank, the version whose error the monitor has

    def in_full(self, dtype: torch.dtype) -> WireFormat:
        """Of shards themselves, as they go to other nodes, or to all ranks."""
        config = self.config
        bits = config.weight_bits if config.quantized_weights and not self.sends_differences else None
        return self._format(bits, config.weight_block_size, dtype)

    def differences(self, dtype: torch.dtype) -> WireFormat:
        """Of what changed since the secondary partition."""
        return self._format(self.config.weight_difference_bits, self.config.weight_difference_block_size, dtype)

    def within_node(self, dtype: torch.dtype) -> WireFormat | None:
        """Of the secondary partition among the ranks of a node; None = as it is."""
        keeps_wires = self.config.hpz_secondary_dtype == "int8"
        bits = self.config.weight_bits if keeps_wires else self.config.weight_intra_bits
        return self._format(bits, self.config.weight_block_size, dtype) if bits is not None else None

    def encode(self, shard: Tensor, format: WireFormat, rank: int, minus: Tensor | None = None) -> Tensor:
        """Encode the shard [L] of ``rank``, or its difference from a copy of it: uint8 [nbytes]."""
        # The noise depends on the version, so that every gather of one version gives the same weights.
        return format.encode(shard, self._noise_seed("inter", rank), minus=minus)

    def sample(self, shard: Tensor, format: WireFormat, wire: Tensor, rank: int, minus: Tensor | None = None) -> None:
        """Sample the error of what ``encode`` made of the same arguments, if the monitor wants it."""
        # qwZ alone gathers a version several times.
        if self.monitor.is_due(self.versions) and self._sampled.get(rank) != self.versions:
            self._sampled[rank] = self.versions
            arrived = format.decode(wire, out=torch.empty_like(shard, dtype=torch.float32))
            self.monitor.record("weights", self.unit.name, shard, arrived if minus is None else arrived.add_(minus))
            self.monitor.record_codes("weights", self.unit.name, format, wire)

    def encode_within_node(self, partition: Tensor, format: WireFormat, local_rank: int) -> Tensor:
        """Encode the secondary partition [N, L] of the ranks with this ``local_rank``: uint8 [N, nbytes]."""
        # The same noise in every node, so that all ranks see the same weights.
        return format.encode(partition, self._noise_seed("intra", local_rank))

    def _format(self, bits: int | None, block_size: int | None, dtype: torch.dtype) -> WireFormat:
        return wire_format(self.unit.parameter_shards(), bits, block_size, dtype)

    def _noise_seed(self, hop: str, source: int) -> int | None:
        if self.config.weight_rounding == "nearest":
            return None
        return mix_seed(self.config.seed, "weights", hop, self.unit.name, source, self.versions)

    def state_dict(self) -> dict[str, Tensor]:
        """What the weights of the next gather depend on beside the parameters; nothing with the default settings."""
        if self.config.weight_rounding == "nearest" and self.config.weight_difference_bits is None:
            return {}
        return {
            "versions": torch.tensor(self.versions),
            "is_current": torch.tensor(not self.unit.parameters_changed()),  # an evaluation may have gathered already
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            self.versions = int(state["versions"])
            if state["is_current"]:
                self.unit.mark_gathered()
