"""A debugging aid: ranks that would gather differently stop with one error, instead of waiting for each other."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from .collectives import all_gather, count_flat_ring
from .fsdp_unit import FSDPUnit
from .shared import Traffic

# What a rank has found of a unit's parameters since their last gather. How it gathers depends on that.
UNCHANGED, STEPPED, CHANGED = range(3)
FINDINGS = ("saw no change", "saw that an optimizer may have stepped", "saw that the program changed parameters")


def check_consistency(all_units: Sequence[FSDPUnit], traffic: Traffic, unit: FSDPUnit) -> None:
    """Compare what ranks found about their units, before any acts on it; ``unit`` is about to be gathered. Collective.

    Raises RuntimeError on all ranks of ``unit`` if they differ.
    """
    units = [other for other in all_units if other.topology is unit.topology]
    local = torch.tensor([units.index(unit), *map(_finding, units)], device=unit.device)
    gathered = local.new_empty(unit.topology.world_size, len(local))
    all_gather(gathered.flatten(), local, group=unit.topology.group)
    count_flat_ring(traffic, unit.topology, local.nbytes)

    ranks = dist.get_process_group_ranks(unit.topology.group)
    next_units, *findings = zip(*gathered.tolist(), strict=True)  # each by rank
    differences = _differences(ranks, ["about to gather " + units[index].label for index in next_units])
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


def _differences(ranks: Iterable[int], findings: Iterable[str]) -> list[str]:
    """Say which ranks found what, unless all found the same."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for rank, value in zip(ranks, findings, strict=True):
        by_value[value].append(str(rank))
    if len(by_value) == 1:
        return []
    return [f"rank{'s' * (len(those) > 1)} {', '.join(those)} {value}" for value, those in by_value.items()]
