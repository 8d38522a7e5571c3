"""What ZeRO++ has to know of FSDP2's units. The only file that reads FSDP2's private attributes.

A unit is what one ``fully_shard`` call made: a list of parameters that are gathered and reduced together.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from .wire_format import ParameterShard


@dataclass(eq=False)
class FSDPUnit:
    """One FSDP2 unit: its module, its process group and its parameters' shards."""

    name: str  # the module's name in the model; "" is the root
    module: FSDPModule
    _param_group: Any = field(repr=False)
    optimizer_steps: int = 0  # of torch optimizers that hold parameters of this unit
    _reduced: bool = False  # gradients were reduced since the last gather
    _gathered_versions: list[tuple[Any, int]] | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """The name as error messages and logs show it."""
        return self.name or "the root module"

    @property
    def device(self) -> torch.device:
        device: torch.device = self._param_group.device
        return device

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What ``fully_shard`` was given: one module, or several of one unit."""
        return tuple(self._param_group.modules)

    @property
    def group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._param_group.mesh_info.shard_process_group
        return group

    def parameter_shards(self, trainable_only: bool = False) -> tuple[ParameterShard, ...]:
        """The parts of a rank's flat shard, in the order in which FSDP2 concatenates them."""
        return tuple(
            ParameterShard(
                param._param_fqn or f"parameter {index}",
                numel=param.padded_sharded_param_size.numel(),
                quantizable=param.sharded_param.ndim >= 2,
            )
            for index, param in enumerate(self._param_group.fsdp_params)
            if param.sharded_param.requires_grad or not trainable_only
        )

    def parameters_changed(self) -> bool:
        """Whether the sharded parameters may have changed since the last ``mark_gathered``; alike on all ranks.

        Goes by what every rank's program does, never by a rank's memory: replaced parameters, autograd's version
        counters of the DTensors, and ``mark_changed`` and ``mark_reduced``.
        """
        # A unit used twice in one forward pass is reduced twice, and gathered in between, in backward.
        may_have_stepped = self._reduced and self._param_group._training_state.name != "PRE_BACKWARD"
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
        return any(id(param.sharded_param) in parameters for param in self._param_group.fsdp_params)

    def _versions(self) -> list[tuple[Any, int]]:
        # The parameters themselves, not their ids: an id may come again when its owner is gone.
        return [(_Same(param.sharded_param), param.sharded_param._version) for param in self._param_group.fsdp_params]


class _Same:
    """Equal to another one of the same object; tensors' own == compares elements."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def find_units(model: nn.Module) -> list[FSDPUnit]:
    """The FSDP2 units of ``model``, in module order. Raises ValueError for what ZeRO++ does not support, by name."""
    units: list[FSDPUnit] = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        if len(groups) > 1:
            raise ValueError(f"{name or 'the root module'} shards its parameters over several meshes; use one mesh")
        # fully_shard([a, b]) makes one unit of two modules.
        known = {id(unit._param_group) for unit in units}
        units += [FSDPUnit(name, module, group) for group in groups if id(group) not in known]
    if not units:
        raise ValueError("the model has no FSDP2 units: call torch.distributed.fsdp.fully_shard on it first")
    for unit in units:
        mesh_info = unit._param_group.mesh_info
        if hasattr(mesh_info, "replicate_process_group"):
            raise ValueError(f"{unit.label} is sharded over a two-dimensional (HSDP) mesh; ZeRO++ needs a flat one")
        if not type(unit._param_group._all_gather_comm).__module__.startswith("torch."):
            raise ValueError(f"{unit.label} has a custom all-gather already: apply ZeRO++ once, to the whole model")
        if unit._param_group._use_post_forward_mesh:
            raise ValueError(
                f"{unit.label} has reshard_after_forward=<int>, FSDP2's own secondary partition; pass True and set "
                "hpz_partition_size instead"
            )
    return units


def follow_optimizers(units: list[FSDPUnit]) -> None:
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
