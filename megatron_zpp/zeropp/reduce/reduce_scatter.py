"""The gradient reduce-scatter of ZeRO++ (qgZ), which crosses nodes once per optimizer step, with LoCo.

FSDP2 hands over the flat gradients [N, P, L] of one unit, rank by rank, and wants this rank's reduced shard [L].
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..fsdp.collectives import count_all_reduce
from ..fsdp.formats import Formats, UnitPart
from ..fsdp.fsdp_unit import FSDPUnit, GradientReduction, backward_pass, call_after_backward, complete_gradients
from ..fsdp.shared import Shared, Traffic
from ..fsdp.topology import Topology
from ..fsdp.waits import current_stream, on_stream, refuse_capture
from ..wire.format import GradientSum, WireFormat
from ..wire.quantization import mix_seed
from .loco import GradientHop, NodeSum, make_hop

logger = logging.getLogger(__name__)


class HierarchicalReduceScatter(GradientReduction):
    """qgZ (ZeRO++ section 3.3) in two hops, both accumulated in fp32.

    Each micro-batch, an all-to-all within the node adds up the node's gradients for the N shards of this local rank p,
    [N, L]. They stay here until the last micro-batch of the optimizer step, when an all-to-all between the nodes adds
    them up to [L]; earlier micro-batches return zeros, which FSDP2 adds to ``.grad``.

    The last one returns zeros too: its gradients are in flight between nodes while the backward pass goes on, and are
    added to ``.grad`` in fp32 when it is over, before ``backward()`` returns. Where they are needed before that, as by
    an optimizer in the backward pass, FSDP2 gets them at once, in its ``reduce_dtype``.
    """

    def __init__(self, unit: FSDPUnit, shared: Shared, unused_parameters: UnusedParameters | None = None) -> None:
        self.unit, self.shared, self.unused_parameters = unit, shared, unused_parameters
        config, num_nodes, ranks_per_node = shared.config, unit.topology.num_nodes, unit.topology.ranks_per_node
        self.formats = Formats(config, num_nodes)
        # On one rank nothing is rounded.
        kept_as = config if unit.topology.world_size > 1 else replace(config, gradient_sum_dtype="fp32")
        self.node_sum = NodeSum(unit, Formats(kept_as, num_nodes))
        within = make_hop("intra", (ranks_per_node, num_nodes), unit, shared) if ranks_per_node > 1 else None
        between = make_hop("inter", (num_nodes,), unit, shared) if num_nodes > 1 else None
        self.within_node, self.between_nodes = within, between
        self.hops = [hop for hop in (within, between) if hop is not None]
        self.steps = 0  # reductions between nodes
        self.micro_batches = 0  # micro-batches of this step in the kept sum
        # Indices of the parameters whose gradients the last reduction, or the one that runs, takes.
        self._reduced: tuple[int, ...] = ()
        self._begun_at = -1  # optimizer steps when this step's first micro-batch came
        self._last_reduction: tuple[int, int] | None = None  # its backward pass, and optimizer steps until then

    def before_reduction(self) -> None:
        """Note which parameters a backward pass used, and which FSDP2 is about to reduce."""
        used, self._reduced = complete_gradients(self.unit, self._reduced if self.unit.holds_gradients else ())
        if self.unused_parameters is not None:
            self.unused_parameters.note_use(self.unit, used)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        refuse_capture(self.unit.device, self.unit.label)
        topology, position, dtype = self.unit.topology, self.shared.position, input_tensor.dtype
        position.set_is_last(self.unit.is_last_backward)
        position.mark_reduced()
        part, draw = self.unit.part(self._reduced), (self.steps, self.micro_batches)
        self._begin_step_if_first()
        self.node_sum.set_part(part)
        gradients = input_tensor.view(topology.num_nodes, topology.ranks_per_node, output_tensor.numel())
        # Sums of rotated gradients are rotated sums: rotate once before both hops and back once after them.
        rotation = self.formats.rotation(part, dtype)
        if rotation is not None:
            gradients = rotation.rotate(gradients)
        pieces = GradientSum(gradients.transpose(0, 1))  # [P, N, L]: one for each rank of the node
        format, timer = self.formats.gradients_within_node(part, dtype), self._timer(crosses_nodes=False)
        node_sum = start_exchange(pieces, self.within_node, format, draw, topology.reduce_group, timer).wait()  # [N, L]
        if not position.is_last:
            self._keep(node_sum)
            output_tensor.zero_()
            return None
        format = self.formats.gradients_between_nodes(part, dtype, position.optimizer_steps)
        total = self.node_sum.plus(node_sum)
        in_flight = start_exchange(total, self.between_nodes, format, draw, topology.inter_group)
        self._drop_kept()  # it has now been sent
        self.steps += 1
        finish = partial(self._total, in_flight, format, rotation, op)
        if self.unit.is_read_in_backward:
            output_tensor.copy_(finish())
        else:
            divisor = self.unit.divisor_after_reduction(output_tensor.dtype, group)
            output_tensor.zero_()
            self.unit.holds_gradients = True
            # FSDP2's stream for reductions. The buffers are allocated there before the collective, written by it on the
            # process group's stream, and read and freed there after ``Work.wait``; FSDP2 writes ``.grad`` there before.
            # So the allocator and every access follow one stream's order, and the program's stream waits for it.
            stream = current_stream(self.unit.device)
            # If the backward pass fails, nothing else holds what is in flight.
            call_after_backward(partial(self._finish, finish, part, divisor, stream))
        self.unit.has_trained = True
        return None

    def _begin_step_if_first(self) -> None:
        continues = self._continues()
        if self.node_sum.kept is None:
            if not continues:
                self._begun_at = self.shared.position.optimizer_steps
            for hop in self.hops:
                hop.begin_step(continues)

    def _timer(self, crosses_nodes: bool) -> AbstractContextManager[None]:
        return self.shared.waits.collective("reduce", self.unit.label, crosses_nodes=crosses_nodes)

    def _keep(self, arrived: GradientSum) -> None:
        """Keep the node's sum [N, L] of this micro-batch for the step's last one."""
        noise_seed, config = None, self.shared.config
        if config.gradient_sum_dtype != "fp32":
            draw = (self.unit.name, self.unit.topology.rank, self.steps, self.micro_batches)
            noise_seed = mix_seed(config.seed, "sums", *draw)
        self.node_sum.add(arrived, noise_seed)
        self.unit.holds_gradients = True
        self.micro_batches += 1

    def _drop_kept(self) -> None:
        self.node_sum.drop()
        self.unit.holds_gradients, self.micro_batches = False, 0

    def _total(self, in_flight: Exchange, format: WireFormat, rotation: WireFormat | None, op: Any) -> Tensor:
        """Return the sum [L] over all ranks and micro-batches, in fp32, rotated back and scaled as FSDP2 asks."""
        with self._timer(crosses_nodes=True):
            arrived = in_flight.wait()
        total = arrived.compute()
        if self.between_nodes is not None and in_flight.sent is not None:
            self.between_nodes.update_scales(format, in_flight.sent, arrived)
        return scaled_as(op, total if rotation is None else rotation.rotate(total), self.unit.topology.group.size())

    @torch.no_grad()
    def _finish(
        self, finish: Callable[[], Tensor], part: UnitPart, divisor: float | None, stream: torch.Stream
    ) -> None:
        """Wait, and add the total, divided by ``divisor``, to the gradients of ``part``."""
        with self.shared.waits.stall(), on_stream(stream, self.unit.device):
            total = finish()
            self.unit.add_gradient(part, total if divisor is None else total.div_(divisor))
        self.unit.holds_gradients = False
        if self.unused_parameters is not None:
            self.unused_parameters.after_reduction()

    def _continues(self) -> bool:
        """Return whether gradients crossed nodes since the last optimizer step; warn once if in another pass."""
        if not self.shared.position.is_last:
            return False
        now = backward_pass(), self.shared.position.optimizer_steps
        before, self._last_reduction = self._last_reduction, now
        if before is None or before[1] != now[1]:
            return False
        is_same_pass = before[0] == now[0]
        accumulates = not is_same_pass and any(p.grad is not None for p in self.unit.parameters)
        if accumulates and self.node_sum.kept is None:
            warn_of_accumulation()
        return self.shared.position.sees_steps and (is_same_pass or accumulates)  # else some may have stepped unseen

    def undo_step(self, is_unused: bool) -> None:
        self._drop_kept()
        if is_unused and self._begun_at == self.shared.position.optimizer_steps:
            for hop in self.hops:
                hop.undo_step()

    def rescale_errors(self, factor: float) -> None:
        for hop in self.hops:
            if hop.feedback is not None:
                hop.feedback.rescale(factor)

    def state_dict(self) -> dict[str, Tensor]:
        state = {key: value for hop in self.hops for key, value in hop.state_dict().items()}
        config = self.shared.config
        if config.gradient_rounding == "stochastic" or config.gradient_sum_dtype != "fp32":
            state["steps"] = torch.tensor(self.steps)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._drop_kept()
        self._begun_at = -1
        if "steps" in state:
            self.steps = int(state["steps"])
        for hop in self.hops:
            hop.load_state_dict(state)


class UnusedParameters:
    """Leaves parameters that no rank used in a step without a gradient, as plain training does.

    For the units of one process group: one all-reduce of a byte per parameter, when a step's last backward pass is
    over, as in DistributedDataParallel. A rank that used all of its parameters does not read the result.
    """

    def __init__(self, topology: Topology, units: Sequence[FSDPUnit], traffic: Traffic) -> None:
        self.topology, self.units, self.traffic = topology, units, traffic
        self._drops_in = -1  # the backward pass at whose end unused parameters lose their gradient
        # In this step so far, by unit and index: parameters that got a gradient, and those that had none when it began.
        self._used: dict[FSDPUnit, set[int]] = {}
        self._without_gradient: dict[FSDPUnit, set[int]] = {}

    def note_use(self, unit: FSDPUnit, used: set[int]) -> None:
        """Note which of the unit's parameters, by index, a backward pass used, before it is reduced."""
        if unit not in self._used:
            self._used[unit] = set()
            self._without_gradient[unit] = {i for i, p in enumerate(unit.parameters) if p.grad is None}
        self._used[unit] |= used

    def forget_use(self) -> None:
        """Begin another step."""
        self._used, self._without_gradient = {}, {}

    def after_reduction(self) -> None:
        """Note that a unit's last gradients of a step are in ``.grad``. All units' have left before the first ones."""
        if self._drops_in != backward_pass():
            self._drops_in = backward_pass()
            call_after_backward(self._drop_unused)  # when the others, which were queued before, have arrived

    def _drop_unused(self) -> None:
        used = [used for unit in self.units for used in self._use(unit)]
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
        self.forget_use()

    def _use(self, unit: FSDPUnit) -> list[bool]:
        """Return whether this step used each parameter; True for those with no gradient, or with an older one."""
        unused = self._without_gradient.get(unit, set()) - self._used.get(unit, set())
        return [i not in unused or parameter.grad is None for i, parameter in enumerate(unit.parameters)]


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

    total: GradientSum  # sum of the pieces that were sent here; valid after ``work``
    work: dist.Work | None  # None: it is not in flight
    sent: Tensor | None  # uint8 [G, ..., nbytes], which is read until then

    def wait(self) -> GradientSum:
        if self.work is not None:
            self.work.wait()
        return self.total


def start_exchange(
    gradients: GradientSum,
    hop: GradientHop | None,
    format: WireFormat,
    draw: tuple[int, int],
    group: dist.ProcessGroup,
    timer: AbstractContextManager[None] | None = None,
) -> Exchange:
    """Send a piece of gradients [G, ..., L] to each rank of the hop's group; they add up to [..., L].

    hop: None where there is one rank. draw: the unit's reductions and micro-batches so far, which tell one noise from
    another. timer: times the exchange, which then runs on the current stream. None: it is in flight until
    ``Exchange.wait``.
    """
    if hop is None:
        return Exchange(gradients.only_piece(), None, None)
    wires = hop.encode_pieces(gradients, format, draw)
    received = torch.empty_like(wires)
    with timer or nullcontext():
        work = dist.all_to_all_single(received, wires, group=group, async_op=timer is None)
    return Exchange(hop.sum_of(received, format), work, wires)


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
