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

from ..fsdp.collectives import count_all_reduce, count_reduce_scatter, reduce_scatter
from ..fsdp.formats import Formats, UnitPart
from ..fsdp.fsdp_unit import FSDPUnit, UnitCollective, backward_pass, call_after_backward, complete_gradients
from ..fsdp.shared import Shared, Traffic
from ..fsdp.waits import current_stream, on_stream, refuse_capture
from ..wire.format import GradientSum, WireFormat
from ..wire.quantization import mix_seed
from ..wire.scales import ElementScales
from .loco import ErrorFeedback, GradientHop, NodeSum

logger = logging.getLogger(__name__)


class UnitReduceScatter(UnitCollective):
    """The reduce-scatter of one unit's gradients, and what it keeps: FSDP2's own, or qgZ (ZeRO++ section 3.3).

    qgZ has two hops, both accumulated in fp32. Each micro-batch, an all-to-all within the node adds up the node's
    gradients for the N shards of this local rank p, [N, L]. They stay here until the last micro-batch of the optimizer
    step, when an all-to-all between the nodes adds them up to [L]; earlier micro-batches return zeros, which FSDP2 adds
    to ``.grad``.

    The last one returns zeros too: its gradients are in flight between nodes while the backward pass goes on, and are
    added to ``.grad`` in fp32 when it is over, before ``backward()`` returns. Where they are needed before that, as by
    an optimizer in the backward pass, FSDP2 gets them at once, in its ``reduce_dtype``. LoCo corrects the hop between
    nodes, or with ``hops="both"`` each hop (loco.py).
    """

    def __init__(self, unit: FSDPUnit, shared: Shared, find_unused_in: Sequence[FSDPUnit] = ()) -> None:
        """find_unused_in: this process group's units, whose unused parameters get no gradient; () gives them zeros."""
        self.unit, self.shared, self.find_unused_in = unit, shared, find_unused_in
        config, num_nodes, ranks_per_node = shared.config, unit.topology.num_nodes, unit.topology.ranks_per_node
        self.is_plain = not config.quantized_gradients
        self.formats = Formats(config, num_nodes)
        # On one rank nothing is rounded.
        kept_as = config if unit.topology.world_size > 1 else replace(config, gradient_sum_dtype="fp32")
        self.node_sum = NodeSum(unit, Formats(kept_as, num_nodes), unit.whole)
        self.hops, loco = dict[str, GradientHop](), config.loco
        if ranks_per_node > 1 and not self.is_plain:
            feedback = ErrorFeedback(loco) if loco is not None and loco.hops == "both" else None
            self.hops["intra"] = GradientHop("intra", (ranks_per_node, num_nodes), unit, shared, feedback, None)
        if num_nodes > 1 and not self.is_plain:
            feedback = ErrorFeedback(loco) if loco is not None else None
            scales = ElementScales() if config.gradient_element_scales else None
            self.hops["inter"] = GradientHop("inter", (num_nodes,), unit, shared, feedback, scales)
        self._before_step = self.hops
        self.steps = 0  # reductions between nodes
        # Indices of the parameters whose gradients the last reduction, or the one that runs, takes.
        self._reduced: tuple[int, ...] = ()
        self._begun_at = -1  # optimizer steps when this step's first micro-batch came
        self._last_reduction: tuple[int, int] | None = None  # its backward pass, and optimizer steps until then
        # Indices of the parameters that had no gradient when the step began, and of those that it has used since.
        self._without_gradient: set[int] | None = None
        self._used = set[int]()

    def before_reduction(self) -> None:
        """Complete the gradients that FSDP2 is about to reduce, and note which of them a backward pass made."""
        if self.is_plain:
            return
        used, self._reduced = complete_gradients(self.unit, self._reduced if self.unit.holds_gradients else ())
        if self.find_unused_in:
            if self._without_gradient is None:
                self._without_gradient = {i for i, p in enumerate(self.unit.parameters) if p.grad is None}
            self._used |= used

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        topology, position, dtype = self.unit.topology, self.shared.position, input_tensor.dtype
        # A loop may mark the last micro-batch between the forward and the backward pass, or never.
        position.mark_reduced(self.unit.is_last_backward)
        if self.is_plain:
            count_reduce_scatter(self.shared.traffic, topology, output_tensor)
            with self._timer(crosses_nodes=topology.num_nodes > 1):
                return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        refuse_capture(self.unit.device, self.unit.label)
        part = self.unit.part(self._reduced)
        self._begin_step_if_first()
        self.node_sum = self.node_sum.for_part(part)
        gradients = input_tensor.view(topology.num_nodes, topology.ranks_per_node, output_tensor.numel())
        # Sums of rotated gradients are rotated sums: rotate once before both hops and back once after them.
        rotation = self.formats.rotation(part, dtype)
        if rotation is not None:
            gradients = rotation.rotate(gradients)
        pieces = GradientSum(gradients.transpose(0, 1))  # [P, N, L]: one for each rank of the node
        format, timer = self.formats.gradients_within_node(part, dtype), self._timer(crosses_nodes=False)
        arrived = self._send("intra", pieces, format, topology.reduce_group, timer).wait()  # [N, L]
        if not position.is_last:
            noise_seed, config = None, self.shared.config
            if config.gradient_sum_dtype != "fp32":
                draw = (self.unit.name, topology.rank, self.steps, self.node_sum.micro_batches)
                noise_seed = mix_seed(config.seed, "sums", *draw)
            self.node_sum = self.node_sum.with_added(arrived, noise_seed)
            self.unit.holds_gradients = True
            output_tensor.zero_()
            return None
        format = self.formats.gradients_between_nodes(part, dtype, position.optimizer_steps)
        in_flight = self._send("inter", self.node_sum.plus(arrived), format, topology.inter_group)
        self._drop_kept()  # it has now been sent
        self.steps += 1
        finish = partial(self._total, in_flight, format, rotation, op)
        if self.unit.is_read_in_backward:
            output_tensor.copy_(finish())
        else:
            divisor = self.unit.divisor_after_reduction(output_tensor.dtype, group)
            output_tensor.zero_()
            self.unit.holds_gradients = True
            # FSDP2's stream for reductions, on which it writes ``.grad``. The buffers are allocated there before the
            # collective, and read and freed there after ``Work.wait``; the program's stream waits for it.
            stream = current_stream(self.unit.device)
            # If the backward pass fails, nothing else holds what is in flight.
            call_after_backward(partial(self._finish, finish, part, divisor, stream))
        self.unit.has_trained = True
        return None

    def _begin_step_if_first(self) -> None:
        """Keep the hops to which an undone step goes back. Warn once if a step's gradients cross nodes again."""
        position, continues = self.shared.position, False
        if position.is_last:
            now = backward_pass(), position.optimizer_steps
            before, self._last_reduction = self._last_reduction, now
            if before is not None and before[1] == now[1]:
                is_same_pass = before[0] == now[0]
                accumulates = not is_same_pass and any(p.grad is not None for p in self.unit.parameters)
                if accumulates and self.node_sum.kept is None:
                    warn_of_accumulation()
                continues = position.sees_steps and (is_same_pass or accumulates)  # else some may have stepped unseen
        if self.node_sum.kept is None:
            if not continues:
                self._begun_at = position.optimizer_steps
            self.hops = {n: replace(hop, scales=hop.scales and hop.scales.moved()) for n, hop in self.hops.items()}
            # Where more gradients follow within a step, LoCo's error before the first ones is the one to go back to.
            kept = self._before_step if continues else self.hops
            self._before_step = {n: replace(hop, feedback=kept[n].feedback) for n, hop in self.hops.items()}

    def _send(
        self,
        name: str,
        gradients: GradientSum,
        format: WireFormat,
        group: dist.ProcessGroup,
        timer: AbstractContextManager[None] | None = None,
    ) -> Exchange:
        hop, draw = self.hops.get(name), (self.steps, self.node_sum.micro_batches)
        exchange = start_exchange(gradients, hop, format, draw, group, timer)
        if exchange.hop is not None:
            self.hops = self.hops | {name: exchange.hop}
            # Without a second copy, an undone step leaves no error at all. The changed one would be worse than none:
            # gradients of a step that overflowed can be as large as numbers go.
            if (loco := self.shared.config.loco) is not None and not loco.exact_undo and exchange.hop.feedback:
                before = replace(self._before_step[name], feedback=ErrorFeedback(loco))
                self._before_step = self._before_step | {name: before}
        return exchange

    def _timer(self, crosses_nodes: bool) -> AbstractContextManager[None]:
        return self.shared.waits.collective("reduce", self.unit.label, crosses_nodes=crosses_nodes)

    def _drop_kept(self) -> None:
        self.node_sum = replace(self.node_sum, kept=None, micro_batches=0)
        self.unit.holds_gradients = False

    def _total(self, in_flight: Exchange, format: WireFormat, rotation: WireFormat | None, op: Any) -> Tensor:
        """Return the sum [L] over all ranks and micro-batches, in fp32, rotated back and scaled as FSDP2 asks."""
        with self._timer(crosses_nodes=True):
            arrived = in_flight.wait()
        total = arrived.compute()
        if (hop := self.hops.get("inter")) is not None and hop.scales is not None:
            assert in_flight.sent is not None
            scales = hop.scales.observed(format, in_flight.sent, arrived.parts)
            self.hops = self.hops | {"inter": replace(hop, scales=scales)}
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
        # All units' gradients have left before the first ones arrive. A unit's second reduction may still be queued.
        if self.find_unused_in and not any(unit.holds_gradients for unit in self.find_unused_in):
            call_after_backward(partial(drop_unused, self.find_unused_in, self.shared.traffic))

    def restore_errors(self, is_unused: bool) -> None:
        """Drop the step's gradients. If no optimizer has used them, go back to the hops before the step."""
        self._drop_kept()
        self.forget_use()
        if is_unused and self._begun_at == self.shared.position.optimizer_steps:
            self.hops = self._before_step

    def rescale(self, factor: float) -> None:
        self.hops = {name: hop.rescaled(factor) for name, hop in self.hops.items()}
        self._before_step = {name: hop.rescaled(factor) for name, hop in self._before_step.items()}

    def uses(self) -> list[bool]:
        """Return whether this step used each parameter; True for those with no gradient, or with an older one."""
        unused = (self._without_gradient or set()) - self._used
        return [i not in unused or parameter.grad is None for i, parameter in enumerate(self.unit.parameters)]

    def forget_use(self) -> None:
        """Begin another step of ``uses``."""
        self._without_gradient, self._used = None, set()

    def errors_to_save(self) -> dict[str, Tensor]:
        state = {key: value for hop in self.hops.values() for key, value in hop.state_dict().items()}
        config = self.shared.config
        if not self.is_plain and (config.gradient_rounding == "stochastic" or config.gradient_sum_dtype != "fp32"):
            state["steps"] = torch.tensor(self.steps)
        return state

    def load_errors(self, state: dict[str, Tensor]) -> None:
        self._drop_kept()
        self._begun_at = -1
        self.steps = int(state.get("steps", self.steps))
        self.hops = self._before_step = {name: hop.loaded(state) for name, hop in self.hops.items()}


