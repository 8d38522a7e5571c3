"""A list of parameters that are gathered and reduced together, and whether they changed since the last gather."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .unit_part import UnitPart
from .wire_layout import ParameterShard


@dataclass(eq=False)
class Unit:
    """The parameters that one ``fully_shard`` call gathers and reduces together, or would of an emulated model."""

    name: str  # the module's name in the model, "" is the root; "NAME[1]" is its second unit, on another mesh
    shards: tuple[ParameterShard, ...]  # the parts of a rank's flat shard [L], in the order of ``parameters``
    # Indices of the parameters whose elements are packed codes, not numbers.
    packed: frozenset[int] = field(default=frozenset(), kw_only=True)
    whole: UnitPart = field(init=False, repr=False)  # all parameters
    optimizer_steps: int = field(default=0, kw_only=True)  # of torch optimizers that hold parameters of this unit
    holds_gradients: bool = field(default=False, kw_only=True)  # which wait for the step's last micro-batch
    # Of the shard that went between nodes: of each of ``parts``, by its indices.
    checksums: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False, kw_only=True)
    gathers_frozen: bool = field(default=False, kw_only=True)  # with those that are trained, whenever these change
    # Since the last gather: an optimizer stepped, or gradients came that some optimizer may have stepped with.
    may_have_stepped: bool = field(default=False, kw_only=True)
    # Indices of parameters that did not stay frozen since the last gather: those that an optimizer may have moved, and
    # those of which a step's gradients were reduced.
    _moved: set[int] = field(default_factory=set, repr=False, kw_only=True)
    _reduced: set[int] = field(default_factory=set, repr=False, kw_only=True)
    # Those that could be trained at any time since the unit was made. PEFT freezes adapters during reference passes.
    _ever_trainable: set[int] = field(default_factory=set, repr=False, kw_only=True)
    # The parameters as they were gathered, with autograd's version counters. Not their ids: those may come again.
    _gathered: list[tuple[Tensor, int]] | None = field(default=None, repr=False, kw_only=True)
    _parts: dict[tuple[int, ...], UnitPart] = field(default_factory=dict, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self.specify(self.shards, self.packed)

    def specify(self, shards: tuple[ParameterShard, ...], packed: frozenset[int] = frozenset()) -> None:
        """Set what the unit consists of. Parts and formats follow from it, and are made once for each."""
        self.shards, self.packed, self._parts = shards, packed, {}
        self.whole = self.part(range(len(shards)))
        self._ever_trainable.update(self._trainable())

    @property
    def label(self) -> str:
        """The name as error messages and logs show it."""
        return self.name or "the root module"

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What ``fully_shard`` is given: one module, or several of one unit."""
        raise NotImplementedError

    @property
    def parameters(self) -> Sequence[Tensor]:
        """What the optimizer moves."""
        raise NotImplementedError

    @property
    def is_in_backward(self) -> bool:
        """Whether the unit is being gathered for a backward pass."""
        raise NotImplementedError

    def part(self, indices: Iterable[int]) -> UnitPart:
        """Return the part of the parameters with these indices, in order."""
        key = tuple(indices)
        if key not in self._parts:
            self._parts[key] = UnitPart(self.shards, key)
        return self._parts[key]

    @property
    def trainable(self) -> UnitPart:
        """The parameters that get gradients now."""
        return self.part(self._trainable())

    @property
    def trained(self) -> UnitPart:
        """The parameters that were ever trainable, or that optimizer steps may have moved; alike on all ranks."""
        self._ever_trainable.update(self._trainable())
        if self.gathers_frozen:  # but for packed ones, of which no difference can be told
            return self.part(index for index in range(len(self.shards)) if index not in self.packed)
        return self.part(sorted(self._ever_trainable | self._moved | self._reduced))

    @property
    def parts(self) -> tuple[UnitPart, ...]:
        """The trained part and the frozen one, but for empty ones."""
        trained = self.trained
        if trained.is_whole:
            return (trained,)
        frozen = self.part(index for index in range(len(self.shards)) if index not in trained.indices)
        return (trained, frozen) if trained.indices else (frozen,)

    def changed(self) -> set[int]:
        """The indices of the parameters that may have changed since the last ``mark_gathered``; alike on all ranks.

        Goes by what every rank's program does, never by a rank's memory: replaced parameters, autograd's version
        counters of the DTensors, and the ``mark_`` methods. ``UnseenChanges`` finds what leaves no such trace.
        """
        if self._gathered is None:
            return set(range(len(self.shards)))
        # A unit used twice in one forward pass is reduced twice, and gathered in between, in backward.
        changed = self._moved | (set() if self.is_in_backward else self._reduced)
        for index, (parameter, (gathered, version)) in enumerate(zip(self.parameters, self._gathered, strict=True)):
            if parameter is not gathered or parameter._version != version:
                changed.add(index)
        return changed

    def changed_part(self, changed: set[int]) -> UnitPart:
        """What must be gathered again, of parameters that changed: the trained ones, or all if others did as well."""
        trained = self.trained
        return trained if changed.issubset(trained.indices) else self.whole

    def unchanged_parts(self) -> tuple[UnitPart, ...]:
        """Those of the ``parts`` of which nothing says that they changed."""
        changed = self.changed()
        if not changed:
            return self.parts
        gathered_again = set(self.changed_part(changed).indices)
        return tuple(part for part in self.parts if not gathered_again.issuperset(part.indices))

    def keeps_copies(self, changed: set[int]) -> bool:
        """Whether the parameters, of which these changed, are at most an optimizer step away from what was gathered.

        What a program writes by itself is further away than low-bit differences can say.
        """
        return not changed or (self.may_have_stepped and changed.issubset(self.trained.indices))

    def mark_gathered(self) -> None:
        """Say that the parameters as they are now have been gathered."""
        self._gathered = [(parameter, parameter._version) for parameter in self.parameters]
        self._moved, self._reduced, self.may_have_stepped = set(), set(), False

    def mark_changed(self) -> None:
        """Make all parameters count as changed until the next ``mark_gathered``."""
        self._gathered = None

    def mark_moved(self, indices: Iterable[int]) -> None:
        """Say that optimizer steps have moved the parameters with these indices."""
        self._moved.update(indices)

    def mark_stepped(self) -> None:
        """Say that a torch optimizer that holds parameters of this unit has stepped."""
        self._moved.update(self._trainable())
        self.may_have_stepped = True
        self.optimizer_steps += 1

    def mark_reduced(self, completes_step: bool) -> None:
        """Say that gradients were reduced; if they are all of a step's, the trainable parameters count as changed.

        Not every optimizer tells of its step: home-made ones with foreach operations do not.
        """
        self.may_have_stepped = True
        if completes_step:
            self._reduced.update(self._trainable())

    def check_holds_nothing(self) -> None:
        """Raise RuntimeError if gradients wait for a step's last micro-batch."""
        if self.holds_gradients:
            raise RuntimeError(
                f"an optimizer step was taken while {self.label} held gradients that had not crossed nodes: say "
                "set_is_last_micro_batch(True) before a step's last backward pass, or undo_step() to drop gradients"
            )

    def _trainable(self) -> list[int]:
        return [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]


def follow_optimizers(units: Sequence[Unit]) -> None:
    """Let the units know of every step of a torch optimizer that holds one of their parameters.

    Fused and foreach optimizers change DTensors without bumping a version counter, so counters alone would leave
    stale weights in the secondary partition. A step while gradients are still held back raises RuntimeError, before
    it does anything; one with a closure, in which the last of them are reduced, when it is over.
    """
    references = [weakref.ref(unit) for unit in units]

    def units_of(optimizer: torch.optim.Optimizer) -> list[Unit]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        units = [unit for reference in references if (unit := reference()) is not None]
        return [unit for unit in units if not held.isdisjoint(map(id, unit.parameters))]

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not any(callable(argument) for argument in (*args, *kwargs.values())):
            for unit in units_of(optimizer):
                unit.check_holds_nothing()

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for unit in units_of(optimizer):
            unit.check_holds_nothing()
            unit.mark_stepped()

    # Never removed: that could happen while some optimizer's step iterates over its hooks.
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
