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
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import ZeroPPConfig, check_finds_unused
from .description import warn
from .fsdp.collectives import PlainAllGather, PlainReduceScatter, count_all_reduces
from .fsdp.consistency import check_consistency
from .fsdp.fsdp_unit import AllGather, FSDPUnit, ReduceScatter, find_units, follow_forward_passes, set_is_last_backward
from .fsdp.topology import Topology, process_rank
from .fsdp.unit import follow_optimizers
from .fsdp.waits import new_stream, on_stream
from .gather.all_gather import FullPrecisionAllGather, HierarchicalAllGather, QuantizedAllGather
from .gather.sent_shards import send
from .gather.unseen_changes import UnseenChanges
from .interface import RankState, ZeroPPInterface
from .muon.matrix_blocks import MatrixBlocks, MomentumWire, batches
from .own_rank import OwnRank
from .recipes import find_config
from .reduce.gradient_hops import GradientHops
from .reduce.reduce_scatter import HierarchicalReduceScatter, UnusedParameters


def apply_zeropp(
    model: nn.Module,
    config: ZeroPPConfig | str,
    pipeline: dist.ProcessGroup | None = None,
    tensor_parallel: dist.ProcessGroup | None = None,
    find_unused_parameters: bool = False,
) -> ZeroPP:
    """Replace the collectives of a ``fully_shard``-ed model by those that ``config`` asks for.

    Call it once, after the last ``fully_shard``, on all ranks alike: it makes process groups. Parts of ZeRO++
    that are off leave FSDP2's own collectives in place, with their bytes counted. HSDP meshes get nothing else.

    ``config``: settings, or the name of a recipe for the nodes as the ranks run, such as "int8" (recipes.py).
    ``pipeline``: the group of ranks with the model's other stages, each with its own ``ZeroPP``.
    ``tensor_parallel``: the group of ranks with the other parts of the same parameters. Both are for statistics.
    ``find_unused_parameters``: leave parameters that no rank used in a step without a gradient:
    docs/reference/library.md.
    Raises ValueError for models without FSDP2 units, ZeRO++ on HSDP meshes, unequal nodes, sizes that do not divide.
    """
    units = find_units(model, config.stated_ranks_per_node if isinstance(config, ZeroPPConfig) else None)
    if isinstance(config, str):
        largest = max((unit.topology for unit in units), key=lambda topology: topology.world_size)
        config = find_config(config, largest.ranks_per_node)
    for unit in units:
        if config.enabled and unit.replicas is not None:
            raise ValueError(f"{unit.label} is sharded over a two-dimensional (HSDP) mesh; ZeRO++ needs a flat one")
    if find_unused_parameters:
        check_finds_unused(config)
    zeropp = ZeroPP(model, units, config, pipeline, tensor_parallel, find_unused_parameters)
    if zeropp.is_logging_rank:
        warn(config, units, zeropp.topologies, zeropp.device)
    return zeropp


