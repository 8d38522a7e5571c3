"""FSDP2's units, as ZeRO++ sees them. The only file that reads FSDP2's private attributes.

A unit is a list of parameters that are gathered and reduced together: all of one ``fully_shard`` call, or those of them
on one mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllocMixin,
    _get_gradient_divide_factors,
    _get_param_all_gather_inputs,
)

from ..wire.layout import ParameterShard
from .topology import Topology, build_topology, ranks_per_node_of_part
from .unit import Unit, UnitPart
from .waits import Waits

__all__ = ["AllGather", "DefaultAllocMixin", "ReduceScatter"]  # for the collectives that replace FSDP2's


@dataclass(eq=False, kw_only=True)
class FSDPUnit(Unit):
    """One FSDP2 unit: its module, the ranks and nodes that share it, and its parameters' shards."""

    module: FSDPModule
    topology: Topology
    replicas: Topology | None  # with HSDP: the ranks that hold the same shard, whose gradients FSDP2 all-reduces
    _param_group: Any = field(repr=False)
    waits: Waits = field(repr=False)  # of all units of the model
    _collectives: tuple[AllGather, ReduceScatter] | None = field(default=None, repr=False, init=False)
    # Indices of the parameters whose gradients the last reduction, or the one that runs, takes.
    reduced: tuple[int, ...] = field(default=(), repr=False, init=False)
    # In this step so far, by index: the parameters that got a gradient, and those that had none when it began.
    _used: set[int] = field(default_factory=set, repr=False, init=False)
    _without_gradient: set[int] | None = field(default=None, repr=False, init=False)

    @cached_property
    def device(self) -> torch.device:
        device: torch.device = self._param_group.device
        return device

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``fully_shard`` was given: one, or several of one unit."""
        return tuple(self._param_group.modules)

    @property
    def parameters(self) -> Sequence[Tensor]:
        return list(map(attrgetter("sharded_param"), self._param_group.fsdp_params))

    def respecify(self) -> None:
        """Read the unit's parameters again: programs may have loaded packed ones since."""
        self.specify(*_specification(self._param_group, [shard.name for shard in self.shards]))

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype of gathered parameters, from the mixed-precision policy, so also before the first pass."""
        dtype: torch.dtype | None = self._param_group.mp_policy.param_dtype
        return dtype if dtype is not None else self.parameters[0].dtype

    @property
    def is_in_backward(self) -> bool:
        # Activation checkpointing runs forward passes within the backward pass.
        return torch._C._current_graph_task_id() != -1 or self._param_group._training_state.name == "PRE_BACKWARD"

    @property
    def is_in_forward(self) -> bool:
        """Whether the unit is being gathered for a forward pass, not by ``unshard()``."""
        return bool(self._param_group._training_state.name == "FORWARD")

    @property
    def is_sharded(self) -> bool:
        """Whether the unit must be gathered before it is used."""
        return bool(self._param_group.is_sharded)

    @property
    def can_be_gathered(self) -> bool:
        """Whether FSDP2 could gather the unit now: it is sharded, and a pass has initialized it."""
        return bool(self._param_group.is_sharded and self._param_group._reset_sharded_params)

    def flat_shard(self) -> Tensor:
        """Return the shard [L] as FSDP2 would hand it to a gather now."""
        # FSDP2's function casts all parameters in one launch.
        return torch.cat([*chain.from_iterable(_get_param_all_gather_inputs(self._param_group.fsdp_params))])

    def set_collectives(self, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
        """Let FSDP2 gather and reduce this unit with these."""
        # As set_custom_all_gather does, but that refuses a module whose parameters have several meshes.
        self._param_group._all_gather_comm, self._param_group._reduce_scatter_comm = all_gather, reduce_scatter
        self._collectives = all_gather, reduce_scatter

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Let FSDP2 call ``hook`` with what it has all-reduced over replicas."""
        self._param_group._all_reduce_hook = hook

    def follow_backward(self, reduces_unused: bool) -> None:
        """Wrap FSDP2's ``post_backward`` with what ZeRO++ needs before it, and time where FSDP2 waits.

        reduces_unused: let FSDP2 reduce zeros for trainable parameters that a backward pass did not use.
        """
        group = self._param_group
        if self.waits.device.type == "cuda":  # where FSDP2 lets the stream that computes wait; on a CPU streams are one
            for name in ("wait_for_unshard", "post_backward", "finalize_backward"):
                setattr(group, name, self.waits.stall()(getattr(group, name)))
        if not reduces_unused:
            return
        reduce = group.post_backward

        def post_backward(*arguments: Any) -> None:
            if group.reduce_grads:
                self._complete_gradients()
            reduce(*arguments)

        group.post_backward = post_backward

    def check_collectives(self) -> None:
        """Raise RuntimeError if FSDP2 was given other collectives since."""
        group = self._param_group
        if self._collectives != (group._all_gather_comm, group._reduce_scatter_comm):
            raise RuntimeError(
                f"the collectives of {self.label} were replaced after apply_zeropp, by set_custom_all_gather or "
                "set_custom_reduce_scatter: leave those of ZeRO++ in place, or do not apply it"
            )

    @property
    def is_read_in_backward(self) -> bool:
        """Whether reduced gradients are read before the backward pass is over, or its end is unknown."""
        # Pipeline schedules that split the backward pass call FSDP2 by hand, when none runs.
        hooks = [getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self.parameters]
        return any(hooks) or self._param_group._all_reduce_hook is not None or backward_pass() == -1

    def divisor_after_reduction(self, dtype: torch.dtype, group: dist.ProcessGroup) -> float | None:
        """Return what FSDP2 divides gradients of ``dtype`` by after the reduction; None = nothing."""
        unit = self._param_group
        factor, sums = unit.gradient_divide_factor, unit.force_sum_reduction_for_comms
        _, divisor, _, _ = _get_gradient_divide_factors(group, None, dtype, unit.device.type, factor, sums)
        return divisor

    def add_gradient(self, part: UnitPart, shard: Tensor) -> None:
        """Add a reduced gradient fp32 [L] to the ``.grad`` of a part's parameters, which FSDP2 has made."""
        params = self._param_group.fsdp_params
        gradients = [params[index].sharded_param.grad.to_local() for index in part.indices]
        shard = shard.to(gradients[0].device)  # offloaded ones are in host memory
        pieces = shard.split([parameter.numel for parameter in part.parameters])
        # FSDP2's padding is at the end of each.
        unpadded = [piece[: g.numel()].view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]
        torch._foreach_add_(gradients, unpadded)

    def _complete_gradients(self) -> None:
        """Note which parameters are used, give each that must be reduced a gradient, and set ``reduced``.

        Trainable parameters that this backward pass did not use get zeros, and so do parameters that were frozen after
        a micro-batch whose gradients are held. All gradients get one dtype, since FSDP2 reduces no others: passes that
        did not reduce left sums in ``reduce_dtype``.
        """
        params = self._params_once_gathered()
        if self._without_gradient is None:
            self._without_gradient = {i for i, parameter in enumerate(self.parameters) if parameter.grad is None}
        held, reduced, has_sums = self.reduced if self.holds_gradients else (), list[int](), False
        for index, param in enumerate(params):
            if param.unsharded_accumulated_grad is not None:
                has_sums = True
                self._used.add(index)
            elif param.unsharded_param.grad is not None:
                self._used.add(index)
        for index, param in enumerate(params):
            unsharded = param.unsharded_param
            # FSDP2 copies the flag when it gathers, which it does not do for a pass that skips the unit.
            unsharded.requires_grad_(param.sharded_param.requires_grad)
            if param.unsharded_accumulated_grad is None:
                if unsharded.grad is None and (unsharded.requires_grad or index in held):
                    unsharded.grad = torch.zeros_like(unsharded)
                if unsharded.grad is not None and has_sums:
                    param.unsharded_accumulated_grad, unsharded.grad = unsharded.grad.to(param.reduce_dtype), None
            if unsharded.grad is not None or param.unsharded_accumulated_grad is not None:
                reduced.append(index)
        self.reduced = tuple(reduced)

    def use(self) -> list[bool]:
        """Return whether this step used each parameter; True for those with no gradient, or with an older one."""
        unused = (self._without_gradient or set()) - self._used
        return [i not in unused or parameter.grad is None for i, parameter in enumerate(self.parameters)]

    def drop_gradients(self) -> None:
        """Drop the gradients that passes without ``set_requires_gradient_sync`` left for the next reduction."""
        for param in self._params_once_gathered():
            param.unsharded_accumulated_grad = param.unsharded_param.grad = None

    def _params_once_gathered(self) -> list[Any]:
        """Return FSDP2's record of each parameter; [] until the unit has been gathered, which is all of it at once."""
        params: list[Any] = self._param_group.fsdp_params
        return params if hasattr(params[-1], "_unsharded_param") else []

    def forget_use(self) -> None:
        """Begin another step."""
        self._used, self._without_gradient = set(), None

    @property
    def is_last_backward(self) -> bool:
        """The flag that ``set_is_last_backward`` gave the root of the pass that runs."""
        return bool(self.module._get_fsdp_state()._state_ctx.is_last_backward)

    @property
    def stays_gathered(self) -> bool:
        """Whether a forward pass leaves the parameters gathered for the passes that follow."""
        return not self._param_group._reshard_after_forward


