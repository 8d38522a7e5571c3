"""What real and emulated islands do alike: count steps, and agree when they are due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_zpp.zeropp import Traffic

from .agreed import AgreedParameters
from .config import IslandConfig
from .timetable import Travelling


class AgreedFragment(Travelling, Protocol):
    """Fragment, EmulatedFragment."""

    agreed: AgreedParameters


F = TypeVar("F", bound=AgreedFragment)


class Agreements(Generic[F]):
    """``islands.interface.IslandsInterface`` says in full what each method does."""

    config: IslandConfig
    num_islands: int
    may_leave = False
    steps: int
    traffic: Traffic
    _fragments: Sequence[F]
    _counts = True
    has_replaced = False

    def describe(self) -> str:
        """One line: how many islands there are, and how they agree."""
        return f"{self.num_islands} islands {self.config.describe()}"

    @torch.no_grad()
    def count_step(self) -> None:
        """Count a step of the optimizer, and agree if it is due; call it yourself where no optimizer takes it."""
        self.steps += 1
        self.has_replaced = self.config.timetable.advance(self._fragments, self.steps)
        if self.has_replaced:
            self._parameters_replaced()

    @torch.no_grad()
    def conclude(self) -> None:
        """Agree on all that was trained, when training ends."""
        if self.config.timetable.conclude(self._fragments, self.steps):
            self.has_replaced = True
            self._parameters_replaced()

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Steps of the optimizers do not count in here."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def _follow(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count the steps of an optimizer; None: the loop calls ``count_step`` after each of its own."""
        if optimizer is not None:
            optimizer.register_step_post_hook(self._optimizer_has_stepped)

    def _optimizer_has_stepped(self, *_: object) -> None:
        if self._counts:
            self.count_step()

    def agreed_state(self) -> dict[str, Tensor]:
        """What all islands have alike, by "agreed.NAME" and "momentum.NAME"."""
        return {key: tensor for fragment in self._fragments for key, tensor in fragment.agreed.state_dict().items()}

    def _parameters_replaced(self) -> None:
        """Say so to what keeps something of the old ones."""
        raise NotImplementedError
