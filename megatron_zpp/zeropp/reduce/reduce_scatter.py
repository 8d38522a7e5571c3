"""The gradient reduce-scatter of ZeRO++ (qgZ), which crosses nodes once per optimizer step, with LoCo.

FSDP2 hands over the flat gradients [N, P, L] of one unit, rank by rank, and wants this rank's reduced shard [L].
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..fsdp.collectives import count_all_reduce
from ..fsdp.fsdp_unit import DefaultAllocMixin, FSDPUnit, ReduceScatter, backward_pass, call_after_backward
from ..fsdp.shared import Shared, Traffic
from ..fsdp.topology import Topology
from ..fsdp.unit import UnitPart
from ..fsdp.waits import current_stream, on_stream, refuse_capture
from .gradient_hops import GradientHop, GradientHops
from .gradient_sum import GradientSum

logger = logging.getLogger(__name__)


class HierarchicalReduceScatter(DefaultAllocMixin, ReduceScatter):
    """qgZ (ZeRO++ section 3.3) in two hops, both accumulated in fp32.

    Each micro-batch, an all-to-all within the node adds up the node's gradients for the N shards of this local rank p,
    [N, L]. They stay here until the last micro-batch of the optimizer step, when an all-to-all between the nodes adds
    them up to [L]; earlier micro-batches return zeros, which FSDP2 adds to ``.grad``.

    The last one returns zeros too: its gradients are in flight between nodes while the backward pass goes on, and are
    added to ``.grad`` in fp32 when it is over, before ``backward()`` returns. Where they are needed before that, as by
    an optimizer in the backward pass, FSDP2 gets them at once, in its ``reduce_dtype``.
    """

    def __init__(self, unit: FSDPUnit, shared: Shared, unused_parameters: UnusedParameters | None = None) -> None:
        self.unit, self.position, self.unused_parameters = unit, shared.position, unused_parameters
        self._last_reduction: tuple[int, int] | None = None  # its backward pass, and optimizer steps until then
        self.hops = GradientHops(unit, unit.topology, shared)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        refuse_capture(self.unit)
        topology, hops = self.unit.topology, self.hops
        self.position.begin(self.unit.is_last_backward)
        self.position.reduced()
        continues = self._continues()
        part = self.unit.part(self.unit.reduced)
        gradients = hops.begin(
            part, input_tensor.view(topology.num_nodes, topology.ranks_per_node, output_tensor.numel()), continues
        )
        timer = self.unit.waits.collective("reduce", self.unit, crosses_nodes=False)
        node_sum = start_exchange(gradients, hops.within_node, topology.reduce_group, timer).wait()  # [N, L]
        if not self.position.is_last:
            hops.keep(node_sum)
            output_tensor.zero_()
            return None
        in_flight = start_exchange(hops.with_kept(node_sum), hops.between_nodes, topology.inter_group)
        hops.sent()
        if self.unit.is_read_in_backward:
            output_tensor.copy_(self._total(in_flight, op))
        else:
            divisor = self.unit.divisor_after_reduction(output_tensor.dtype, group)
            output_tensor.zero_()
            self.unit.holds_gradients = True
            # FSDP2's stream for reductions. The buffers are allocated there before the collective, written by it on the
            # process group's stream, and read and freed there after ``Work.wait``; FSDP2 writes ``.grad`` there before.
            # So the allocator and every access follow one stream's order, and the program's stream waits for it.
            stream = current_stream(self.unit.device)
            # If the backward pass fails, nothing else holds what is in flight.
            call_after_backward(lambda: self._finish(in_flight, part, op, divisor, stream))
        self.unit.mark_reduced(part.indices)
        return None

    def _total(self, in_flight: Exchange, op: Any) -> Tensor:
        """Return the sum over all ranks and micro-batches fp32 [L], scaled as FSDP2 asks."""
        with self.unit.waits.collective("reduce", self.unit, crosses_nodes=True):
            arrived = in_flight.wait()
        return scaled_as(op, self.hops.finish(arrived, in_flight.sent), self.unit.topology.group.size())

    @torch.no_grad()
    def _finish(
        self, in_flight: Exchange, part: UnitPart, op: Any, divisor: float | None, stream: torch.Stream
    ) -> None:
        """Wait, and add the total, divided by ``divisor``, to the gradients of ``part``."""
        with self.unit.waits.stall(), on_stream(stream, self.unit.device):
            total = self._total(in_flight, op)
            self.unit.add_gradient(part, total if divisor is None else total.div_(divisor))
        self.unit.holds_gradients = False
        if self.unused_parameters is not None:
            self.unused_parameters.arrived()

    def _continues(self) -> bool:
        """Return whether gradients crossed nodes since the last optimizer step; warn once if in another pass."""
        if not self.position.is_last:
            return False
        now = backward_pass(), self.unit.optimizer_steps
        before, self._last_reduction = self._last_reduction, now
        if before is None or before[1] != now[1]:
            return False
        has_hooks = now[1] > 0  # else optimizers may have stepped unseen
        is_same_pass = before[0] == now[0]
        accumulates = not is_same_pass and any(p.grad is not None for p in self.unit.parameters)
        if accumulates and self.hops.node_sum.kept is None:
            warn_of_accumulation()
        return has_hooks and (is_same_pass or accumulates)


class UnusedParameters:
    """Leaves parameters that no rank used in a step without a gradient, as plain training does.

    For the units of one process group: one all-reduce of a byte per parameter, when a step's last backward pass is
    over, as in DistributedDataParallel. A rank that used all of its parameters does not read the result.
    """

    def __init__(self, topology: Topology, units: Sequence[FSDPUnit], traffic: Traffic) -> None:
        self.topology, self.units, self.traffic = topology, units, traffic
        self._drops_in = -1  # the backward pass at whose end unused parameters lose their gradient

    def arrived(self) -> None:
        """Note that a unit's last gradients of a step are in ``.grad``. All units' have left before the first ones."""
        if self._drops_in != backward_pass():
            self._drops_in = backward_pass()
            call_after_backward(self._drop_unused)  # when the others, which were queued before, have arrived

    def _drop_unused(self) -> None:
        used = [used for unit in self.units for used in unit.use()]
        flags = torch.ones(len(used), dtype=torch.uint8, device=self.units[0].device)
        if not all(used):  # only this rank's host waits: for the copy, and below for the result
            flags.copy_(torch.tensor(used))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.topology.group)
        count_all_reduce(self.traffic, self.topology, flags.nbytes)
        if not all(used):
            parameters = (parameter for unit in self.units for parameter in unit.parameters)
            for parameter, used_by_any_rank in zip(parameters, flags.tolist(), strict=True):
                if not used_by_any_rank:
                    parameter.grad = None
        for unit in self.units:
            unit.forget_use()


@functools.cache  # once
def warn_of_accumulation() -> None:
    logger.warning(
        "gradients of several backward passes were added up, and crossed nodes after each: call "
        "model.set_is_last_backward(False) or set_requires_gradient_sync(False) before all of a step's backward passes "
        "but the last, and they cross once"
    )


@dataclass(frozen=True)
class Exchange:
    """Gradients of a hop in flight: a piece from each rank of its group to each."""

    total: GradientSum  # of the pieces that were sent here; valid after ``work``
    work: dist.Work | None  # None: it is not in flight
    sent: Tensor | None  # uint8 [G, ..., nbytes], which is read until then

    def wait(self) -> GradientSum:
        if self.work is not None:
            self.work.wait()
        return self.total


def start_exchange(
    gradients: GradientSum,
    hop: GradientHop | None,
    group: dist.ProcessGroup,
    timer: AbstractContextManager[None] | None = None,
) -> Exchange:
    """Send a piece of gradients [G, ..., L] to each rank of the hop's group; they add up to [..., L].

    timer: times the exchange, which then runs on the current stream. None: it is in flight until ``Exchange.wait``.
    """
    if hop is None:
        return Exchange(gradients.only_piece(), None, None)
    wires = hop.encode(gradients)
    received = torch.empty_like(wires)
    with timer or nullcontext():
        work = dist.all_to_all_single(received, wires, group=group, async_op=timer is None)
    return Exchange(hop.sum_of(received), work, wires)


def scaled_as(op: Any, total: Tensor, world_size: int) -> Tensor:
    """Scale the sum over all ranks as FSDP2's reduce operation asks: AVG, SUM or PREMUL_SUM."""
    if op == dist.ReduceOp.AVG:
        return total / total.new_full((), world_size)  # by a tensor: see quantize_blocks
    if op == dist.ReduceOp.SUM:
        return total
    kind, factor = op.__getstate__()  # the only way to read a PREMUL_SUM's factor
    if kind != dist.ReduceOp.PREMUL_SUM:
        raise ValueError(f"gradients cannot be reduced by {op}; ZeRO++ supports AVG, SUM and PREMUL_SUM")
    return total * factor