def drop_unused(units: Sequence[FSDPUnit], traffic: Traffic) -> None:
    """Leave parameters that no rank used in a step without a gradient, as plain training does.

    For the units of one process group: one all-reduce of a byte per parameter, when a step's last backward pass is
    over, as in DistributedDataParallel. A rank that used all of its parameters does not read the result.
    """
    reductions = [unit.reduce_scatter for unit in units]
    used = [used for reduction in reductions for used in reduction.uses()]
    flags = torch.ones(len(used), dtype=torch.uint8, device=units[0].device)
    if not all(used):  # only this rank's host waits: for the copy, and below for the result
        flags.copy_(torch.tensor(used))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=units[0].topology.group)
    count_all_reduce(traffic, units[0].topology, flags.nbytes)
    if not all(used):
        parameters = (parameter for unit in units for parameter in unit.parameters)
        for parameter, used_by_any_rank in zip(parameters, flags.tolist(), strict=True):
            if not used_by_any_rank:
                parameter.grad = None
    for reduction in reductions:
        reduction.forget_use()


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
    hop: GradientHop | None  # after it

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
        return Exchange(gradients.only_piece(), None, None, None)
    wires, hop = hop.encode_pieces(gradients, format, draw)
    received = torch.empty_like(wires)
    with timer or nullcontext():
        work = dist.all_to_all_single(received, wires, group=group, async_op=timer is None)
    exponents = hop.scales.received if hop.scales is not None else None
    return Exchange(GradientSum(received, format, exponents=exponents), work, wires, hop)


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
