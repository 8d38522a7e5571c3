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
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from ..collectives import count_all_reduce
from ..config import ZeroPPConfig, check_finds_unused
from ..description import describe, state_of, state_prefix, warn, warn_of_lost_state
from ..matrix_blocks import MomentumWire, batches
from ..micro_batch import MicroBatch
from ..monitor import ErrorMonitor
from ..state_keys import below, unit_prefix
from ..topology import RankLayout
from ..traffic import Traffic
from ..unit import follow_optimizers
from ..unseen_changes import Passes
from ..weight_swaps import swapped_weights
from .collectives import EmulatedAllGather, EmulatedReduceScatter
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


class EmulatedZeroPP:
    """What a training loop says to, and reads from, the emulated ranks of one model.

    ``ranks`` computes as each of them; they train in turn, from the first on. ``zeropp.interface.ZeroPPInterface``
    says in full what each method does.
    """

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
        self._first_rank = first_rank
        self.units, self.config, self.layouts = units, config, layouts
        self.topologies = layouts[:1] * len(units)  # all units' are the same
        (self.device,) = {unit.device for unit in units}
        self.traffic, self._monitor, self._micro_batch = Traffic(), ErrorMonitor(), MicroBatch()
        self.waits = None  # emulated ranks wait for nothing
        self.ranks = EmulatedRanks(self.device, len(layouts), self.as_rank, first_rank)
        self._weights = [
            EmulatedAllGather(
                unit=unit,
                config=config,
                layouts=layouts,
                traffic=self.traffic,
                monitor=self._monitor,
                micro_batch=self._micro_batch,
                zero_stage=zero_stage,
            )
            for unit in units
        ]
        self._gradients = [
            EmulatedReduceScatter(
                unit=unit,
                config=config,
                layouts=layouts,
                traffic=self.traffic,
                monitor=self._monitor,
                micro_batch=self._micro_batch,
                reduce_dtype=reduce_dtype,
                find_unused_parameters=find_unused_parameters,
            )
            for unit in units
        ]
        self._find_unused_parameters = find_unused_parameters
        self._next_rank = 0  # whose gradients come next
        self._last_rank = len(layouts)  # that computed something; ranks do in turn, so that a lower one begins a pass
        self._passes = Passes(self._micro_batch)
        for weights in self._weights:
            # Loaded parameters are further from the copies than low-bit differences can say.
            weights.unit.module.register_load_state_dict_post_hook(weights.after_loading)
        follow_optimizers(units)

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
            for unit in self.units:
                unit.show_arrived()
            with self.ranks.random_states.of(rank):
                yield
            trained = any(parameter.grad is not None for unit in self.units for parameter in unit.arrived)
            if trained:
                self._reduce(rank)
            for weights in self._weights:
                weights.count(rank, trained, self._micro_batch.is_last)
        finally:
            for unit in self.units:
                unit.show_masters()

    def _reduce(self, rank: int) -> None:
        if rank != self._next_rank:
            raise RuntimeError(f"emulated ranks train in turn: this is rank {rank}, it is rank {self._next_rank}'s")
        self._next_rank = (rank + 1) % len(self.layouts)
        for reduce_scatter in self._gradients:
            reduce_scatter.add(rank)
        if self._find_unused_parameters and self._micro_batch.is_last:
            count_all_reduce(self.traffic, self.layouts[rank], sum(len(unit.parameters) for unit in self.units))

    def describe(self) -> str:
        """One line: the emulated nodes and ranks, and how weights and gradients travel."""
        return describe(self.config, self.topologies)

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Say before each rank's micro-batch whether it is the optimizer step's last."""
        self._micro_batch.begin(is_last)

    def invalidate(self) -> None:
        """Say that parameters were changed, where a change would not be looked for."""
        for weights in self._weights:
            weights.reshard()
            weights.unit.mark_changed()
            weights.forget_secondary_partition()

    def swapped_weights(self) -> AbstractContextManager[None]:
        """Write other weights in here, and put the own ones back by its end."""
        return swapped_weights(self)

    def undo_step(self) -> None:
        """Say that the gradients since the last optimizer step are thrown away; the next are rank 0's."""
        self._next_rank = 0
        self._micro_batch.undo_step()
        for reduce_scatter in self._gradients:
            reduce_scatter.undo_step()

    def rescale_errors(self, factor: float) -> None:
        """Say that the loss scale was multiplied by ``factor``."""
        for reduce_scatter in self._gradients:
            for hops in reduce_scatter.hops:
                hops.rescale_errors(factor)

    def set_optimizer_steps(self, steps: int) -> None:
        """Say how many optimizer steps the run has taken, where no loaded state says it."""
        self._micro_batch.set_optimizer_steps(steps)

    def monitor_errors(self, every: int | None) -> None:
        """Sample quantization errors at every so many optimizer steps; None = never."""
        self._monitor.every = every

    def quantization_errors(self) -> dict[str, float]:
        """What the emulated ranks sampled since the last call."""
        return self._monitor.take({})

    def matrix_blocks(
        self, matrices: Sequence[Tensor], wire: MomentumWire
    ) -> list[tuple[EmulatedMatrixBlocks, list[Tensor]]]:
        """``matrices``, in batches, and how the emulated ranks share them: all alike."""
        blocks = EmulatedMatrixBlocks(self.layouts, self.traffic, wire)
        return [(blocks, batch) for batch in batches(matrices, self.layouts[0].ranks_per_node)]

    def state_dict(self) -> dict[str, Tensor]:
        """What ZeroPP's ``state_dict`` gives on all ranks."""
        state: dict[str, Tensor] = {}
        for layout in self.layouts:
            own = {
                unit_prefix(kind, unit.name) + key: value
                for unit, weights, gradients in zip(self.units, self._weights, self._gradients, strict=True)
                for kind, of_unit in (("weights", weights), ("gradients", gradients))
                for key, value in of_unit.state_dict(layout).items()
            }
            if own or self.config.has_bits_warmup:
                own |= self._micro_batch.state_dict()
            prefix = state_prefix(self._first_rank + layout.rank, self.config, [layout], self.units)
            state |= {prefix + key: value for key, value in own.items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave, on as many ranks."""
        of_ranks = [
            state_of(self._first_rank + layout.rank, state, self.config, [layout], self.units)
            for layout in self.layouts
        ]
        if None in of_ranks:
            of_ranks = [{} for _ in self.layouts]
            if self.state_dict():
                warn_of_lost_state()
        self.invalidate()
        for layout, own in zip(self.layouts, of_ranks, strict=True):
            assert own is not None
            self._micro_batch.load_state_dict(own)
            for unit, weights, gradients in zip(self.units, self._weights, self._gradients, strict=True):
                for kind, of_unit in (("weights", weights), ("gradients", gradients)):
                    of_unit.load_state_dict(layout, below(own, unit_prefix(kind, unit.name)))