def _specification(param_group: Any, names: Sequence[str]) -> tuple[tuple[ParameterShard, ...], frozenset[int]]:
    """Return a rank's shards, in the order in which FSDP2 concatenates them, and the indices of packed ones."""
    params = param_group.fsdp_params
    packed = frozenset(index for index, param in enumerate(params) if _is_packed(param))
    shards = [
        ParameterShard(
            name,
            numel=param.padded_sharded_param_size.numel(),
            quantizable=param.sharded_param.ndim >= 2 and index not in packed,
        )
        for index, (name, param) in enumerate(zip(names, params, strict=True))
    ]
    return tuple(shards), packed


def _is_packed(param: Any) -> bool:
    """Return whether elements of one of FSDP2's parameters are packed low-bit codes, not numbers.

    bitsandbytes (nf4, fp4) keeps the way to unpack them in ``quant_state``, on the module once FSDP2 has replaced the
    parameter; its storage may have a floating-point dtype. Others subclass tensors, or have integers.
    """
    sharded = param.sharded_param
    has_state = any(getattr(owner, "quant_state", None) is not None for owner in (sharded, param._module_info.module))
    return has_state or hasattr(sharded._local_tensor, "__tensor_flatten__") or not sharded.is_floating_point()


def find_units(model: nn.Module, ranks_per_node: int | None) -> list[FSDPUnit]:
    """Find the FSDP2 units of ``model``, in module order, each with the topology of its process group.

    Units may have different groups. ``ranks_per_node``: of the largest group, None = as its ranks run; a group of some
    of its ranks has those nodes. Collective over all groups. Raises ValueError for what ZeRO++ does not support, by
    name.
    """
    units: list[FSDPUnit] = []
    topologies: dict[dist.ProcessGroup, Topology] = {}
    found = _find_param_groups(model)
    waits = Waits(found[0][2].device)
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
        topology = topology_of(group, per_node)
        params = param_group.fsdp_params
        param_names = [names.get(id(param.sharded_param), f"parameter {i}") for i, param in enumerate(params)]
        spec = _specification(param_group, param_names)
        units.append(
            FSDPUnit(
                name, *spec, module=module, topology=topology, replicas=replicas, waits=waits, _param_group=param_group
            )
        )
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
        if not type(param_group._all_gather_comm).__module__.startswith("torch."):
            raise ValueError(f"{label} has a custom all-gather already: apply ZeRO++ once, to the whole model")
        if param_group._use_post_forward_mesh:
            raise ValueError(
                f"{label} has reshard_after_forward=<int>, FSDP2's own secondary partition; pass True and set "
                "hpz_partition_size instead"
            )
    return found


