"""What real and emulated ranks have in common: all that a training loop has to know of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from .config import ZeroPPConfig
from .fsdp.topology import RankLayout
from .fsdp.traffic import Traffic
from .fsdp.waits import Waits
from .muon.matrix_blocks import MomentumWire, Orthogonalize


class RandomStates(Protocol):
    """The random states of the ranks that this process computes for."""

    def seed(self, of_rank: Callable[[int], int]) -> None:
        """Let rank r begin as with ``torch.manual_seed(of_rank(r))``."""

    def state_dict(self) -> dict[str, Tensor]:
        """The states, uint8, by RANK.DEVICE."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave."""


class Ranks(Protocol):
    """The R of all W ranks that this process computes for: its own, or all that it emulates.

    ``for as_rank in ranks: with as_rank: ...`` computes as each of them, in turn; ``len(ranks)`` is R.
    """

    @property
    def world_size(self) -> int:
        """W: all ranks of the job, of every kind of parallelism."""

    @property
    def random_states(self) -> RandomStates:
        """What the ranks' random numbers, such as dropout's, are drawn from."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[AbstractContextManager[None]]: ...

    def step_by_shards(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer`` move each rank's shard of a parameter by itself, as on real ranks.

        For equality to the bit on a CPU: torch's fused AdamW rounds the last elements of a tensor differently.
        """

    def shards_of(self, tensor: Tensor) -> Sequence[Tensor]:
        """The shard of a parameter, or of its gradient, that each of the R ranks holds and counts.

        Every element is in one shard of one of the W ranks: where several ranks hold it, the first does. Shards can be
        empty. Raises ValueError for a DTensor whose sum over ranks is still to come.
        """

    def gather(self, of_ranks: Tensor) -> Tensor:
        """One number of each rank, from [R] of this process to [W] of all, in rank order. Collective.

        Of an island's ranks, [W / K] of that island.
        """


class MatrixBlocksInterface(Protocol):
    """The ranks that share some matrices: MatrixBlocks, EmulatedMatrixBlocks.

    shards: what this process holds of matrices of ``shapes``.
    """

    def gather(self, shards: Sequence[Tensor], shapes: Sequence[torch.Size], wire: MomentumWire | None = None) -> Any:
        """The rows of all nodes, which whole matrices are made of; None: there is one node. Collective."""

    def own_rows(self, gathered: Any, shards: Sequence[Tensor]) -> list[Tensor]:
        """Of what ``gather`` gave this process's own, as it travelled, in bf16."""

    def orthogonalized(
        self,
        shards: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        orthogonalize: Orthogonalize,
        gathered: Any = None,
        is_stale: bool = False,
    ) -> list[Tensor]:
        """This process's part of the results, fp32, of each node's block of rows or of what was gathered. Collective.

        is_stale: that was in an earlier step, and each node puts its rows of now into it.
        """


class ZeroPPInterface(Protocol):
    """What a training loop says to, and reads from, the collectives of one model: ZeroPP, EmulatedZeroPP."""

    config: ZeroPPConfig
    traffic: Traffic  # what the ranks of this process have sent

    @property
    def ranks(self) -> Ranks:
        """The ranks whose collectives these are."""

    @property
    def topologies(self) -> Sequence[RankLayout]:
        """Of each unit: the nodes and ranks that shard it."""

    @property
    def device(self) -> torch.device:
        """Where the model's unsharded parameters and LoCo's errors live."""

    @property
    def waits(self) -> Waits | None:
        """How long this rank waited for collectives; None of emulated ranks, which have none."""

    def describe(self) -> str:
        """One line: the topology, and how weights and gradients travel."""

    def set_is_last_micro_batch(self, is_last: bool) -> None:
        """Say before a backward pass whether it is the optimizer step's last; only that one crosses nodes."""

    def invalidate(self) -> None:
        """Say that parameters were changed; they are gathered anew, and in full where only differences travel.

        Call it on all ranks. Needed only where no change is looked for: within a forward pass, or between the
        micro-batches of one step; and after other weights were written over those of a step that no pass has used.
        """

    def swapped_weights(self) -> AbstractContextManager[None]:
        """Write other weights in here, on all ranks, and put the own ones back by its end: ``invalidate`` at both."""

    def undo_step(self) -> None:
        """Say that the gradients since the last optimizer step are thrown away (an overflow, an exception).

        LoCo's errors and the scales of elements return to what they were, and micro-batches that wait for the last one
        are dropped. Without ``LoCoConfig.exact_undo``, errors that these gradients have moved become zero.
        """

    def rescale_errors(self, factor: float) -> None:
        """Say that the loss scale was multiplied by ``factor`` after the last backward pass."""

    def set_optimizer_steps(self, steps: int) -> None:
        """Say how many optimizer steps the run has taken, skipped ones left out, where no loaded state says it.

        Bits that warm up go by that number. It counts on by itself: a step's gradients count when the next forward pass
        begins, unless ``undo_step`` was called.
        """

    def monitor_errors(self, every: int | None) -> None:
        """Sample quantization errors at every so many optimizer steps; None = never. A sample costs some decodings."""

    def quantization_errors(self) -> dict[str, float]:
        """What all ranks sampled since the last call, by ``STATISTIC/WHAT`` and ``STATISTIC/WHAT/UNIT``; collective.

        WHAT: ``weights``, ``gradients/intra``, ``gradients/inter``. STATISTIC: ``error``, RMS error / RMS value;
        ``error-state``, RMS of LoCo's error / RMS of the gradients it is added to; ``largest-codes``, the share of
        codes of the outermost levels in blocks that are not zero; ``nonfinite-blocks``, the number of blocks with a NaN
        or Inf.
        """

    def matrix_blocks(
        self, matrices: Sequence[Tensor], wire: MomentumWire
    ) -> Sequence[tuple[MatrixBlocksInterface, list[Tensor]]]:
        """For ``Muon``: ``matrices`` of the model, by the ranks that share them and send by ``wire``, in batches."""

    def state_dict(self) -> dict[str, Tensor]:
        """What the ranks must keep for an exact continuation: LoCo's errors, element scales, copies, noise counters.

        Keys begin with "RANK.", so that those of all ranks make one state. They and their shapes are the same from the
        start, as ``torch.distributed.checkpoint`` wants it, which loads into what it finds here. Training on changes
        nothing in what was given.
        """

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave on the same ranks of the same layout; collective.

        State of another model, layout or config is left out with a warning, on all ranks if one does not find its own:
        then all begins anew, and weights are gathered in full.
        """
