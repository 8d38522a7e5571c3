"""A list of parameters that are gathered and reduced together, and whether they changed since the last gather."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .wire_layout import ParameterShard


@dataclass(eq=False)
class Unit:
    """What one ``fully_shard`` call made, or would make of an emulated model."""

    name: str  # the module's name in the model; "" is the root
    optimizer_steps: int = field(default=0, kw_only=True)  # of torch optimizers that hold parameters of this unit
    _reduced: bool = field(default=False, kw_only=True)  # gradients were reduced since the last gather
    _gathered_versions: list[tuple[Any, int]] | None = field(default=None, repr=False, kw_only=True)

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

    def parameter_shards(self, trainable_only: bool = False) -> tuple[ParameterShard, ...]:
        """The parts of a rank's flat shard, in the order in which FSDP2 concatenates them."""
        raise NotImplementedError

    def parameters_changed(self) -> bool:
        """Whether the sharded parameters may have changed since the last ``mark_gathered``; alike on all ranks.

        Goes by what every rank's program does, never by a rank's memory: replaced parameters, autograd's version
        counters of the DTensors, and ``mark_changed`` and ``mark_reduced``.
        """
        # A unit used twice in one forward pass is reduced twice, and gathered in between, in backward.
        may_have_stepped = self._reduced and not self.is_in_backward
        return may_have_stepped or self._versions() != self._gathered_versions

    def mark_gathered(self) -> None:
        """Say that the parameters as they are now have been gathered."""
        self._gathered_versions, self._reduced = self._versions(), False

    def mark_changed(self) -> None:
        """Make ``parameters_changed`` True until the next ``mark_gathered``."""
        self._gathered_versions = None

    def mark_reduced(self) -> None:
        """Say that an optimizer step follows; not every optimizer tells (home-made ones with foreach operations)."""
        self._reduced = True

    def owns_any_of(self, parameters: set[int]) -> bool:
        """Whether one of the parameters with these ids is of this unit."""
        return any(id(parameter) in parameters for parameter in self.parameters)

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
    stale weights in the secondary partition.
    """
    references = [weakref.ref(unit) for unit in units]

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for reference in references:
            if (unit := reference()) is not None and unit.owns_any_of(parameters):
                unit.mark_changed()
                unit.optimizer_steps += 1

    # Never removed: that could happen while some optimizer's step iterates over its hooks.
    register_optimizer_step_post_hook(after_step)
