"""How one unit's weights are encoded: formats, noise, and samples of the error."""

import torch
from torch import Tensor

from ..fsdp.formats import Formats, UnitPart
from ..fsdp.fsdp_unit import FSDPUnit
from ..fsdp.shared import Shared
from ..wire.format import WireFormat
from ..wire.quantization import mix_seed


class WeightEncoder:
    """Encodes shards [L] of one unit or of a part of it. ``versions`` counts how often its parameters changed."""

    def __init__(self, unit: FSDPUnit, num_nodes: int, shared: Shared) -> None:
        self.unit, self.config = unit, shared.config
        self.monitor = shared.monitor
        self.formats = Formats(shared.config, num_nodes)
        # Stochastic rounding is right on average over many roundings, so frozen weights are rounded again, too.
        unit.gathers_frozen = shared.config.weight_rounding == "stochastic"
        if shared.config.frozen_dtype is not None and self.formats.has_secondary_partition:
            unit.nf4_skip = shared.config.nf4_skip
            unit.specify(unit.shards, unit.packed)
        self.versions = 0
        self._sampled_version: int | None = None  # whose error the monitor has

    def encode(self, shard: Tensor, format: WireFormat, rank: int) -> Tensor:
        """Encode the shard [L] of ``rank``: uint8 [nbytes]."""
        # The noise depends on the version, so that every gather of one version gives the same weights.
        return format.encode(shard, self._noise_seed("inter", rank))

    def sample(self, shard: Tensor, format: WireFormat, wire: Tensor) -> None:
        """Sample the error of what is sent of a shard [L], as ``wire`` says it, if a sample is due."""
        # qwZ alone gathers a version several times.
        if self.monitor.is_due(self.versions) and self._sampled_version != self.versions:
            self._sampled_version = self.versions
            arrived = format.decode(wire, out=torch.empty_like(shard, dtype=torch.float32))
            self.monitor.record("weights", self.unit.name, shard, arrived)
            self.monitor.record_codes("weights", self.unit.name, format, wire)

    def copies_of(self, part: UnitPart, copies: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a part's copies out of a whole unit's, kept in the same way."""
        if not self.formats.keeps_wires:
            return part.take(copies)
        return part.take_wires(copies, self.formats.weights(self.unit.whole, dtype), self.formats.weights(part, dtype))

    def put_copies(self, part: UnitPart, values: Tensor, copies: Tensor, dtype: torch.dtype) -> Tensor:
        """Write a part's copies into a whole unit's, and return these: ``values`` itself if the part is whole."""
        if not self.formats.keeps_wires:
            return part.put(values, copies)
        formats = self.formats.weights(self.unit.whole, dtype), self.formats.weights(part, dtype)
        return part.put_wires(values, copies, *formats)

    def encode_within_node(self, partition: Tensor, format: WireFormat, local_rank: int) -> Tensor:
        """Encode the secondary partition [N, L] of the ranks with this ``local_rank``: uint8 [N, nbytes]."""
        # The same noise in every node, so that all ranks see the same weights.
        return format.encode(partition, self._noise_seed("intra", local_rank))

    def _noise_seed(self, hop: str, source: int) -> int | None:
        if self.config.weight_rounding == "nearest":
            return None
        return mix_seed(self.config.seed, "weights", hop, self.unit.name, source, self.versions)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next gather depends on besides the parameters; nothing with the default settings."""
        config = self.config
        if config.weight_rounding == "nearest" and not config.weight_moves:
            return {}
        return {
            "versions": torch.tensor(self.versions),
            "is_current": torch.tensor(not self.unit.changed()),  # an evaluation may have gathered already
        }

    def row_state(self, row: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what a rank saves of moved codes besides ``state_dict``: its own ``row`` of them, uint8 [nbytes].

        With the scales that are kept; the other rows are gathered again. Without a row it is zeros.
        """
        nbytes, device = self.formats.weights(self.unit.whole, dtype).nbytes, self.unit.device
        saved = torch.zeros(nbytes, dtype=torch.uint8, device=device) if row is None else row.clone()
        return {"has_row": torch.tensor(row is not None), "row": saved, "dtype": torch.zeros(1, dtype=dtype)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            self.versions = int(state["versions"])
            if state["is_current"]:
                self.unit.mark_gathered()


def load_row(unit: FSDPUnit, state: dict[str, Tensor]) -> Tensor | None:
    """Return the row of codes uint8 [nbytes] that ``row_state`` saved; None if it saved none."""
    if not state.get("has_row", False):
        return None
    if unit.changed():  # by a step, as far as the row is concerned: what has changed is gathered in full in any case
        unit.mark_gathered()
        unit.mark_updated(unit.trained.indices)
        unit.may_have_stepped = True
    return state["row"].to(unit.device, copy=True)
