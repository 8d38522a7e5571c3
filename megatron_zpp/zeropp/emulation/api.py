"""ZeRO++ and LoCo without ranks: one process computes what W data-parallel ranks on N nodes would, bit for bit.

    emulated = emulate_zeropp(model, config, num_nodes=2, ranks_per_node=4, units=list(model.layers))
    for i, micro_batches in enumerate(step):                    # one of each rank
        emulated.set_is_last_micro_batch(i == last)
        for as_rank, micro_batch in zip(emulated.ranks, micro_batches):
            with as_rank:                                       # its weights and its random numbers
                loss(model(micro_batch)).backward()
    optimizer.step()                                            # on the mean gradients, in the model's own parameters

``model`` is a plain module whose parameters are the fp32 masters; nothing of it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..config import ZeroPPConfig, check_finds_unused
from ..description import warn
from ..fsdp.collectives import count_all_reduce
from ..fsdp.topology import RankLayout
from ..fsdp.unit import follow_optimizers
from ..interface import RankState, ZeroPPInterface
from ..muon.matrix_blocks import MomentumWire, batches
from ..reduce.gradient_hops import GradientHops
from .collectives import EmulatedAllGather, EmulatedReduceScatter, WeightsOfRank
from .matrix_blocks import EmulatedMatrixBlocks
from .ranks import EmulatedRanks
from .unit import EmulatedUnit, find_emulated_units


def emulate_zeropp(
    model: nn.Module,
    config: ZeroPPConfig,
    num_nodes: int,
    ranks_per_node: int,
    *,
    units: Sequence[nn.Module] = (),
    gathered_once: Sequence[nn.Module] = (),
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    zero_stage: int = 3,
    find_unused_parameters: bool = False,
    first_rank: int = 0,
) -> EmulatedZeroPP:
    """Prepare ``model`` to be trained as ``num_nodes`` x ``ranks_per_node`` ranks would with ``apply_zeropp``.

    units: the modules that ``fully_shard`` would be called on before the whole model.
    gathered_once: those of them with ``reshard_after_forward=False``; FSDP2 keeps the root for backward anyway.
    param_dtype, reduce_dtype: as in FSDP2's MixedPrecisionPolicy.
    find_unused_parameters: as ``apply_zeropp`` takes it.
    zero_stage: 3, or 2, which keeps gathered parameters for all micro-batches of a step.
    first_rank: the number of the first rank in the job, of which these are an island; states are saved under it.

    Raises ValueError for parameters that have no storage yet or belong to two units, and for what is not emulated.
    """
    if num_nodes < 1 or ranks_per_node < 1:
        raise ValueError(f"{num_nodes} nodes of {ranks_per_node} ranks cannot be: both must be at least 1")
    if config.hpz_partition_size not in (1, ranks_per_node) or config.ranks_per_node not in (None, ranks_per_node):
        raise ValueError(
            f"the emulated nodes have {ranks_per_node} ranks: hpz_partition_size {config.hpz_partition_size} must be "
            f"that or 1, and ranks_per_node {config.ranks_per_node} that or None"
        )
    if config.check_agreement:
        raise ValueError("check_agreement compares real ranks, and emulated ones are one process: leave it out")
    if zero_stage not in (2, 3):
        raise ValueError(f"stages 2 and 3 of ZeRO can be emulated, not stage {zero_stage}")
    if find_unused_parameters:
        check_finds_unused(config)
    emulated = EmulatedZeroPP(
        units=find_emulated_units(model, units, gathered_once, num_nodes * ranks_per_node, param_dtype),
        config=config,
        layouts=[RankLayout(num_nodes, ranks_per_node, rank) for rank in range(num_nodes * ranks_per_node)],
        reduce_dtype=reduce_dtype,
        zero_stage=zero_stage,
        find_unused_parameters=find_unused_parameters,
        first_rank=first_rank,
    )
    warn(config, emulated.units, emulated.topologies, emulated.device)
    return emulated


class EmulatedZeroPP(ZeroPPInterface):
    """What a training loop says to, and reads from, the emulated ranks of one model.

    ``ranks`` computes as each of them; they train in turn, from the first on.
    """

    ranks: EmulatedRanks

    def __init__(
        self,
        *,
        units: list[EmulatedUnit],
        config: ZeroPPConfig,
        layouts: list[RankLayout],
        reduce_dtype: torch.dtype | None,
        zero_stage: int,
        find_unused_parameters: bool,
        first_rank: int,
    ) -> None:
        super().__init__(units, config)
        self._emulated, self.layouts, self._first_rank = units, layouts, first_rank
        self.waits = None  # emulated ranks wait for nothing
        self.ranks = EmulatedRanks(self.device, len(layouts), self.as_rank, first_rank)
        self._weights = [EmulatedAllGather(unit, layouts, self.shared, self._passes, zero_stage) for unit in units]
        self._gradients = [
            EmulatedReduceScatter(unit, layouts, self.shared, reduce_dtype, find_unused_parameters) for unit in units
        ]
        self._find_unused_parameters = find_unused_parameters
        self._next_rank = 0  # whose gradients come next
        self._last_rank = len(layouts)  # that computed something; ranks do in turn, so that a lower one begins a pass
        for weights in self._weights:
            # Most codes of loaded parameters have moved.
            weights.unit.module.register_load_state_dict_post_hook(weights.after_loading)
        follow_optimizers(units)

    @property
    def topologies(self) -> list[RankLayout]:
        """Those of all units are the same."""
        return self.layouts[:1] * len(self.units)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Forward and backward passes in here are those of ``rank``: its weights, random numbers and gradients.

        The gradients are reduced when the context ends. Ranks train in turn, from 0 on. The model's own parameters
        are not in it meanwhile.
        """
        begins_pass, self._last_rank = rank <= self._last_rank, rank
        if begins_pass:
            self._passes.begin()
        for weights in self._weights:
            weights.refresh(look=begins_pass and weights.unit not in self._passes.known)
            if weights.is_gathered(rank):
                self._passes.known.add(weights.unit)
        try:
            for unit in self._emulated:
                unit.show_arrived()
            with self.ranks.random_states.of(rank):
                yield
            trained = any(parameter.grad is not None for unit in self._emulated for parameter in unit.arrived)
            if trained:
                self._reduce(rank)
            for weights in self._weights:
                weights.count(rank, trained, self.shared.position.is_last)
        finally:
            for unit in self._emulated:
                unit.show_masters()

    def _reduce(self, rank: int) -> None:
        if rank != self._next_rank:
            raise RuntimeError(f"emulated ranks train in turn: this is rank {rank}, it is rank {self._next_rank}'s")
        self._next_rank = (rank + 1) % len(self.layouts)
        for reduce_scatter in self._gradients:
            reduce_scatter.add(rank)
        if self._find_unused_parameters and self.shared.position.is_last:
            count_all_reduce(self.traffic, self.layouts[rank], sum(len(unit.parameters) for unit in self.units))

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Say before each rank's micro-batch whether it is the optimizer step's last."""
        self.shared.position.begin(is_last)

    def invalidate(self) -> None:
        """Say that parameters were changed, where a change would not be looked for."""
        for weights in self._weights:
            weights.reshard()
            weights.unit.mark_changed()
            weights.forget_secondary_partition()

    def undo_step(self) -> None:
        """Say that the gradients since the last optimizer step are thrown away; the next are rank 0's."""
        super().undo_step()
        self._next_rank = 0
        for reduce_scatter in self._gradients:
            reduce_scatter.drop_sent()

    def quantization_errors(self) -> dict[str, float]:
        """Return what the emulated ranks sampled since the last call."""
        return self.shared.monitor.take({})

    def matrix_blocks(
        self, matrices: Sequence[Tensor], wire: MomentumWire
    ) -> list[tuple[EmulatedMatrixBlocks, list[Tensor]]]:
        """``matrices``, in batches, and how the emulated ranks share them: all alike."""
        blocks = EmulatedMatrixBlocks(self.layouts, self.traffic, wire)
        return [(blocks, batch) for batch in batches(matrices, self.layouts[0].ranks_per_node)]

    def _forget_resident(self) -> None:
        for weights in self._weights:
            weights.forget_resident()

    def _hops(self) -> Iterator[GradientHops]:
        return (hops for reduce_scatter in self._gradients for hops in reduce_scatter.hops)

    def _rank_states(self) -> list[RankState]:
        return [
            RankState(
                self._first_rank + layout.rank,
                [layout],
                {weights.unit.name: WeightsOfRank(weights, layout) for weights in self._weights},
                {each.unit.name: each.hops[layout.rank] for each in self._gradients if each.hops},
            )
            for layout in self.layouts
        ]
