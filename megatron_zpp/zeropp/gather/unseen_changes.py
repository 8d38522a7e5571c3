"""Parameter changes that leave no trace: ``p.data``, local tensors, foreach operations, in-place loading.

Autograd's version counters do not see them, so shards are compared with checksums of what was gathered.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..fsdp.collectives import count_all_reduce
from ..fsdp.formats import UnitPart
from ..fsdp.fsdp_unit import FSDPUnit
from ..fsdp.shared import Shared

WORD_BYTES = 8
CHECKSUM_KEYS = ("checksum", "frozen_checksum")  # of a unit's parts, which are one or two


def checksum(shard: Tensor) -> Tensor:
    """Return int64 [a few sqrt(n)] for a flat shard of n 8-byte words: equal for equal bits, on CPU and GPU.

    The words form a square, whose rows and columns are added up; leftover words stay as they are. A change escapes only
    if it leaves every sum as it was: no change of one element, no exchange of two and no equal change of all can.
    Integers, because their sums do not depend on order; whole words, because narrower integers would be converted into
    a copy of the shard.
    """
    per_word = WORD_BYTES // shard.element_size()
    if shard.numel() % per_word or shard.storage_offset() % per_word:
        shard = torch.nn.functional.pad(shard, (0, -shard.numel() % per_word))  # into memory of its own
    words = shard.view(torch.int64)
    # Odd: sums wrap around, and an even number of equal changes (such as of the highest bit, a sign) could add up to 0.
    side = max(0, (math.isqrt(words.numel()) - 1) // 2 * 2 + 1)
    square = words[: side * side].view(side, side)
    return torch.cat([square.sum(0), square.sum(1), words[side * side :]])


def checksums(shard: Tensor, parts: Iterable[UnitPart]) -> dict[tuple[int, ...], Tensor]:
    """Return the checksums of these parts of a unit's shard [L], by their indices."""
    return {part.indices: checksum(part.select(shard)) for part in parts}


def state_of_changes(
    unit: FSDPUnit, known: Mapping[tuple[int, ...], Tensor], unsent: Collection[int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return what a resumed run must know: which parameters are yet to be sent, and checksums of the others.

    Keys and shapes are always the same; unknown checksums are zeros.
    """
    state = {}
    for key, part in zip(CHECKSUM_KEYS, unit.parts, strict=False):
        value = known.get(part.indices) if set(part.indices).isdisjoint(unsent) else None
        if value is None:
            empty = torch.empty(part.numel, dtype=dtype, device="meta")
            value = torch.zeros_like(checksum(empty), device=unit.device)
        state[key] = value
    if len(unit.parts) > 1:
        state["unsent"] = torch.tensor([index in unsent for index in unit.whole.indices])
    return state


def load_changes(unit: FSDPUnit, state: Mapping[str, Tensor]) -> dict[tuple[int, ...], Tensor]:
    """Return the checksums that ``state_of_changes`` saved, of parts that were sent."""
    if "unsent" in state:
        unsent = set(state["unsent"].nonzero().flatten().tolist())
    else:
        unsent = set() if not state or state["is_current"] else set(unit.whole.indices)
    return {
        part.indices: state[key].to(unit.device, copy=True)
        for key, part in zip(CHECKSUM_KEYS, unit.parts, strict=False)
        if key in state and unsent.isdisjoint(part.indices)
    }


@dataclass(frozen=True)
class UnseenChanges:
    """Finds unseen changes in the units of one process group. A change on one rank counts on all.

    A training loop pays only for checksums. A look, with a small all-reduce and a wait for its result, happens only
    when a forward pass needs parameters that nothing says have changed. Whether to look depends on what every rank's
    program does, so all ranks of the group look together.
    """

    units: Sequence[FSDPUnit]
    shared: Shared

    def look_for(self, unit: FSDPUnit) -> None:
        """Mark ``unit``, which is about to be gathered, if it changed; in a forward pass also the other units."""
        forward_pass = self.shared.position.forward_pass
        is_known = unit.known_in == forward_pass
        if unit.is_in_backward or (is_known and unit.is_in_forward) or not unit.unchanged_parts():
            return
        if unit.is_in_forward:
            self._look_at([other for other in self.units if other.is_sharded and other.known_in != forward_pass])
        else:
            self._look_at([unit])  # ``unshard()`` by hand

    def gathered(self, unit: FSDPUnit, shard: Tensor, part: UnitPart) -> None:
        """Keep checksums of a part of ``unit``, whose shard [L] is sent between nodes."""
        # Like the gather, this runs after whatever wrote the parameters and before the next write: FSDP2's streams wait
        # for the program's when a pass begins, and the program's for each gather.
        if part.is_whole:
            unit.known_in = self.shared.position.forward_pass
            unit.checksums.clear()
        unit.checksums |= checksums(shard, unit.parts if part.is_whole else (part,))

    def _look_at(self, units: Sequence[FSDPUnit]) -> None:
        units = [unit for unit in units if unit.unchanged_parts() and unit.checksums]
        if not units:
            return
        for unit in units:
            unit.known_in = self.shared.position.forward_pass
        flags = torch.stack([_has_changed(unit) for unit in units]).int()
        if self.shared.position.sends_nothing:
            refuse_changes([unit for unit, changed in zip(units, flags.tolist(), strict=True) if changed])
            return
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=units[0].topology.group)
        for unit, changed in zip(units, flags.tolist(), strict=True):
            count_all_reduce(self.shared.traffic, unit.topology, flags.itemsize)
            if changed:
                unit.mark_changed()


def refuse_changes(units: Sequence[FSDPUnit]) -> None:
    """Raise RuntimeError for units that changed unseen, in a pass in which ranks cannot agree to gather them again."""
    if units:
        raise RuntimeError(
            f"parameters of {', '.join(unit.label for unit in units)} were written between two passes inside "
            "resident_weights(), by means that leave no trace: call zeropp.invalidate() on all ranks after writing "
            "them, or enter resident_weights() again"
        )


def _has_changed(unit: FSDPUnit) -> Tensor:
    """Compare the parts that nothing says have changed with the unit's checksums: a bool on its device."""
    now = checksums(unit.flat_shard(), unit.unchanged_parts())
    return torch.stack([_differs(value, unit.checksums.get(indices)) for indices, value in now.items()]).any()


def _differs(now: Tensor, then: Tensor | None) -> Tensor:
    # The model was cast or moved, or parameters were frozen or unfrozen.
    if then is None or now.shape != then.shape or now.device != then.device:
        return now.new_ones((), dtype=torch.bool)
    return (now != then).any()
