"""How one unit's weights are encoded, on real and on emulated ranks: formats, noise, and samples of the error."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ..fsdp.formats import Formats
from ..fsdp.shared import Shared
from ..fsdp.unit import Unit, UnitPart
from ..wire.format import WireFormat
from ..wire.layout import can_be_addend, encoded_addend
from ..wire.quantization import mix_seed
from .unseen_changes import state_of_changes


class WeightEncoder:
    """Encodes shards [L] of one unit or of a part of it. ``versions`` counts how often its parameters changed."""

    def __init__(self, unit: Unit, num_nodes: int, shared: Shared) -> None:
        self.unit, self.config = unit, shared.config
        self.monitor, self.micro_batch = shared.monitor, shared.micro_batch
        self.formats = Formats(shared.config, num_nodes)
        # Stochastic rounding is right on average over many roundings, so frozen weights are rounded again, too.
        unit.gathers_frozen = shared.config.weight_rounding == "stochastic"
        self.versions = 0
        self._sampled: dict[int, int] = {}  # by rank, the version whose error the monitor has

    def differences(self, part: UnitPart, dtype: torch.dtype) -> WireFormat:
        """Return the format of what changed since the secondary partition, by the last optimizer step."""
        return self.formats.differences(part, dtype, self.micro_batch.optimizer_steps - 1)

    def encode(
        self, shard: Tensor, format: WireFormat, part: UnitPart, rank: int, copy: Tensor | None = None
    ) -> Tensor:
        """Encode the shard [L] of ``rank``, or its difference from a ``copy`` of it as it is kept: uint8 [nbytes]."""
        minus = self.copies_as_numbers(copy, part, shard.dtype) if copy is not None else None
        # The noise depends on the version, so that every gather of one version gives the same weights.
        return format.encode(shard, self._noise_seed("inter", rank), minus=minus)

    def sample(
        self, shard: Tensor, format: WireFormat, part: UnitPart, wire: Tensor, rank: int, copy: Tensor | None = None
    ) -> None:
        """Sample the error of what ``encode`` returned for the same arguments, if a sample is due."""
        # qwZ alone gathers a version several times.
        if self.monitor.is_due(self.versions) and self._sampled.get(rank) != self.versions:
            self._sampled[rank] = self.versions
            arrived = format.decode(wire, out=torch.empty_like(shard, dtype=torch.float32))
            if copy is not None:
                arrived.add_(self.copies_as_numbers(copy, part, shard.dtype))
            self.monitor.record("weights", self.unit.name, shard, arrived)
            self.monitor.record_codes("weights", self.unit.name, format, wire)

    def copies_as_numbers(self, copies: Tensor, part: UnitPart, dtype: torch.dtype) -> Tensor:
        """Return copies [..., L] as they are, or decode those kept as wires, uint8 [..., nbytes], to fp32 [..., L]."""
        if not self.formats.keeps_wires:
            return copies
        kept = self.formats.weights(part, dtype)
        return kept.decode(copies, out=torch.empty(*copies.shape[:-1], kept.numel, device=copies.device))

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

    def move_copies(
        self, copies: Tensor, wires: Tensor, differences: WireFormat, part: UnitPart, dtype: torch.dtype
    ) -> Tensor:
        """Add ``differences`` as they arrived, uint8 [R, nbytes], to copies of R shards, and return the new copies.

        All ranks that hold a copy get the same one, to the bit.
        """
        if not self.formats.keeps_wires:
            return differences.decode_sum(wires.unsqueeze(0), out=copies, accumulate=True)
        # Rounded to nearest: what this loses is in the next difference, which is taken from the copy as it is kept.
        kept = self.formats.weights(part, dtype)
        moved = torch.empty(len(wires), differences.numel, device=wires.device)
        if can_be_addend(kept):
            return kept.encode(differences.decode(wires, out=moved), compensation=encoded_addend(kept, copies))
        kept.decode(copies, out=moved)
        return kept.encode(differences.decode_sum(wires.unsqueeze(0), out=moved, accumulate=True))

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
        if config.weight_rounding == "nearest" and config.weight_difference_bits is None and not config.weight_moves:
            return {}
        return {
            "versions": torch.tensor(self.versions),
            "is_current": torch.tensor(not self.unit.changed()),  # an evaluation may have gathered already
        }

    def partition_state(
        self,
        known: Mapping[tuple[int, ...], Tensor],
        unsent: Collection[int],
        copies: Tensor | None,
        num_nodes: int,
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """Return what one rank with a secondary partition, N rows in ``dtype``, keeps besides ``state_dict``.

        Of moved codes it keeps its own row, with the scales that are kept: the others are gathered again. Keys and
        shapes are always the same: what is not there is zeros.
        """
        numel, device = self.unit.whole.numel, self.unit.device
        if self.formats.sends_moves:
            row = torch.zeros(self.formats.weights(self.unit.whole, dtype).nbytes, dtype=torch.uint8, device=device)
            has_row = torch.tensor(copies is not None)
            return {
                "has_row": has_row,
                "row": row if copies is None else copies.clone(),
                "dtype": torch.zeros(1, dtype=dtype),
            }
        state = state_of_changes(self.unit, known, unsent, dtype)
        if not self.formats.sends_differences:
            return state
        state["has_copies"] = torch.tensor(copies is not None)
        if self.formats.keeps_wires:
            state["copies_dtype"] = torch.zeros(1, dtype=dtype)  # that they were encoded from
            numel, dtype = self.formats.weights(self.unit.whole, dtype).nbytes, torch.uint8
        if copies is None:
            state["copies"] = torch.zeros(num_nodes, numel, dtype=dtype, device=device)
        else:
            state["copies"] = copies.clone()  # training goes on in place
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            self.versions = int(state["versions"])
            if state["is_current"]:
                self.unit.mark_gathered()


def load_row(unit: Unit, state: dict[str, Tensor]) -> Tensor | None:
    """Return the row of codes uint8 [nbytes] that ``partition_state`` saved; None if it saved none."""
    if not state.get("has_row", False):
        return None
    if unit.changed():  # by a step, as far as the row is concerned: what has changed is gathered in full in any case
        unit.mark_gathered()
        unit.mark_moved(unit.trained.indices)
        unit.may_have_stepped = True
    return state["row"].to(unit.device, copy=True)


def has_copies(state: dict[str, Tensor]) -> bool:
    """Whether the state of a secondary partition has copies, not the zeros that stand for none."""
    return bool(state.get("has_copies", False))
