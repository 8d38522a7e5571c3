"""What a training loop has to know of real and of emulated ranks, and what the collectives of both do alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .config import ZeroPPConfig
from .description import describe, state_prefix, warn_of_lost_state
from .fsdp.shared import Shared, below
from .fsdp.topology import RankLayout
from .fsdp.unit import Unit
from .fsdp.waits import Waits
from .gather.unseen_changes import Passes
from .muon.matrix_blocks import MatrixBlocks, MomentumWire
from .reduce.gradient_hops import GradientHops


class RandomStates(Protocol):
    """The random states of the ranks that this process computes for."""

    def seed(self, seed_of: Callable[[int], int], /) -> None:
        """Seed each rank r as ``torch.manual_seed(seed_of(r))`` does."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states, uint8, by RANK.DEVICE."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore states that ``state_dict`` returned."""


class Ranks(Protocol):
    """The R ranks, of the job's W, that this process computes for: one real rank, or all emulated ones.

    ``for as_rank in ranks: with as_rank: ...`` computes as each of them, in turn; ``len(ranks)`` is R.
    """

    @property
    def world_size(self) -> int:
        """W: all ranks of the job, of every kind of parallelism."""

    @property
    def random_states(self) -> RandomStates:
        """The source of the ranks' random numbers, such as dropout's."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[AbstractContextManager[None]]: ...

    def step_by_shards(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer`` update each rank's shard of a parameter separately, as on real ranks.

        This makes emulation equal to the bit on a CPU: torch's fused AdamW rounds a tensor's last elements differently.
        """

    def shards_of(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the shard of a parameter, or of its gradient, that each of the R ranks holds and counts.

        Every element is in the shard of one of the W ranks: the first of those that hold it. Shards can be empty.
        Raises ValueError for a DTensor that is a partial sum.
        """

    def gather(self, local: Tensor, /) -> Tensor:
        """Gather K numbers per rank, from [R, K] of this process to [W, K] of all, in rank order. Collective.

        With I islands: [W / I, K], from the ranks of this island.
        """


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
        """Yield each unit's gathers and reductions with the prefix of their keys."""
        for kind, by_unit in (("weights", self.weights), ("gradients", self.gradients)):
            for unit, part in by_unit.items():
                yield f"{kind}/{unit or 'root'}/", part


class ZeroPPInterface:
    """The collectives of one model, as a training loop sees them: ZeroPP and EmulatedZeroPP."""

    ranks: Ranks  # whose collectives these are
    waits: Waits | None  # how long this rank waited for collectives; None for emulated ranks

    def __init__(self, units: Sequence[Unit], config: ZeroPPConfig) -> None:
        self.units, self.config, self.shared = units, config, Shared(config)
        self.traffic = self.shared.traffic  # what the ranks of this process have sent
        self._passes = Passes(self.shared.position)
        (self.device,) = {unit.device for unit in units}  # of unsharded parameters and of LoCo's errors

    @property
    def topologies(self) -> Sequence[RankLayout]:
        """The nodes and ranks that shard each unit."""
        raise NotImplementedError

    @property
    def is_logging_rank(self) -> bool:
        """Whether this process logs for the job."""
        return True

    def describe(self) -> str:
        """Describe the nodes and ranks, and how weights and gradients are sent: a line for each group of units."""
        return describe(self.config, self.topologies)

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Mark whether the next backward pass is the last of this step; quantized gradients cross nodes only there."""
        raise NotImplementedError

    def invalidate(self) -> None:
        """Force the next gather to send all parameters in full. Call it on all ranks.

        Needed only after changes that are not looked for: within a forward pass, or between the micro-batches of one
        step; and after overwriting weights that an optimizer changed and no forward pass has gathered yet.
        """
        raise NotImplementedError

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

        For generation, evaluation and epochs of reinforcement learning. A rank keeps the whole model: the codes that
        its node sends, or numbers in the gathered dtype where it sends these. Backward passes use them, too.

        Optimizer steps, loads and other changes that ``changed weights`` in docs/reference/library.md lists end what is
        kept; the next pass gathers once. Changes that leave no trace are looked for when this context is entered, also
        within itself, and in passes that compute gradients. Further passes without gradients send nothing at all, so
        ranks need not run equally many; they raise RuntimeError if this rank's shards were written to unseen.
        """
        was_resident = self._passes.is_resident
        if not was_resident:
            self._forget_resident()
        self._passes.set_resident(True)
        try:
            yield
        finally:
            if not was_resident:
                self._passes.set_resident(False)
                self._forget_resident()

    def undo_step(self) -> None:
        """Drop the gradients since the last optimizer step (after an overflow, or an exception).

        Restores LoCo's errors and the scales of elements, and drops what was kept for the step's last micro-batch.
        Without ``LoCoConfig.exact_undo``, errors that these gradients have changed become zero.
        """
        self.shared.position.undo_step()
        for hops in self._hops():
            hops.undo_step()

    def rescale_errors(self, factor: float) -> None:
        """Multiply LoCo's errors by ``factor``, by which the loss scale changed after the last backward pass."""
        for hops in self._hops():
            hops.rescale_errors(factor)

    def set_optimizer_steps(self, steps: int) -> None:
        """Set how many optimizer steps the run has taken, without skipped ones, where no loaded state says it.

        A warm-up of bits depends on this number. It then counts by itself: a step's gradients count when the next
        forward pass begins, unless ``undo_step`` was called.
        """
        self.shared.position.set_optimizer_steps(steps)

    def monitor_errors(self, every: int | None) -> None:
        """Sample quantization errors every ``every`` optimizer steps, at the cost of decoding; None turns it off."""
        self.shared.monitor.every = every

    def quantization_errors(self) -> dict[str, float]:
        """Return what all ranks sampled since the last call, by ``STATISTIC/WHAT`` and ``STATISTIC/WHAT/UNIT``.

        Collective. WHAT: ``weights``, ``gradients/intra``, ``gradients/inter``. STATISTIC: ``error``, RMS error / RMS
        value; ``error-state``, RMS of LoCo's error / RMS of the gradients it is added to; ``largest-codes``, the share
        of codes of the outermost levels in blocks that are not zero; ``nonfinite-blocks``, the number of blocks with a
        NaN or Inf.
        """
        raise NotImplementedError

    def matrix_blocks(
        self, matrices: Sequence[Tensor], wire: MomentumWire
    ) -> Sequence[tuple[MatrixBlocks, list[Tensor]]]:
        """Split the model's ``matrices`` for ``Muon`` into batches, each with the ranks that share it."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return what this process needs for an exact continuation: LoCo's errors, element scales, copies, counters.

        Keys begin with "RANK.", so the states of all ranks merge into one. Keys and shapes are the same from the start,
        as ``torch.distributed.checkpoint`` needs it, which loads into what it finds here. Training does not change
        returned tensors.
        """
        state: dict[str, Tensor] = {}
        for rank_state in self._rank_states():
            kept = {prefix + key: v for prefix, part in rank_state.parts() for key, v in part.state_dict().items()}
            if kept or self.config.gradient_bits_warmup is not None:  # a run may begin with a warm-up when it resumes
                kept |= self.shared.position.state_dict()
            state |= {self._prefix(rank_state) + key: value for key, value in kept.items()}
        return state

    def ranks_with_state(self) -> set[str]:
        """Return the ranks that keys of ``state_dict`` begin with; builds the state of one unit at most."""
        always, states = self.config.gradient_bits_warmup is not None, self._rank_states()
        return {str(of.rank) for of in states if always or any(part.state_dict() for _, part in of.parts())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load state saved by the same ranks of the same layout. Collective.

        State of another model, layout or config is ignored with a warning, on all ranks if one finds none of its own:
        then LoCo's errors begin at zero and weights are gathered in full.
        """
        ranks = self._rank_states()
        kept = [below(state, self._prefix(rank)) for rank in ranks]
        if not self._all_have(all(kept)):  # one rank alone would send other bytes than the rest expect
            kept = [{} for _ in ranks]
            if self.is_logging_rank and self.ranks_with_state():
                warn_of_lost_state()
        self.invalidate()
        for rank, values in zip(ranks, kept, strict=True):
            self.shared.position.load_state_dict(values)
            for prefix, part in rank.parts():
                part.load_state_dict(below(values, prefix))

    def _prefix(self, rank_state: RankState) -> str:
        return state_prefix(rank_state.rank, self.config, rank_state.layouts, self.units)

    def _all_have(self, has: bool) -> bool:
        """Return whether ``has`` is true on all ranks that share units. Collective."""
        return has

    def _forget_resident(self) -> None:
        """Free resident weights."""
        raise NotImplementedError

    def _hops(self) -> Iterator[GradientHops]:
        """Yield the hops of all units and ranks of this process."""
        raise NotImplementedError

    def _rank_states(self) -> list[RankState]:
        """Return the state of each of this process's ranks."""
        raise NotImplementedError
