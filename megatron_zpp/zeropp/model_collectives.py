"""What the collectives of one model do alike on real and on emulated ranks: ZeroPP, EmulatedZeroPP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from .config import ZeroPPConfig
from .description import describe, state_of, state_prefix, warn_of_lost_state
from .fsdp.shared import Shared
from .fsdp.state_keys import below, unit_prefix
from .fsdp.topology import RankLayout
from .fsdp.unit import Unit
from .reduce.gradient_hops import GradientHops


class Stateful(Protocol):
    """One unit's gathers, or reductions, on one rank."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class RankState(NamedTuple):
    """What one rank must keep for an exact continuation."""

    rank: int  # in the job
    layouts: Sequence[RankLayout]  # of each unit, or one for all
    weights: Mapping[str, Stateful]  # by unit
    gradients: Mapping[str, Stateful]

    def parts(self) -> Iterator[tuple[str, Stateful]]:
        """Each unit's, with the prefix of its keys."""
        for kind, by_unit in (("weights", self.weights), ("gradients", self.gradients)):
            for unit, part in by_unit.items():
                yield unit_prefix(kind, unit), part


class ModelCollectives:
    """``zeropp.interface.ZeroPPInterface`` says in full what each method does."""

    def __init__(self, units: Sequence[Unit], config: ZeroPPConfig) -> None:
        self.units, self.config, self.shared = units, config, Shared(config)
        self.traffic = self.shared.traffic
        (self.device,) = {unit.device for unit in units}

    @property
    def topologies(self) -> Sequence[RankLayout]:
        """Of each unit: the nodes and ranks that shard it."""
        raise NotImplementedError

    @property
    def is_logging_rank(self) -> bool:
        """Whether this process speaks for the job."""
        return True

    def describe(self) -> str:
        """Describe the nodes and ranks, and how weights and gradients are sent: a line for each group of units."""
        return describe(self.config, self.topologies)

    def invalidate(self) -> None:
        """Say that parameters were changed, where a change would not be looked for."""
        raise NotImplementedError

    @contextmanager
    def _swapped_weights(self) -> Iterator[None]:
        self.invalidate()
        try:
            yield
        finally:
            self.invalidate()

    def swapped_weights(self) -> AbstractContextManager[None]:
        """Write other weights in here, on all ranks, and put the own ones back by its end."""
        return self._swapped_weights()

    def undo_step(self) -> None:
        """Say that the gradients since the last optimizer step are thrown away."""
        self.shared.micro_batch.undo_step()
        for hops in self._hops():
            hops.undo_step()

    def rescale_errors(self, factor: float) -> None:
        """Say that the loss scale was multiplied by ``factor``."""
        for hops in self._hops():
            hops.rescale_errors(factor)

    def set_optimizer_steps(self, steps: int) -> None:
        """Say how many optimizer steps the run has taken, where no loaded state says it."""
        self.shared.micro_batch.set_optimizer_steps(steps)

    def monitor_errors(self, every: int | None) -> None:
        """Sample quantization errors every ``every`` optimizer steps; None turns sampling off."""
        self.shared.monitor.every = every

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the ranks of this process must keep for an exact continuation."""
        state: dict[str, Tensor] = {}
        for of_rank in self._rank_states():
            own = {prefix + key: value for prefix, part in of_rank.parts() for key, value in part.state_dict().items()}
            if own or self.config.has_bits_warmup:  # a run may begin with a warm-up when it resumes
                own |= self.shared.micro_batch.state_dict()
            prefix = state_prefix(of_rank.rank, self.config, of_rank.layouts, self.units)
            state |= {prefix + key: value for key, value in own.items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load state saved by the same ranks of the same layout. Collective."""
        ranks = self._rank_states()
        found = [state_of(of_rank.rank, state, self.config, of_rank.layouts, self.units) for of_rank in ranks]
        own = [values for values in found if values is not None]
        if not self._all_have(len(own) == len(ranks)):  # a rank alone would send other bytes than the others wait for
            own = [{} for _ in ranks]
            if self.is_logging_rank and self.state_dict():
                warn_of_lost_state()
        self.invalidate()
        for of_rank, values in zip(ranks, own, strict=True):
            self.shared.micro_batch.load_state_dict(values)
            for prefix, part in of_rank.parts():
                part.load_state_dict(below(values, prefix))

    def _all_have(self, has: bool) -> bool:
        """Whether it is so on all ranks that units are shared with; collective."""
        return has

    def _hops(self) -> Iterator[GradientHops]:
        """Those of all units and ranks of this process."""
        raise NotImplementedError

    def _rank_states(self) -> list[RankState]:
        """Those of this process's ranks."""
        raise NotImplementedError
