"""State that all units of a model share: settings, the position in the loop, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import ZeroPPConfig
from .waits import Waits


@dataclass
class StepPosition:
    """Which micro-batch and optimizer step the training loop is in; shared by all units."""

    is_last: bool = True
    accumulations: int = 0  # how many gradient accumulations have begun
    is_accumulating: bool = False
    optimizer_steps: int = 0  # without steps whose gradients were dropped
    is_step_complete: bool = False  # all of a step's gradients were reduced, and no forward pass began after it
    # Per step of a torch optimizer since the last forward pass began: GradScaler's found_inf, which a fused one
    # reads on the device, or None.
    steps_taken: list[Tensor | None] = field(default_factory=list)
    sees_steps: bool = False  # whether there were any: not every optimizer is torch's
    is_resident: bool = False  # inside ``resident_weights``: what is gathered stays for the next passes
    # Whether this pass follows one of its kind there, both without gradients. Such passes send nothing, so ranks
    # need not run equally many of them: generated texts differ in length.
    sends_nothing: bool = False
    has_begun: bool = False  # whether there was a forward pass
    may_note_gathers: bool = True  # until repeated gathers were noted
    sample_every: int | None = None  # optimizer steps between samples of quantization errors; None = never
    _accumulation: int | None = None  # that the last forward pass began or continued
    _evaluated_versions: int | None = None

    def begin_forward_pass(self, versions: int) -> bool:
        """Return whether a forward pass is another than a further one of the same gradient accumulation.

        versions: the sum of the parameters' version counters. Inside ``resident_weights`` ranks cannot compare weights
        in every pass, but autograd counts what the program of every rank does.
        """
        self.has_begun = True
        if self.is_step_complete and (self.steps_taken or not self.sees_steps):  # else more gradients are to come
            self.optimizer_steps += 1
            self.is_step_complete = False
        accumulation = self.accumulations if torch.is_grad_enabled() and self.is_accumulating else None
        continues = accumulation is not None and accumulation == self._accumulation and not self.steps_taken
        self.steps_taken.clear()
        self._accumulation = accumulation
        evaluates = self.is_resident and not torch.is_grad_enabled()
        self.sends_nothing = evaluates and self._evaluated_versions == versions
        self._evaluated_versions = versions if evaluates else None
        return not continues

    def set_resident(self, is_resident: bool) -> None:
        """Set whether gathered weights stay. The ranks compare them in the next pass."""
        self.is_resident, self.sends_nothing, self._evaluated_versions = is_resident, False, None

    def is_sampled(self, step: int) -> bool:
        """Return whether errors are sampled in the step of this number."""
        return self.sample_every is not None and step % self.sample_every == 0

    def drop_step(self) -> bool:
        """Drop the gradients since the last optimizer step. Return whether no optimizer has used them."""
        is_unused = not any(found_inf is None or not found_inf for found_inf in self.steps_taken)
        self.is_accumulating = self.is_step_complete = False
        self.steps_taken.clear()
        return is_unused

    def set_is_last(self, is_last: bool) -> None:
        """Set whether the next or current backward pass is the step's last."""
        if not is_last and (self.is_last or not self.is_accumulating):
            self.accumulations, self.is_accumulating = self.accumulations + 1, True
        self.is_last = is_last

    def mark_reduced(self, is_last: bool) -> None:
        """Note that gradients were reduced; the last micro-batch's end the accumulation."""
        self.set_is_last(is_last)
        self.is_accumulating &= not self.is_last
        self.is_step_complete |= self.is_last

    def mark_stepped(self, found_inf: Tensor | None) -> None:
        """Note that a torch optimizer has stepped; it has changed nothing if ``found_inf`` is not zero."""
        self.steps_taken.append(found_inf)
        self.sees_steps = True

    def set_optimizer_steps(self, steps: int) -> None:
        self.optimizer_steps, self.is_step_complete = steps, False


@dataclass
class Traffic:
    """Bytes sent by this rank since the last ``take()``, as the collectives' ring and pairwise algorithms move them.

    Summed over the ranks of a node, ``inter_node`` is what leaves the node, without the transport's own overhead.
    """

    intra_node: int = 0
    inter_node: int = 0
    inter_island: int = 0
    _is_evaluating: bool = field(default=False, init=False, repr=False, compare=False)
    _is_paused: bool = field(default=False, init=False, repr=False, compare=False)

    def add(self, intra_node: int = 0, inter_node: int = 0, inter_island: int = 0, stays: bool = False) -> None:
        """Count sent bytes. ``stays``: later passes use what was sent, and do not send it before parameters change."""
        if not self._is_paused and (stays or not self._is_evaluating):
            self.intra_node += intra_node
            self.inter_node += inter_node
            self.inter_island += inter_island

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count only training's traffic: what is sent inside this context and the next training step need not send."""
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside this context."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def of_levels(self) -> tuple[int, int, int]:
        """Return the bytes within nodes, between nodes and between islands, as ``add`` takes them."""
        return self.intra_node, self.inter_node, self.inter_island

    def take(self) -> Traffic:
        """Return the counts and start again from zero."""
        counts = Traffic(*self.of_levels())
        self.intra_node = self.inter_node = self.inter_island = 0
        return counts


@dataclass(frozen=True)
class Shared:
    """The settings, and what all collectives of a model count and go by."""

    config: ZeroPPConfig
    waits: Waits
    traffic: Traffic = field(default_factory=Traffic)
    position: StepPosition = field(default_factory=StepPosition)


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries of a state dict whose keys begin with ``prefix``, by the rest of the key."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
