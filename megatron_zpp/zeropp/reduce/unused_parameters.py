"""Parameters that no rank used in a step are left without a gradient, as plain training leaves them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..fsdp.collectives import count_all_reduce
from ..fsdp.fsdp_unit import FSDPUnit, backward_pass
from ..fsdp.topology import Topology
from ..fsdp.traffic import Traffic


class UnusedParameters:
    """Finds them for the units of one process group: one all-reduce of a byte per parameter, when a step's last
    backward pass is over, as in DistributedDataParallel. A rank that used all of its parameters reads no result.
    """

    def __init__(self, topology: Topology, units: Sequence[FSDPUnit], traffic: Traffic) -> None:
        self.topology, self.units, self.traffic = topology, units, traffic
        self._in_flight: list[FSDPUnit] = []  # whose last gradients of this step are on their way
        self._backward_pass = -1

    def sent(self, unit: FSDPUnit) -> None:
        """The unit's last gradients of a step are on their way; all units' are before the first ``arrived``."""
        if backward_pass() != self._backward_pass:  # the one before may have failed
            self._in_flight, self._backward_pass = [], backward_pass()
        self._in_flight.append(unit)

    def arrived(self, unit: FSDPUnit) -> None:
        """They have arrived, and are in ``.grad``. After the last unit's, what no rank used loses its gradient."""
        self._in_flight.remove(unit)
        if not self._in_flight:
            self._drop_unused()

    def _drop_unused(self) -> None:
        used = [used for unit in self.units for used in unit.use()]
        flags = torch.tensor(used, dtype=torch.uint8, device=self.units[0].device)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.topology.group, async_op=True)
        count_all_reduce(self.traffic, self.topology, flags.nbytes)
        assert work is not None
        work.wait()
        if not all(used):
            by_any_rank = iter(flags.tolist())
            for unit in self.units:
                unit.drop_gradients([index for index, _ in enumerate(unit.use()) if not next(by_any_rank)])
        for unit in self.units:
            unit.forget_use()
