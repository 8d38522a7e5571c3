"""The FSDP2 units of a model: found and given collectives when ZeRO++ is applied, checked in the first pass."""

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from ..wire.layout import ParameterShard
from .collectives import count_all_reduce
from .fsdp_unit import FSDPUnit
from .shared import Traffic
from .topology import Topology, build_topology, ranks_per_node_of_part


def find_units(model: nn.Module, ranks_per_node: int | None) -> list[FSDPUnit]:
    """Find the FSDP2 units of ``model``, in module order, each with the topology of its process group. Collective.

    ``ranks_per_node``: of the largest group, None = as its ranks run; a group of some of its ranks has those nodes.
    Raises ValueError for what ZeRO++ does not support, by name.
    """
    units: list[FSDPUnit] = []
    topologies: dict[dist.ProcessGroup, Topology] = {}
    found = _find_param_groups(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    largest = max((group.mesh_info.shard_process_group for _, _, group in found), key=lambda group: group.size())

    def topology_of(group: dist.ProcessGroup, ranks_per_node: int | None) -> Topology:
        if group not in topologies:
            topologies[group] = build_topology(group, ranks_per_node)
        return topologies[group]

    for name, module, param_group in found:
        mesh_info, replicas, per_node = param_group.mesh_info, None, ranks_per_node
        group = mesh_info.shard_process_group
        if hasattr(mesh_info, "replicate_process_group"):
            # Consecutive ranks share shards: a node has a part of them, or several times all.
            replicas = topology_of(mesh_info.replicate_process_group, per_node and max(1, per_node // group.size()))
            per_node = per_node and min(per_node, group.size())
        elif per_node is not None:
            per_node = ranks_per_node_of_part(group, largest, per_node)
        params = param_group.fsdp_params
        param_names = [names.get(id(param.sharded_param), f"parameter {i}") for i, param in enumerate(params)]
        shards = specification(param_group, param_names)
        units.append(FSDPUnit(name, shards, module, topology_of(group, per_node), replicas, param_group))
    return units


def _find_param_groups(model: nn.Module) -> list[tuple[str, FSDPModule, Any]]:
    """Return FSDP2's record of each unit, with the name and the module of the unit."""
    found: list[tuple[str, FSDPModule, Any]] = []
    for name, module in model.named_modules():
        groups = _param_groups_of(module) if isinstance(module, FSDPModule) else []
        for index, group in enumerate(groups):
            # fully_shard([a, b]) makes one unit of two modules; a shard_placement_fn one for each mesh of a module.
            if all(group is not known for _, _, known in found):
                found.append((f"{name or 'root'}[{index}]" if index > 0 else name, module, group))
    if not found:
        raise ValueError("the model has no FSDP2 units: call torch.distributed.fsdp.fully_shard on it first")
    if len({param_group.device for _, _, param_group in found}) > 1:
        raise ValueError("the model's FSDP2 units are on several devices; shard it over meshes of one device type")
    for name, _, param_group in found:
        label = name or "the root module"
        if not hasattr(param_group.mesh_info, "shard_process_group"):
            raise ValueError(f"{label} is replicated, not sharded: call fully_shard on it, not replicate")
        if hasattr(param_group.mesh_info, "replicate_process_group") and param_group._all_reduce_hook is not None:
            raise ValueError(f"{label} has an all-reduce hook already: apply ZeRO++ before set_all_reduce_hook")
        comms = type(param_group._all_gather_comm), type(param_group._reduce_scatter_comm)
        if comms != (DefaultAllGather, DefaultReduceScatter):
            raise ValueError(
                f"{label} has collectives other than FSDP2's default already ({comms[0].__name__}, "
                f"{comms[1].__name__}), which ZeRO++ would replace: leave out set_custom_all_gather, "
                "set_symm_mem_for_comm and the like, and apply ZeRO++ once, to the whole model"
            )
        if param_group.post_forward_mesh_info not in (None, param_group.mesh_info):
            raise ValueError(
                f"{label} has reshard_after_forward=<int>, FSDP2's own secondary partition; pass True and set "
                "hpz_partition_size instead"
            )
    return found


def _param_groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def specification(param_group: Any, names: Sequence[str]) -> tuple[ParameterShard, ...]:
    """Return a rank's shards, in the order in which FSDP2 concatenates them."""
    return tuple(
        ParameterShard(
            name,
            numel=param.padded_sharded_param_size.numel(),
            quantizable=param.sharded_param.ndim >= 2 and not _is_packed(param),
        )
        for name, param in zip(names, param_group.fsdp_params, strict=True)
    )


@torch.no_grad()
def _is_packed(param: Any) -> bool:
    """Return whether elements of one of FSDP2's parameters are packed low-bit codes, not numbers.

    bitsandbytes (nf4, fp4) keeps the way to unpack them in ``quant_state``, on the module once FSDP2 has replaced the
    parameter; its storage may have a floating-point dtype. Others subclass tensors, or have integers.
    """
    sharded = param.sharded_param
    has_state = any(getattr(owner, "quant_state", None) is not None for owner in (sharded, param._module_info.module))
    return has_state or hasattr(sharded.detach().to_local(), "__tensor_flatten__") or not sharded.is_floating_point()


def check_units(model: nn.Module, units: Sequence[FSDPUnit]) -> None:
    """Read the units' parameters again, as some may be packed by now. Raises RuntimeError if there are new units."""
    known = {id(unit._param_group) for unit in units}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and any(id(group) not in known for group in _param_groups_of(module)):
            raise RuntimeError(
                f"fully_shard was called on {name or 'the root module'} after apply_zeropp, which does not know of it: "
                "call apply_zeropp after the last fully_shard"
            )
    for unit in units:
        unit.specify(specification(unit._param_group, [shard.name for shard in unit.shards]))


def set_collectives(unit: FSDPUnit) -> None:
    """Let FSDP2 gather the unit with ``unit.all_gather``, and reduce it with ``unit.reduce_scatter``."""
    # As set_custom_all_gather does, but that refuses a module whose parameters have several meshes.
    unit._param_group._all_gather_comm, unit._param_group._reduce_scatter_comm = unit.all_gather, unit.reduce_scatter


def count_all_reduces(unit: FSDPUnit, traffic: Traffic) -> None:
    """Count FSDP2's own all-reduces of the unit's gradients over its replicas, if it has any (HSDP)."""
    replicas = unit.replicas
    if replicas is not None:
        unit._param_group._all_reduce_hook = lambda reduced: count_all_reduce(traffic, replicas, reduced.nbytes)


_COLLECTIVES = {
    "unshard": "all-gather",
    "wait_for_unshard": "all-gather",
    "post_backward": "reduce-scatter",
    "finalize_backward": "reduce-scatter",
}


def collective_of(frame: FrameType) -> str | None:
    """Return the FSDP2 collective that a traceback's frame belongs to, as "the all-gather of layers.3", or None."""
    name = frame.f_code.co_name
    owner: Any = frame.f_locals.get("self")
    if type(owner).__name__ != "FSDPParamGroup" or name not in _COLLECTIVES:
        return None
    return f"the {_COLLECTIVES[name]} of {owner._module_fqn or 'the root module'}"
