"""Parameters that are gathered and reduced together: their parts, and whether they changed since the last gather."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, compress, count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..wire.format import WireFormat
from ..wire.layout import ParameterShard, WireLayout


@dataclass(frozen=True)
class UnitPart:
    """The parameters with these ``indices``, in order, of a unit with these ``shards``."""

    shards: tuple[ParameterShard, ...]
    indices: tuple[int, ...]
    _formats: dict[tuple[object, ...], WireFormat] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def whole(cls, parameters: Sequence[ParameterShard]) -> UnitPart:
        """Return the part that is all of a unit."""
        return cls(tuple(parameters), tuple(range(len(parameters))))

    @cached_property
    def is_whole(self) -> bool:
        """Whether the part is all of the unit, and ``take`` and ``put`` copy nothing."""
        return len(self.indices) == len(self.shards)

    @cached_property
    def parameters(self) -> tuple[ParameterShard, ...]:
        return tuple(self.shards[index] for index in self.indices)

    @cached_property
    def numel(self) -> int:
        """Elements of a rank's shard, l."""
        return sum(parameter.numel for parameter in self.parameters)

    def format(
        self,
        bits: int | None,
        block_size: int | None,
        dtype: torch.dtype,
        scaling: str | None = None,
        scale_dtype: torch.dtype = torch.float32,
    ) -> WireFormat:
        """Return the part's ``WireFormat`` of these arguments, made once."""
        key = bits, block_size, dtype, scaling, scale_dtype
        if key not in self._formats:
            self._formats[key] = WireFormat(self.parameters, bits, block_size, dtype, scaling, scale_dtype)
        return self._formats[key]

    @cached_property
    def columns(self) -> list[slice]:
        """Each parameter's elements of a shard [L]."""
        stops = list(accumulate(shard.numel for shard in self.shards))
        return [slice(stops[index] - self.shards[index].numel, stops[index]) for index in self.indices]

    def take(self, shards: Tensor) -> Tensor:
        """Return the part [..., l] of shards [..., L]."""
        return shards if self.is_whole else torch.cat([shards[..., column] for column in self.columns], dim=-1)

    def put(self, values: Tensor, shards: Tensor) -> Tensor:
        """Write values [..., l] over the part of shards [..., L]; return these, or the values if they are all."""
        if self.is_whole:
            return values
        pieces = values.split([parameter.numel for parameter in self.parameters], dim=-1)
        for column, piece in zip(self.columns, pieces, strict=True):
            shards[..., column] = piece
        return shards

    def take_wires(self, wires: Tensor, unit_layout: WireLayout, part_layout: WireLayout) -> Tensor:
        """Return the part, in ``part_layout``, of a unit's wire buffers uint8 [..., nbytes]."""
        if self.is_whole:
            return wires
        taken = wires.new_zeros(*wires.shape[:-1], part_layout.nbytes)
        for in_unit, in_part in self._places(unit_layout, part_layout):
            taken[..., in_part] = wires[..., in_unit]
        return taken

    def put_wires(self, values: Tensor, wires: Tensor, unit_layout: WireLayout, part_layout: WireLayout) -> Tensor:
        """Write the part's wire buffers ``values`` into a unit's ``wires``, as ``put`` does."""
        if self.is_whole:
            return values
        for in_unit, in_part in self._places(unit_layout, part_layout):
            wires[..., in_unit] = values[..., in_part]
        return wires

    def _places(self, unit_layout: WireLayout, part_layout: WireLayout) -> list[tuple[slice, slice]]:
        # Blocks never span parameters, so a parameter's bytes are the same in both.
        return [
            pair
            for position, index in enumerate(self.indices)
            for pair in zip(unit_layout.bytes_of(index), part_layout.bytes_of(position), strict=True)
        ]


