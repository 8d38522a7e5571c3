"""ZeRO++ and LoCo under any FSDP2 model, in three lines.

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    zeropp = apply_zeropp(model, ZeroPPConfig(quantized_weights=True, quantized_gradients=True, hpz_partition_size=8))

and, with gradient accumulation, FSDP2's own ``model.set_is_last_backward(i == last)``, or
``model.set_requires_gradient_sync(i == last)``, before each backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .config import ZeroPPConfig
from .description import describe, note_repeated_gathers, state_prefix, warn, warn_of_lost_state
from .fsdp.find_units import check_units, count_all_reduces, find_units, set_collectives
from .fsdp.fsdp_unit import FSDPUnit, check_collectives, follow_backward, follow_forward_passes, follow_optimizers
from .fsdp.monitor import gather_samples
from .fsdp.shared import Shared, below
from .fsdp.topology import Topology, process_rank
from .fsdp.waits import Waits, is_capturing, new_stream, on_stream
from .gather.all_gather import UnitAllGather
from .gather.changed_weights import agree, send_changes
from .muon.matrix_blocks import MatrixBlocks, MomentumWire, batches
from .recipes import find_config
from .reduce.reduce_scatter import UnitReduceScatter


def apply_zeropp(
    model: nn.Module,
    config: ZeroPPConfig | str,
    pipeline: dist.ProcessGroup | None = None,
    tensor_parallel: dist.ProcessGroup | None = None,
    find_unused_parameters: bool = False,
) -> ZeroPP:
    """Replace the collectives of a ``fully_shard``-ed model by those that ``config`` asks for.

    Call it once, after the last ``fully_shard``, on all ranks: it makes process groups. Parts of ZeRO++
    that are off leave FSDP2's own collectives in place, with their bytes counted. HSDP meshes get nothing else.

    ``config``: settings, or the name of a recipe for the nodes as the ranks run, such as "int8" (recipes.py).
    ``pipeline``: the group of ranks with the model's other stages, each with its own ``ZeroPP``.
    ``tensor_parallel``: the group of ranks with the other parts of the same parameters. Both are for statistics.
    ``find_unused_parameters``: parameters that no rank used in a step get no gradient: docs/reference/library.md.
    Raises ValueError for models without FSDP2 units, ZeRO++ on HSDP meshes, unequal nodes, sizes that do not divide.
    """
    units = find_units(model, config.stated_ranks_per_node if isinstance(config, ZeroPPConfig) else None)
    if isinstance(config, str):
        largest = max((unit.topology for unit in units), key=attrgetter("world_size"))
        config = find_config(config, largest.ranks_per_node)
    for unit in units:
        if config.enabled and unit.replicas is not None:
            raise ValueError(f"{unit.label} is sharded over a two-dimensional (HSDP) mesh; ZeRO++ needs a flat one")
    if find_unused_parameters and not config.quantized_gradients:
        raise ValueError("find_unused_parameters requires quantized_gradients; FSDP2 leaves unused parameters out")
    zeropp = ZeroPP(model, units, config, pipeline, tensor_parallel, find_unused_parameters)
    if zeropp.is_logging_rank:
        warn(config, units, zeropp.device)
    return zeropp


class ZeroPP:
    """ZeRO++'s collectives of one model, as a training loop sees them."""

    def __init__(
        self,
        model: nn.Module,
        units: list[FSDPUnit],
        config: ZeroPPConfig,
        pipeline: dist.ProcessGroup | None,
        tensor_parallel: dist.ProcessGroup | None,
        find_unused_parameters: bool,
    ) -> None:
        (self.device,) = {unit.device for unit in units}  # holds unsharded parameters and LoCo's errors
        self.units, self.config, self.shared = units, config, Shared(config, Waits(self.device))
        self.traffic, self.waits = self.shared.traffic, self.shared.waits
        self._model, self._pipeline, self._tensor_parallel = model, pipeline, tensor_parallel
        self._stream, reads = new_stream(self.device), new_stream(self.device)  # gathers run on the first
        for unit in units:
            of_group = [other for other in units if find_unused_parameters and other.topology is unit.topology]
            unit.all_gather = UnitAllGather(unit, self.shared, self._stream, reads)
            unit.reduce_scatter = UnitReduceScatter(unit, self.shared, of_group)
            set_collectives(unit)
            follow_backward(unit, self.waits)
            count_all_reduces(unit, self.traffic)
        self.shared.position.may_note_gathers = config.enabled and self.is_logging_rank
        follow_optimizers(units, self.shared.position)
        follow_forward_passes(model, units, self._begin_forward_pass)

    @property
    def topologies(self) -> list[Topology]:
        """The process group, nodes and ranks of each unit."""
        return [unit.topology for unit in self.units]

    @property
    def is_logging_rank(self) -> bool:
        """Whether this process logs for the job."""
        process_groups = {*(topology.group for topology in self.topologies), self._pipeline, self._tensor_parallel}
        return all(group is None or group.rank() == 0 for group in process_groups)

    def describe(self) -> str:
        """Describe the nodes and ranks, and how weights and gradients are sent: a line for each group of units."""
        replicas = {unit.replicas.world_size for unit in self.units if unit.replicas is not None}
        more = [f"; in each of {number} replicas, whose gradients are added up" for number in replicas]
        return "".join([describe(self.config, self.units), *more])

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Mark whether the next backward pass is the last of this step; quantized gradients cross nodes only there."""
        for module in self._model.modules():  # FSDP2's root hands its flag on only once a first pass has begun
            if isinstance(module, FSDPModule):
                module.set_is_last_backward(is_last)

    def invalidate(self) -> None:
        """Force the next gather to send all parameters in full. Call it on all ranks.

        Needed after changes within a forward pass, between the micro-batches of one step, and between evaluations
        inside ``resident_weights``. All others are found.
        """
        for unit in self.units:
            unit.module.reshard()  # the root stays gathered after an evaluation
            unit.all_gather.forget_copies()

    @contextmanager
    def swapped_weights(self) -> Iterator[None]:
        """Write other weights inside this context, on all ranks, and restore the weights before it ends."""
        self.invalidate()
        try:
            yield
        finally:
            self.invalidate()

    @contextmanager
    def resident_weights(self) -> Iterator[None]:
        """Keep gathered weights on every rank inside this context, so that passes gather nothing until they change.

        A rank keeps the whole model: the codes that its node sends, or numbers in the gathered dtype where it sends
        these. Changed weights end what is kept, and the next pass gathers once: docs/reference/library.md. Passes
        without gradients that follow another one send nothing at all, so ranks need not run equally many; they raise
        RuntimeError if this rank's shards were written to by means that autograd does not count.
        """
        was_resident = self.shared.position.is_resident
        if not was_resident:
            self._forget_resident()
        self.shared.position.set_resident(True)
        try:
            yield
        finally:
            if not was_resident:
                self.shared.position.set_resident(False)
                self._forget_resident()

    def undo_step(self) -> None:
        """Drop the gradients since the last optimizer step (after an overflow, or an exception).

        Restores LoCo's errors and the scales of elements, and drops what was kept for the step's last micro-batch.
        Without ``LoCoConfig.exact_undo``, errors that these gradients have changed become zero.
        """
        is_unused = self.shared.position.drop_step()
        for unit in self.units:
            unit.reduce_scatter.restore_errors(is_unused)
            unit.drop_gradients()
            unit.has_trained = False

    def rescale_errors(self, factor: float) -> None:
        """Multiply LoCo's errors by ``factor``, by which the loss scale changed after the last backward pass."""
        for unit in self.units:
            unit.reduce_scatter.rescale(factor)

    def set_optimizer_steps(self, steps: int) -> None:
        """Set how many optimizer steps, without skipped ones, the run has taken: a warm-up of bits depends on it."""
        self.shared.position.set_optimizer_steps(steps)

    def monitor_errors(self, every: int | None) -> None:
        """Sample quantization errors every ``every`` optimizer steps; None turns it off."""
        self.shared.position.sample_every = every

    def quantization_errors(self) -> dict[str, float]:
        """Return what all ranks sampled since the last call, by ``STATISTIC/WHAT`` and ``STATISTIC/WHAT/UNIT``.

        Collective. WHAT: ``weights``, ``gradients/intra``, ``gradients/inter``. STATISTIC: ``error``, RMS error / RMS
        value; ``error-state``, RMS of LoCo's error / RMS of the gradients it is added to; ``largest-codes``, the share
        of codes of the outermost levels in blocks that are not zero; ``nonfinite-blocks``, the number of blocks with a
        NaN or Inf.
        """
        return gather_samples(self.units, self._pipeline, self._tensor_parallel)

    def matrix_blocks(self, matrices: Sequence[Tensor], wire: MomentumWire) -> list[tuple[MatrixBlocks, list[Tensor]]]:
        """Split the model's ``matrices`` for ``Muon`` into batches, each with the ranks that share it."""
        topology_of = {id(parameter): unit.topology for unit in self.units for parameter in unit.parameters}
        shared: dict[Topology, list[Tensor]] = {}
        for matrix in matrices:
            if id(matrix) not in topology_of:
                raise ValueError("Muon was given a parameter that is not of the model that apply_zeropp was called on")
            shared.setdefault(topology_of[id(matrix)], []).append(matrix)
        return [
            (MatrixBlocks(topology, self.traffic, wire), batch)
            for topology, members in shared.items()
            for batch in batches(members, topology.ranks_per_node)
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Return what this rank needs for an exact continuation: LoCo's errors, element scales, copies, counters.

        Keys begin with "RANK.", so the states of all ranks merge into one. Keys and shapes are the same from the start,
        for ``torch.distributed.checkpoint``, which loads into what it finds. Training does not change the tensors.
        Call it on all ranks: with ``weight_copies="card"`` what is in flight is gathered within the node.
        """
        kept = {key: value for unit in self.units for key, value in unit.state_dict().items()}
        if kept or self.config.gradient_bits_warmup is not None:  # a run may begin with a warm-up when it resumes
            position = self.shared.position
            kept["optimizer_steps"] = torch.tensor(position.optimizer_steps + position.is_step_complete)
        prefix = state_prefix(self.config, self.units)
        return {prefix + key: value for key, value in kept.items()}

    def ranks_with_state(self) -> set[str]:
        """Return the ranks that keys of ``state_dict`` begin with; builds the state of one unit at most."""
        has_state = self.config.gradient_bits_warmup is not None or any(unit.state_dict() for unit in self.units)
        return {str(process_rank())} if has_state else set()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load state saved by the same ranks of the same layout. Collective.

        State of another model, layout or config is ignored with a warning, on all ranks if one finds none of its own:
        then LoCo's errors begin at zero and weights are gathered in full.
        """
        kept = below(state, state_prefix(self.config, self.units))
        has_state = torch.tensor(int(bool(kept)), device=self.device)
        # Reduce over the largest group last, so that all ranks agree.
        for topology in sorted(dict.fromkeys(self.topologies), key=attrgetter("world_size")):
            dist.all_reduce(has_state, op=dist.ReduceOp.MIN, group=topology.group)
        if not has_state:  # one rank alone would send other bytes than the rest expect
            kept = {}
            if self.is_logging_rank and self.ranks_with_state():  # the others receive in ``invalidate``, in this order
                warn_of_lost_state()
        self.invalidate()
        if "optimizer_steps" in kept:
            self.set_optimizer_steps(int(kept["optimizer_steps"]))
        for unit in self.units:
            unit.load_state_dict(kept)
        if any(key.endswith("/is_current") for key in kept):  # weights may have changed on one rank alone
            flags = {unit: torch.tensor(unit.has_trained, device=self.device) for unit in self.units}
            changed = agree(flags, self.shared)
            for unit in self.units:
                unit.has_trained = unit in changed

    def _forget_resident(self) -> None:
        for unit in self.units:
            unit.all_gather.resident = None

    def _begin_forward_pass(self, is_last: bool) -> None:
        position, versions = self.shared.position, 0
        if not position.has_begun:
            check_units(self._model, self.units)
        for unit in self.units:
            check_collectives(unit)
        if torch.is_grad_enabled():
            position.set_is_last(is_last)
        elif position.is_resident:
            versions = sum(parameter._version for unit in self.units for parameter in unit.parameters)
        begins = position.begin_forward_pass(versions)
        # A further micro-batch of the second step: by now the optimizer's state and one micro-batch had their memory.
        if position.may_note_gathers and not begins and position.optimizer_steps > 0:
            position.may_note_gathers = False
            note_repeated_gathers(self.units)
        if begins and not is_capturing(self.device):  # a gather will refuse it
            with on_stream(self._stream, self.device):
                send_changes(self.units, self.shared)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
