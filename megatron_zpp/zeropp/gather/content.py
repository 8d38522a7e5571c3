"""Which weights are sent: content decides.

A rank has what it sent of each unit: its own row among the copies that gathers keep. When a forward pass begins,

- what an optimizer step trained since then is sent, and nobody asks whether it moved;
- all else is encoded again and compared with that row: frozen parameters at every step, all parameters in passes that
  follow no step. One small all-reduce lets a difference on one rank count on all, and the host waits for it.

Further micro-batches of a step begin nothing. ``unshard()`` by hand begins for its unit alone.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..fsdp.collectives import count_all_reduce
from ..fsdp.fsdp_unit import FSDPUnit
from ..fsdp.shared import Shared
from ..fsdp.topology import Topology
from .sent_shards import send


@torch.inference_mode(False)  # what is sent outlives an evaluation in inference mode
@torch.no_grad()
def send_changes(units: Sequence[FSDPUnit], shared: Shared) -> None:
    """Start to send what changed of these units, which are about to be gathered. Collective."""
    units = [unit for unit in units if unit.is_sharded]
    found = {unit: unit.all_gather.differs_from_sent() for unit in units}
    flags = {unit: flag for unit, flag in found.items() if flag is not None}
    if shared.position.sends_nothing:
        _refuse_changes(flags)
        different = set[FSDPUnit]()
    else:
        different = agree(flags, shared)
    encoded = [
        unit.all_gather.renew(is_different=unit in different) for unit in units if unit.has_trained or unit in different
    ]
    send([shard for shard in encoded if shard is not None], shared)


def agree(flags: Mapping[FSDPUnit, Tensor], shared: Shared) -> set[FSDPUnit]:
    """Return the units whose flag, a bool [], is true on any rank that shares them. Collective; the host waits."""
    by_topology: dict[Topology, list[FSDPUnit]] = {}
    for unit in flags:
        by_topology.setdefault(unit.topology, []).append(unit)
    agreed: list[Tensor] = []
    for topology, members in by_topology.items():
        agreed.append(torch.stack([flags[unit] for unit in members]).int())
        dist.all_reduce(agreed[-1], op=dist.ReduceOp.MAX, group=topology.group)
        for _ in members:
            count_all_reduce(shared.traffic, topology, agreed[-1].itemsize)
    if not agreed:
        return set()
    ordered = [unit for members in by_topology.values() for unit in members]
    return {unit for unit, flag in zip(ordered, torch.cat(agreed).tolist(), strict=True) if flag}


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return whether numbers of one dtype are equal, a bool []; a NaN equals itself."""
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    return (a.view(as_bits) == b.view(as_bits)).all()


def _refuse_changes(flags: Mapping[FSDPUnit, Tensor]) -> None:
    """Raise RuntimeError for units that changed in a pass in which ranks cannot agree to gather them again."""
    changed = torch.stack([*flags.values()]).tolist() if flags else []
    if any(changed):
        labels = ", ".join(unit.label for unit, has in zip(flags, changed, strict=True) if has)
        raise RuntimeError(
            f"parameters of {labels} were written between two passes inside resident_weights(), where ranks need not "
            "run equally many and cannot agree to gather again: call zeropp.invalidate() on all ranks after writing "
            "them, or enter resident_weights() again"
        )
