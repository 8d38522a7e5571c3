"""Changes of the parameters that leave no trace: ``p.data``, local tensors, foreach operations, in-place loading.

Autograd's version counters do not move there, so the shards themselves are compared with what was gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import count_all_reduce
from .fsdp_unit import FSDPUnit
from .micro_batch import MicroBatch
from .topology import Topology
from .traffic import Traffic
from .unit import Unit

WORD_BYTES = 8


def checksum(shard: Tensor) -> Tensor:
    """int64 [a few sqrt(n)] of a flat shard of n 8-byte words: equal for equal bits, on a CPU and on a GPU.

    The words lie in a square, whose rows and columns are added up; words that are left over stay as they are. What
    escapes must leave every sum as it was: no change of one element, no exchange of two and no change that is the same
    for all can. Integers, because their sums depend on no order; whole words, because narrower integers would be
    converted into a copy of the shard.
    """
    per_word = WORD_BYTES // shard.element_size()
    if shard.numel() % per_word or shard.storage_offset() % per_word:
        shard = torch.nn.functional.pad(shard, (0, -shard.numel() % per_word))  # into memory of its own
    words = shard.view(torch.int64)
    # Odd: sums wrap around, and an even number of equal changes (such as of the highest bit, a sign) could add up to 0.
    side = max(0, (math.isqrt(words.numel()) - 1) // 2 * 2 + 1)
    square = words[: side * side].view(side, side)
    return torch.cat([square.sum(0), square.sum(1), words[side * side :]])


class Passes:
    """Tells one forward pass of the model from the next, and those that only go on with a gradient accumulation."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self.micro_batch = micro_batch
        self.known: set[Unit] = set()  # units whose parameters were looked at, or gathered, in this pass
        self._accumulation: int | None = None

    def begin(self) -> None:
        """A forward pass begins. Between the micro-batches of one step, in training, nothing is looked at again."""
        self.micro_batch.begin_forward_pass()
        accumulates = torch.is_grad_enabled() and self.micro_batch.is_accumulating
        accumulation = self.micro_batch.accumulations if accumulates else None
        if accumulation is None or accumulation != self._accumulation:
            self.known.clear()
        self._accumulation = accumulation


class UnseenChanges:
    """Finds them for the units of one process group, whose ranks then agree: one rank's change is a change on all.

    The loop that trains pays for checksums alone. A look, with its small all-reduce and the wait for its result, is
    taken only when a forward pass needs parameters of which nothing says that they changed. Whether to look depends on
    what every rank's program does, so that all ranks of the group look together.
    """

    def __init__(self, topology: Topology, passes: Passes, traffic: Traffic) -> None:
        self.topology, self.passes, self.traffic = topology, passes, traffic
        self.units: list[FSDPUnit] = []

    def look_for(self, unit: FSDPUnit) -> None:
        """Mark ``unit``, which is about to be gathered, as changed if it is; in a forward pass the other units too."""
        if unit.parameters_changed() or unit.is_in_backward:
            return
        if not unit.is_in_forward:
            self._look_at([unit])  # ``unshard()`` by hand
        elif unit not in self.passes.known:
            self._look_at([other for other in self.units if other.is_sharded and other not in self.passes.known])

    def gathered(self, unit: FSDPUnit, shard: Tensor) -> None:
        """The shard [L] of ``unit`` goes between nodes."""
        # Like the gather itself this is ordered after whatever wrote the parameters, and before what will write them:
        # FSDP2's streams wait for the program's when a pass begins, and the program's for each gather.
        unit.checksum = checksum(shard)
        self.passes.known.add(unit)

    def _look_at(self, units: Sequence[FSDPUnit]) -> None:
        units = [unit for unit in units if not unit.parameters_changed() and unit.checksum is not None]
        if not units:
            return
        self.passes.known.update(units)
        flags = torch.stack([_has_changed(unit) for unit in units]).int()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.topology.group)
        for unit, changed in zip(units, flags.tolist(), strict=True):
            count_all_reduce(self.traffic, self.topology, flags.itemsize)
            if changed:
                unit.mark_changed()


def _has_changed(unit: FSDPUnit) -> Tensor:
    """Whether the unit's shard is another than that whose checksum it has; on its device."""
    now = checksum(unit.flat_shard())
    assert unit.checksum is not None  # by ``_look_at``
    if now.shape != unit.checksum.shape or now.device != unit.checksum.device:  # the model was cast or moved
        return now.new_ones((), dtype=torch.bool)
    return (now != unit.checksum).any()