@dataclass(eq=False)
class Unit:
    """One FSDP2 unit: the parameters that one ``fully_shard`` call gathers and reduces together."""

    name: str  # the module's name in the model, "" is the root; "NAME[1]" is its second unit, on another mesh
    shards: tuple[ParameterShard, ...]  # the parts of a rank's flat shard [L], in the order of ``parameters``
    packed: frozenset[int] = frozenset()  # indices of parameters whose elements are packed codes, not numbers
    whole: UnitPart = field(init=False, repr=False)  # all parameters
    optimizer_steps: int = 0  # of torch optimizers that hold parameters of this unit
    # Of the last ones: GradScaler's sum of gradients that overflowed, which a fused optimizer reads on the device.
    _found_inf: deque[Tensor | None] = field(default_factory=lambda: deque(maxlen=8), repr=False)
    holds_gradients: bool = False  # until the step's last micro-batch has crossed nodes
    # Of the shard that was last sent between nodes, for each of ``parts`` by its indices.
    checksums: dict[tuple[int, ...], Tensor] = field(default_factory=dict, repr=False)
    has_nf4: bool = field(default=False, init=False)  # whether some of ``shards`` are in NF4
    gathers_frozen: bool = False  # gather frozen parameters again whenever trained ones change
    nf4_skip: tuple[str, ...] | None = None  # words in names of frozen matrices that are not in NF4; None = none is
    # Since the last gather: whether an optimizer stepped, or gradients were reduced that some optimizer may have used;
    may_have_stepped: bool = False
    # and the indices of parameters that an optimizer may have updated, and of those whose gradients were reduced.
    _updated: set[int] = field(default_factory=set, repr=False)
    _reduced: set[int] = field(default_factory=set, repr=False)
    # Parameters that were ever trainable. PEFT freezes adapters during reference passes.
    _ever_trainable: set[int] = field(default_factory=set, repr=False)
    # The parameters as they were gathered, with autograd's version counters. Not their ids: Python reuses those.
    _gathered: list[tuple[Tensor, int]] | None = field(default=None, repr=False)
    _parts: dict[tuple[int, ...], UnitPart] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.specify(self.shards, self.packed)

    def specify(self, shards: tuple[ParameterShard, ...], packed: frozenset[int] = frozenset()) -> None:
        """Set the unit's parameters. Parts and formats follow from them, and are made once."""
        self._ever_trainable.update(self._trainable())
        if (skip := self.nf4_skip) is not None:
            fits = [shard.quantizable and not any(word in shard.name for word in skip) for shard in shards]
            fits = [fit and index not in self._ever_trainable for index, fit in enumerate(fits)]
            shards = tuple(replace(shard, is_nf4=fit) for shard, fit in zip(shards, fits, strict=True))
        self.has_nf4 = any(shard.is_nf4 for shard in shards)
        self.shards, self.packed, self._parts = shards, packed, {}
        self.whole = self.part(range(len(shards)))

    def remove_trainable_from_nf4(self) -> bool:
        """Take parameters that have become trainable out of NF4; return whether there were any."""
        if not any(self.shards[index].is_nf4 for index in self._trainable()):
            return False
        self.specify(self.shards, self.packed)
        self.mark_changed()
        return True

    @property
    def label(self) -> str:
        """The name as error messages and logs show it."""
        return self.name or "the root module"

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``fully_shard`` is given: one, or several of one unit."""
        raise NotImplementedError

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters that the optimizer updates."""
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
        """The parameters that were ever trainable, or that optimizer steps may have updated; alike on all ranks."""
        self._ever_trainable.update(self._trainable())
        if self.gathers_frozen:  # without packed ones, whose codes never change
            return self.part(index for index in range(len(self.shards)) if index not in self.packed)
        return self.part(sorted(self._ever_trainable | self._updated | self._reduced))

    @property
    def parts(self) -> tuple[UnitPart, ...]:
        """The trained part and the frozen part, without empty ones."""
        trained = self.trained
        if trained.is_whole:
            return (trained,)
        frozen = self.part(index for index in range(len(self.shards)) if index not in trained.indices)
        return (trained, frozen) if trained.indices else (frozen,)

    def changed(self) -> set[int]:
        """Return the indices of parameters that may have changed since ``mark_gathered``; alike on all ranks.

        Depends on what every rank's program does, never on a rank's memory: replaced parameters, autograd's version
        counters of the DTensors, and the ``mark_`` methods. ``UnseenChanges`` finds changes without such a trace.
        """
        if self._gathered is None:
            return set(range(len(self.shards)))
        changed = set(self._updated)
        # A unit used twice in one forward pass is reduced twice, and gathered in between, in backward.
        if self._reduced and not self.is_in_backward:
            changed |= self._reduced
        for index, (parameter, (gathered, version)) in enumerate(zip(self.parameters, self._gathered, strict=True)):
            if parameter is not gathered or parameter._version != version:
                changed.add(index)
        return changed

    def changed_part(self, changed: set[int]) -> UnitPart:
        """Return what to gather again after these changed: the trained part, or all if a frozen one changed."""
        trained = self.trained
        return trained if changed.issubset(trained.indices) else self.whole

    def unchanged_parts(self) -> tuple[UnitPart, ...]:
        """Return the ``parts`` that nothing says have changed."""
        changed = self.changed()
        if not changed:
            return self.parts
        gathered_again = set(self.changed_part(changed).indices)
        return tuple(part for part in self.parts if not gathered_again.issuperset(part.indices))

    def keeps_copies(self, changed: set[int]) -> bool:
        """Return whether these changes are at most an optimizer step away from what was gathered.

        Most codes of what a program writes by itself have moved.
        """
        return not changed or (self.may_have_stepped and changed.issubset(self.trained.indices))

    def mark_gathered(self) -> None:
        """Note that the parameters were gathered as they are now."""
        self._gathered = [(parameter, parameter._version) for parameter in self.parameters]
        self._updated, self._reduced, self.may_have_stepped = set(), set(), False

    def mark_changed(self) -> None:
        """Make all parameters count as changed until the next ``mark_gathered``."""
        self._gathered = None

    def mark_updated(self, indices: Iterable[int]) -> None:
        """Note that optimizer steps have updated the parameters with these indices."""
        self._updated.update(indices)

    def mark_stepped(self, found_inf: Tensor | None = None) -> None:
        """Note that a torch optimizer that holds parameters of this unit has stepped.

        found_inf: for a fused one, of GradScaler: it has changed nothing if this is not zero.
        """
        # Optimizers also update parameters that were frozen after they got a gradient.
        self._updated.update([i for i, p in enumerate(self.parameters) if p.requires_grad or p.grad is not None])
        self.may_have_stepped = True
        self.optimizer_steps += 1
        self._found_inf.append(found_inf)

    def has_stepped_since(self, optimizer_steps: int) -> bool:
        """Return whether an optimizer has changed parameters since then. The host waits for a fused one's answer."""
        made = self.optimizer_steps - optimizer_steps
        return any(found_inf is None or not found_inf for found_inf in list(self._found_inf)[-made:]) if made else False

    def mark_reduced(self, completed: Sequence[int] = ()) -> None:
        """Note that gradients were reduced. Parameters whose gradients of a step are ``completed`` count as changed.

        Not every optimizer runs torch's step hooks: home-made ones with foreach operations do not.
        """
        self.may_have_stepped = True
        self._reduced.update(completed)

    def check_holds_nothing(self) -> None:
        """Raise RuntimeError if gradients are kept for a step's last micro-batch."""
        if self.holds_gradients:
            raise RuntimeError(
                f"an optimizer step was taken while {self.label} held gradients that had not crossed nodes: call "
                "set_is_last_micro_batch(True) before a step's last backward pass, or undo_step() to drop gradients"
            )

    def _trainable(self) -> list[int]:
        return list(compress(count(), map(attrgetter("requires_grad"), self.parameters)))


def follow_optimizers(units: Sequence[Unit]) -> None:
    """Mark the units at every step of a torch optimizer that holds one of their parameters.

    Fused and foreach optimizers change DTensors without bumping a version counter, so counters alone would leave stale
    weights in the secondary partition. A step while gradients are held raises RuntimeError before it does anything; a
    step with a closure, which may reduce the last of them, raises it at its end.
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
            unit.mark_stepped(getattr(optimizer, "found_inf", None))

    # Never removed: that could happen while some optimizer's step iterates over its hooks.
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
