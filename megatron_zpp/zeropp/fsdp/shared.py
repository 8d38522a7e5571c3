"""State that all units of a model share: settings, the position in the loop, bytes and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ZeroPPConfig
from ..wire import reference
from ..wire.format import WireFormat
from .topology import gather_objects
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
    _accumulation: int | None = None  # that the last forward pass began or continued
    _evaluated_versions: int | None = None

    def begin_forward_pass(self, versions: int) -> bool:
        """Return whether a forward pass is another than a further one of the same gradient accumulation.

        versions: the sum of the parameters' version counters. Inside ``resident_weights`` ranks cannot compare weights
        in every pass, but autograd counts what the program of every rank does.
        """
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

    def undo_step(self) -> bool:
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

    def mark_reduced(self) -> None:
        """Note that gradients were reduced; the last micro-batch's end the accumulation."""
        self.is_accumulating &= not self.is_last
        self.is_step_complete |= self.is_last

    def mark_stepped(self, found_inf: Tensor | None) -> None:
        """Note that a torch optimizer has stepped; it has changed nothing if ``found_inf`` is not zero."""
        self.steps_taken.append(found_inf)
        self.sees_steps = True

    def state_dict(self) -> dict[str, Tensor]:
        return {"optimizer_steps": torch.tensor(self.optimizer_steps + self.is_step_complete)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the number of optimizer steps, if the state has one."""
        if "optimizer_steps" in state:
            self.set_optimizer_steps(int(state["optimizer_steps"]))

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


class ErrorMonitor:
    """Statistics of what is sent, sampled every few steps; docs/reference/monitors.md says how to read them.

    Two sums for each (statistic, what was sent, unit). Off until ``every`` is set.
    """

    def __init__(self) -> None:
        self.every: int | None = None  # optimizer steps between samples
        self._sums: dict[tuple[str, str, str], Tensor] = {}  # fp32 [2]

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    # Samples stay on the device: nothing here synchronizes.

    def record(self, what: str, unit: str, sent: Tensor, arrived: Tensor) -> None:
        """Add a sample of the relative error."""
        self._add(("error", what, unit), _square(sent.float() - arrived.float()), _square(sent))

    def record_error_state(self, what: str, unit: str, gradients: Tensor, error: Tensor) -> None:
        """Add a sample of LoCo's error, relative to the gradients that it was added to."""
        self._add(("error-state", what, unit), _square(error), _square(gradients))

    def record_codes(self, what: str, unit: str, format: WireFormat, wires: Tensor) -> None:
        """Count the largest codes, and the blocks with a NaN or Inf, in wire buffers uint8 [..., nbytes]."""
        if format.quantized:
            largest, codes, nonfinite = reference.count_codes(format, wires)
            self._add(("largest-codes", what, unit), largest, codes)
            self._add(("nonfinite-blocks", what, unit), nonfinite, torch.ones_like(nonfinite))

    def _add(self, key: tuple[str, str, str], first: Tensor, second: Tensor) -> None:
        sums = torch.stack([first, second])
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums

    def gather(
        self,
        groups: Mapping[str, dist.ProcessGroup],
        pipeline: dist.ProcessGroup | None = None,
        tensor_parallel: dist.ProcessGroup | None = None,
    ) -> dict[str, float]:
        """Return the statistics of all ranks since the last call. Collective.

        groups: the ranks that share each unit, by name. pipeline: the ranks with
        the model's other units. tensor_parallel: the ranks with other parts of the same units.

        Keys: ``STATISTIC/WHAT`` over all units, and ``STATISTIC/WHAT/UNIT`` for each.
        """
        keys = sorted(self._sums)
        if not keys and pipeline is None:
            return {}
        sums = torch.stack([self._sums[key] for key in keys]) if keys else torch.zeros(0, 2)  # [K, 2]
        self._sums = {}
        for group in dict.fromkeys(groups.values()):
            if rows := [i for i, (_, _, unit) in enumerate(keys) if groups[unit] is group]:
                group_sums = sums[rows]
                dist.all_reduce(group_sums, group=group)
                sums[rows] = group_sums
        if tensor_parallel is not None and keys:
            dist.all_reduce(sums, group=tensor_parallel)
        if pipeline is not None:
            stages = gather_objects((keys, sums.tolist()), pipeline)
            keys = [key for stage_keys, _ in stages for key in stage_keys]
            sums = torch.tensor([row for _, rows in stages for row in rows])
        sums = sums.cpu()
        values: dict[str, float] = {}
        for statistic, what in sorted({key[:2] for key in keys}):
            rows = [i for i, key in enumerate(keys) if key[:2] == (statistic, what)]
            values[f"{statistic}/{what}"] = _value(statistic, sums[rows].sum(dim=0))
            values |= {f"{statistic}/{what}/{keys[i][2] or 'root'}": _value(statistic, sums[i]) for i in rows}
        return values


def _square(values: Tensor) -> Tensor:
    return values.float().square().sum()


def _value(statistic: str, sums: Tensor) -> float:
    first, second = sums.tolist()
    if statistic == "nonfinite-blocks":
        return first
    ratio = first / second if second else 0.0
    return ratio if statistic == "largest-codes" else ratio**0.5


@dataclass(frozen=True)
class Shared:
    """The settings, and what all collectives of a model count and go by."""

    config: ZeroPPConfig
    waits: Waits
    traffic: Traffic = field(default_factory=Traffic)
    monitor: ErrorMonitor = field(default_factory=ErrorMonitor)
    position: StepPosition = field(default_factory=StepPosition)


def below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries of a state dict whose keys begin with ``prefix``, by the rest of the key."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
