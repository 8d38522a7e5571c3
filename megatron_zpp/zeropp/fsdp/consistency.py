"""A debugging aid: ranks that would gather differently stop with one error, instead of waiting for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from .collectives import all_gather, count_flat_ring
from .fsdp_unit import FSDPUnit
from .traffic import Traffic

# What a rank has found of a unit's parameters since their last gather. How it gathers depends on that.
UNCHANGED, STEPPED, CHANGED = range(3)
FINDINGS = ("saw no change", "saw that an optimizer may have stepped", "saw that the program changed parameters")


class Agreement:
    """Compares what the ranks of a process group found of all its units, before any of them acts on it."""

    def __init__(self, units: Sequence[FSDPUnit], traffic: Traffic) -> None:
        self.units, self.traffic = units, traffic

    def check(self, unit: FSDPUnit) -> None:
        """Raise RuntimeError on all ranks of ``unit``, which is about to be gathered, if they differ; collective."""
        units = [other for other in self.units if other.topology is unit.topology]
        own = torch.tensor([units.index(unit), *map(_finding, units)], device=unit.device)
        of_ranks = own.new_empty(unit.topology.world_size, len(own))
        all_gather(of_ranks.flatten(), own, group=unit.topology.group)
        count_flat_ring(self.traffic, unit.topology, own.nbytes)

        ranks = dist.get_process_group_ranks(unit.topology.group)
        gathered, *findings = zip(*of_ranks.tolist(), strict=True)  # each by rank
        differences = _differences(ranks, ["about to gather " + units[index].label for index in gathered])
        for other, found in zip(units, findings, strict=True):
            differences += [f"{other.label}: {line}" for line in _differences(ranks, [FINDINGS[f] for f in found])]
        if differences:
            raise RuntimeError(
                "the ranks are about to gather differently, and would wait for each other for ever:\n  "
                + "\n  ".join(differences)
                + "\nRun the same passes in the same order on all ranks, and change parameters on all of them; after a "
                "change on some, call zeropp.invalidate() on all"
            )


def _finding(unit: FSDPUnit) -> int:
    changed = unit.changed()
    if not changed:
        return UNCHANGED
    return STEPPED if unit.keeps_copies(changed) else CHANGED


def _differences(ranks: Iterable[int], of_ranks: Iterable[str]) -> list[str]:
    """Who says what, if not all say the same."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for rank, value in zip(ranks, of_ranks, strict=True):
        by_value[value].append(str(rank))
    if len(by_value) == 1:
        return []
    return [f"rank{'s' * (len(those) > 1)} {', '.join(those)} {value}" for value, those in by_value.items()]