def _param_groups_of(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def follow_forward_passes(model: nn.Module, units: Sequence[FSDPUnit], begin: Callable[[bool], None]) -> None:
    """Call ``begin(is_last)`` before each forward pass of ``model``, or of a part of it, gathers anything.

    is_last: whether the backward pass that follows ends a step, by FSDP2's ``set_is_last_backward`` and
    ``set_requires_gradient_sync``. Methods of ``register_fsdp_forward_method`` are forward passes, too. The first pass
    raises RuntimeError if ``fully_shard`` has made other units since.
    """
    state_of: dict[nn.Module, Any] = {
        module: module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
    }
    states, is_checked = set(state_of.values()), False

    def before_forward(module: nn.Module, inputs: Any) -> None:
        nonlocal is_checked
        if not is_checked:
            _check_for_later_units(model, units)
            for unit in units:
                unit.respecify()
            is_checked = True
        # The root of the pass, if one has begun; this unit itself, if an exception ended its last pass.
        root = state_of[module]._state_ctx.iter_forward_root
        if (root is state_of[module] or root not in states) and backward_pass() == -1:
            is_last = all([state._state_ctx.is_last_backward for state in states])
            begin(is_last and all([unit._param_group.reduce_grads for unit in units]))

    hook = torch.compiler.disable(before_forward)
    for module in state_of:
        module.register_forward_pre_hook(hook, prepend=True)
    for state in states:  # for the methods: they call this, and FSDP2's hooks of modules the one before
        state._pre_forward = _after(hook, state._pre_forward)


def set_is_last_backward(model: nn.Module, is_last: bool) -> None:
    """Set FSDP2's flag on every module of ``model``, as the root does for those below it once a pass has begun."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_is_last_backward(is_last)


def _after(hook: Callable[[nn.Module, Any], None], pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    def both(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hook(module, args)
        return pre_forward(module, args, kwargs)

    return both


def _check_for_later_units(model: nn.Module, units: Sequence[FSDPUnit]) -> None:
    known = {id(unit._param_group) for unit in units}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and any(id(group) not in known for group in _param_groups_of(module)):
            raise RuntimeError(
                f"fully_shard was called on {name or 'the root module'} after apply_zeropp, which does not know of it: "
                "call apply_zeropp after the last fully_shard"
            )


def backward_pass() -> int:
    """Return the number of the backward pass that this thread is in; -1 = none."""
    return int(torch._C._current_graph_task_id())


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that runs now is over; never, if it fails."""
    # After FSDP2's callback, which it queues when the pass begins; in the order of the calls.
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


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
