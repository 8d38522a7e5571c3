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
    _gathered_versions: list[tuple[int, int, int]] | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """The name as error messages and logs show it."""
        return self.name or "the root module"

    @property
    def device(self) -> torch.device:
        device: torch.device = self._param_group.device
        return device

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
        """Whether the sharded parameters may have changed since the last ``mark_gathered``.

        Sees in-place operations by autograd's version counters, of the DTensor and of its local tensor, and replaced
        tensors. Fused and foreach optimizers and writes to ``.data`` bump no counter: see ``mark_changed``.
        """
        return self._versions() != self._gathered_versions

    def mark_gathered(self) -> None:
        """Say that the parameters as they are now have been gathered."""
        self._gathered_versions = self._versions()

    def _versions(self) -> list[tuple[int, int, int]]:
        sharded = [fsdp_param.sharded_param for fsdp_param in self._param_group.fsdp_params]
        return [(p._local_tensor.data_ptr(), p._version, p._local_tensor._version) for p in sharded]

    def mark_changed(self) -> None:
        """Make ``parameters_changed`` True until the next ``mark_gathered``."""
        self._gathered_versions = None


def find_units(model: nn.Module) -> list[FSDPUnit]:
    """The FSDP2 units of ``model``, in module order. Raises ValueError for what ZeRO++ does not support, by name."""
    units = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        if len(groups) > 1:
            raise ValueError(f"{name or 'the root module'} shards its parameters over several meshes; use one mesh")
        units += [FSDPUnit(name, module, group) for group in groups]
    if not units:
        raise ValueError("the model has no FSDP2 units: call torch.distributed.fsdp.fully_shard on it first")
    for unit in units:
        mesh_info = unit._param_group.mesh_info
        if hasattr(mesh_info, "replicate_process_group"):
            raise ValueError(f"{unit.label} is sharded over a two-dimensional (HSDP) mesh; ZeRO++ needs a flat one")
        if unit._param_group._use_post_forward_mesh:
            raise ValueError(
                f"{unit.label} has reshard_after_forward=<int>, FSDP2's own secondary partition; pass True and set "
                "hpz_partition_size instead"
            )
    return units


def mark_changed_on_optimizer_step(units: list[FSDPUnit]) -> None:
    """After every step of any torch optimizer, take the units' parameters as changed.

    Fused and foreach optimizers change DTensors without bumping a version counter, so counters alone would leave
    stale weights in the secondary partition.
    """
    references = [weakref.ref(unit) for unit in units]  # the hook outlives the model, and then does nothing

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for reference in references:
            if (unit := reference()) is not None:
                unit.mark_changed()

    register_optimizer_step_post_hook(after_step)