class ZeroPP(ZeroPPInterface):
    """ZeRO++'s collectives of one model on real ranks."""

    units: list[FSDPUnit]

    def __init__(
        self,
        model: nn.Module,
        units: list[FSDPUnit],
        config: ZeroPPConfig,
        pipeline: dist.ProcessGroup | None,
        tensor_parallel: dist.ProcessGroup | None,
        find_unused_parameters: bool,
    ) -> None:
        super().__init__(units, config)
        self._model, self.ranks, self.waits = model, OwnRank(), units[0].waits
        self._pipeline, self._tensor_parallel = pipeline, tensor_parallel
        topologies = dict.fromkeys(self.topologies)
        self._unseen_changes = {each: UnseenChanges(each, self._passes, self.traffic) for each in topologies}
        for unit in units:
            unit.follow_backward(reduces_unused=config.quantized_gradients)
        self._unused_parameters: dict[Topology, UnusedParameters] = {}
        if find_unused_parameters:
            for topology in topologies:
                members = [unit for unit in units if unit.topology is topology]
                self._unused_parameters[topology] = UnusedParameters(topology, members, self.traffic)
        self._consistency_check = partial(check_consistency, units, self.traffic) if config.check_agreement else None
        self._gather_stream = new_stream(self.device)
        self._gathers: list[QuantizedAllGather] = []  # every all-gather that replaces FSDP2's
        # Those with state to save or weights to send early, and reduce-scatters, by the unit's name.
        self._all_gathers: dict[str, QuantizedAllGather] = {}
        self._reduce_scatters: dict[str, HierarchicalReduceScatter] = {}
        for unit in units:
            unit.set_collectives(self._all_gather(unit), self._reduce_scatter(unit))
            count_all_reduces(unit, self.traffic)
        follow_optimizers(units)
        follow_forward_passes(model, units, self._begin_forward_pass)

    def _all_gather(self, unit: FSDPUnit) -> AllGather:
        """Choose the all-gather for ``unit``: ZeRO++'s, or FSDP2's own where nothing is quantized or kept."""
        if unit.topology.world_size == 1:
            return PlainAllGather(unit, self.shared)
        unseen_changes = self._unseen_changes[unit.topology]
        gather: QuantizedAllGather
        if self.config.hpz_partition_size > 1 and unit.topology.num_nodes > 1:
            gather = HierarchicalAllGather(
                unit, self.shared, unseen_changes, self._consistency_check, self._gather_stream
            )
        elif self.config.quantized_weights:
            gather = QuantizedAllGather(unit, self.shared, unseen_changes, self._gather_stream)
        else:
            gather = FullPrecisionAllGather(unit, self.shared, unseen_changes, self._gather_stream)
        self._gathers.append(gather)
        if not isinstance(gather, FullPrecisionAllGather):
            self._all_gathers[unit.name] = gather
        return gather

    def _reduce_scatter(self, unit: FSDPUnit) -> ReduceScatter:
        """Choose the reduce-scatter for ``unit``: ZeRO++'s, or FSDP2's own where nothing is quantized."""
        if not self.config.quantized_gradients:
            return PlainReduceScatter(unit, self.shared)
        unused_parameters = self._unused_parameters.get(unit.topology)
        self._reduce_scatters[unit.name] = HierarchicalReduceScatter(unit, self.shared, unused_parameters)
        return self._reduce_scatters[unit.name]

    @property
    def topologies(self) -> list[Topology]:
        """The process group, nodes and ranks of each unit."""
        return [unit.topology for unit in self.units]

    @property
    def is_logging_rank(self) -> bool:
        process_groups = {*(topology.group for topology in self.topologies), self._pipeline, self._tensor_parallel}
        return all(group is None or group.rank() == 0 for group in process_groups)

    def describe(self) -> str:
        """Describe the nodes and ranks, and how weights and gradients are sent: a line for each group of units."""
        replicas = {unit.replicas.world_size for unit in self.units if unit.replicas is not None}
        more = [f"; in each of {number} replicas, whose gradients are added up" for number in replicas]
        return "".join([super().describe(), *more])

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Mark whether the next backward pass is the last of this optimizer step, as ``set_is_last_backward`` does."""
        set_is_last_backward(self._model, is_last)

    def invalidate(self) -> None:
        """Force the next gather to send all parameters in full. Call it on all ranks."""
        for unit in self.units:
            unit.module.reshard()  # the root stays gathered after an evaluation
            unit.mark_changed()
        for gather in self._gathers:
            gather.forget_secondary_partition()

    def undo_step(self) -> None:
        """Drop the gradients since the last optimizer step."""
        super().undo_step()
        for unit in self.units:
            unit.drop_gradients()
            unit.forget_use()

    def quantization_errors(self) -> dict[str, float]:
        """Return what all ranks sampled since the last call. Collective."""
        groups = {unit.name: unit.topology.group for unit in self.units}
        return self.shared.monitor.take(groups, self._pipeline, self._tensor_parallel)

    def matrix_blocks(self, matrices: Sequence[Tensor], wire: MomentumWire) -> list[tuple[MatrixBlocks, list[Tensor]]]:
        """Split ``matrices`` by the ranks that share them, and into batches."""
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

    def _all_have(self, has: bool) -> bool:
        flag = torch.tensor(int(has), device=self.device)
        # The largest group last: it has the ranks of the others, and tells all of them the same.
        for topology in sorted(dict.fromkeys(self.topologies), key=lambda topology: topology.world_size):
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=topology.group)
        return bool(flag)

    def _forget_resident(self) -> None:
        for gather in self._gathers:
            gather.forget_resident()

    def _hops(self) -> Iterator[GradientHops]:
        return (reduce_scatter.hops for reduce_scatter in self._reduce_scatters.values())

    def _rank_states(self) -> list[RankState]:
        hops = {unit: reduce_scatter.hops for unit, reduce_scatter in self._reduce_scatters.items()}
        return [RankState(process_rank(), self.topologies, self._all_gathers, hops)]

    def _begin_forward_pass(self, is_last: bool) -> None:
        for unit in self.units:
            unit.check_collectives()
        if torch.is_grad_enabled():
            self.shared.position.begin(is_last)
        self._passes.begin()
        # Send in the model's order, and only now: after an optimizer step the program may still write weights, and to
        # compare what it wrote would wait behind weights on the same links.
        if self._all_gathers:
            with on_stream(self._gather_stream, self.device):
                encoded = [all_gather.encode_for_prefetch() for all_gather in self._all_gathers.values()]
                send([shard for shard in encoded if shard is not None], self.traffic)
