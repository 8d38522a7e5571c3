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
    """What one ``fully_shard`` call made, or would make of an emulated model."""

    name: str  # the module's name in the model, "" is the root; "NAME[1]" is its second unit, on another mesh
    optimizer_steps: int = field(default=0, kw_only=True)  # of torch optimizers that hold parameters of this unit
    holds_gradients: bool = field(default=False, kw_only=True)  # which wait for the step's last micro-batch
    # Of the shard that went between nodes: of each of ``parts``, by its indices.
    checksums: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False, kw_only=True)
    travels_whole: bool = field(default=False, kw_only=True)  # frozen parameters as well, with those that are trained
    # Since the last gather: an optimizer stepped, or gradients came that some optimizer may have stepped with.
    may_have_stepped: bool = field(default=False, kw_only=True)
    # Indices of parameters that did not stay frozen since the last gather: those that an optimizer may have moved, and
    # those of which a step's gradients were reduced.
    _moved: set[int] = field(default_factory=set, repr=False, kw_only=True)
    _reduced: set[int] = field(default_factory=set, repr=False, kw_only=True)
    # Those that could be trained at any time since the unit was made. PEFT freezes adapters during reference passes.
    _ever_trainable: set[int] = field(default_factory=set, repr=False, kw_only=True)
    _gathered_versions: list[tuple[Any, int]] | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        self._ever_trainable |= self._trainable()

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
    def packed(self) -> frozenset[int]:
        """Indices of the parameters whose elements are packed codes, not numbers."""
        return frozenset()

    @property
    def is_in_backward(self) -> bool:
        """Whether the unit is being gathered for a backward pass."""
        raise NotImplementedError

    def parameter_shards(self, trainable_only: bool = False) -> tuple[ParameterShard, ...]:
        """The parts of a rank's flat shard, in the order in which FSDP2 concatenates them."""
        raise NotImplementedError

    def parameters_changed(self) -> bool:
        """Whether the sharded parameters may have changed since the last ``mark_gathered``; alike on all ranks.

        Goes by what every rank's program does, never by a rank's memory: replaced parameters, autograd's version
        counters of the DTensors, and the ``mark_`` methods. ``UnseenChanges`` finds what leaves no such trace.
        """
        return bool(self._changed())

    @property
    def trained(self) -> UnitPart:
        """The parameters that were ever trainable, or that optimizer steps may have moved; alike on all ranks."""
        self._ever_trainable |= self._trainable()
        indices = self._ever_trainable | self._moved | self._reduced
        if self.travels_whole:  # but for packed ones, of which no difference can be told
            indices = set(range(len(self.parameters))) - self.packed
        return UnitPart(self.parameter_shards(), tuple(sorted(indices)))

    @property
    def frozen(self) -> UnitPart:
        """The others, which stay as they are unless the program changes them."""
        indices = set(range(len(self.parameters))).difference(self.trained.indices)
        return UnitPart(self.parameter_shards(), tuple(sorted(indices)))

    @property
    def parts(self) -> tuple[UnitPart, ...]:
        """The trained part and the frozen one, but for empty ones."""
        return tuple(part for part in (self.trained, self.frozen) if part.indices)

    @property
    def whole(self) -> UnitPart:
        """All parameters."""
        return UnitPart(self.parameter_shards(), tuple(range(len(self.parameters))))

    @property
    def changed_part(self) -> UnitPart:
        """What must be gathered anew, of parameters that changed: the trained ones, or all if others did as well."""
        trained = self.trained
        return trained if self._changed().issubset(trained.indices) else self.whole

    @property
    def unchanged_parts(self) -> tuple[UnitPart, ...]:
        """Those of the ``parts`` of which nothing says that they changed."""
        if not self.parameters_changed():
            return self.parts
        changed = set(self.changed_part.indices)
        return tuple(part for part in self.parts if not changed.issuperset(part.indices))

    @property
    def keeps_copies(self) -> bool:
        """Whether the parameters are at most an optimizer step away from what was gathered.

        What a program writes by itself is further away than low-bit differences can say.
        """
        changed = self._changed()
        return not changed or (self.may_have_stepped and changed.issubset(self.trained.indices))

    def mark_gathered(self) -> None:
        """Say that the parameters as they are now have been gathered."""
        self._gathered_versions, self.may_have_stepped = self._versions(), False
        self._moved, self._reduced = set(), set()

    def mark_changed(self) -> None:
        """Make ``parameters_changed`` True until the next ``mark_gathered``."""
        self._gathered_versions = None

    def mark_moved(self, indices: Iterable[int]) -> None:
        """Say that optimizer steps have moved the parameters with these indices."""
        self._moved |= set(indices)

    def mark_stepped(self) -> None:
        """Say that a torch optimizer that holds parameters of this unit has stepped."""
        self.mark_moved(self._trainable())
        self.may_have_stepped = True
        self.optimizer_steps += 1

    def mark_reduced(self, completes_step: bool) -> None:
        """Say that gradients were reduced; if they are all of a step's, the trainable parameters count as changed.

        Not every optimizer tells of its step: home-made ones with foreach operations do not.
        """
        self.may_have_stepped = True
        if completes_step:
            self._reduced |= self._trainable()

    def check_holds_nothing(self) -> None:
        """Raise RuntimeError if gradients wait for a step's last micro-batch."""
        if self.holds_gradients:
            raise RuntimeError(
                f"an optimizer step was taken while {self.label} held gradients that had not crossed nodes: say "
                "set_is_last_micro_batch(True) before a step's last backward pass, or undo_step() to drop gradients"
            )

    def owns_any_of(self, parameters: set[int]) -> bool:
        """Whether one of the parameters with these ids is of this unit."""
        return any(id(parameter) in parameters for parameter in self.parameters)

    def _changed(self) -> set[int]:
        """The indices of the parameters that may have changed since the last ``mark_gathered``."""
        now, then = self._versions(), self._gathered_versions
        if then is None:
            return set(range(len(now)))
        changed = {index for index, pair in enumerate(zip(now, then, strict=True)) if pair[0] != pair[1]}
        # A unit used twice in one forward pass is reduced twice, and gathered in between, in backward.
        return changed | self._moved | (set() if self.is_in_backward else self._reduced)

    def _trainable(self) -> set[int]:
        return {index for index, parameter in enumerate(self.parameters) if parameter.requires_grad}

    def _versions(self) -> list[tuple[Any, int]]:
        # The parameters themselves, not their ids: an id may come again when its owner is gone.
        return [(_Same(parameter), parameter._version) for parameter in self.parameters]


class _Same:
    """Equal to another one of the same object; tensors' own == compares elements."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def follow_optimizers(units: Sequence[Unit]) -> None:
    """Let the units know of every step of a torch optimizer that holds one of their parameters.

    Fused and foreach optimizers change DTensors without bumping a version counter, so counters alone would leave
    stale weights in the secondary partition. A step while gradients are still held back raises RuntimeError, before
    it does anything; one with a closure, in which the last of them are reduced, when it is over.
    """
    references = [weakref.ref(unit) for unit in units]

    def units_of(optimizer: torch.optim.Optimizer) -> list[Unit]:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        units = [unit for reference in references if (unit := reference()) is not None]
        return [unit for unit in units if unit.owns_any_of(parameters)]

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
