"""FSDP2's units, as ZeRO++ sees them in a step. Only this file and find_units.py read FSDP2's private attributes.

A unit is a list of parameters that are gathered and reduced together: all of one ``fully_shard`` call, or the ones
on one mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, compress, count
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllocMixin,
    _get_gradient_divide_factors,
    _get_param_all_gather_inputs,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..wire.layout import ParameterShard
from .formats import UnitPart
from .shared import StepPosition, below
from .topology import Topology
from .waits import Waits


class UnitCollective(DefaultAllocMixin):
    """A collective that FSDP2 calls, with buffers that are allocated as FSDP2's own are."""


@dataclass(eq=False)
class FSDPUnit:
    """One FSDP2 unit: the parameters that one ``fully_shard`` call gathers and reduces, and their collectives."""

    name: str  # the module's name in the model, "" is the root; "NAME[1]" is its second unit, on another mesh
    shards: tuple[ParameterShard, ...]  # the parts of a rank's flat shard [L], in the order of ``parameters``
    module: FSDPModule
    topology: Topology  # the ranks and nodes that share it
    replicas: Topology | None  # with HSDP: the ranks that hold the same shard, whose gradients FSDP2 all-reduces
    _param_group: Any = field(repr=False)  # FSDP2's record of the unit
    all_gather: Any = field(init=False, repr=False)  # its UnitAllGather
    reduce_scatter: Any = field(init=False, repr=False)  # its UnitReduceScatter
    whole: UnitPart = field(init=False, repr=False)  # all parameters
    # Whether a step's gradients were reduced, or an optimizer has stepped, since the weights were sent.
    has_trained: bool = False
    holds_gradients: bool = field(default=False, init=False)  # until the last micro-batch has crossed nodes
    nf4_skip: tuple[str, ...] | None = None  # words in names of frozen matrices that are not in NF4; None = none is
    # Parameters that were ever trainable. PEFT freezes adapters during reference passes.
    _ever_trainable: set[int] = field(default_factory=set, init=False, repr=False)
    _parts: dict[tuple[int, ...], UnitPart] = field(default_factory=dict, init=False, repr=False)
    # Sums fp32 [2] of errors, by statistic and by what was sent (monitor.py).
    samples: dict[tuple[str, str], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.specify(self.shards)

    @cached_property
    def label(self) -> str:
        """The name as error messages and logs show it."""
        return self.name or "the root module"

    def specify(self, shards: tuple[ParameterShard, ...]) -> None:
        """Set the unit's parameters. Parts and formats follow from them, and are made once."""
        self._ever_trainable.update(self._trainable())
        if (skip := self.nf4_skip) is not None:
            fits = [shard.quantizable and not any(word in shard.name for word in skip) for shard in shards]
            fits = [fit and index not in self._ever_trainable for index, fit in enumerate(fits)]
            shards = tuple(replace(shard, is_nf4=fit) for shard, fit in zip(shards, fits, strict=True))
        self.shards, self._parts = shards, {}
        self.whole = self.part(range(len(shards)))

    def remove_trainable_from_nf4(self) -> bool:
        """Take parameters that have become trainable out of NF4; return whether there were any."""
        if self.nf4_skip is None or not any(self.shards[index].is_nf4 for index in self._trainable()):
            return False
        self.specify(self.shards)
        return True

    @cached_property
    def device(self) -> torch.device:
        return self._param_group.device

    @property
    def parameters(self) -> Sequence[Tensor]:
        return list(map(attrgetter("sharded_param"), self._param_group.fsdp_params))

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype of gathered parameters, from the mixed-precision policy, so also before the first pass."""
        dtype: torch.dtype | None = self._param_group.mp_policy.param_dtype
        return dtype if dtype is not None else self.parameters[0].dtype

    @property
    def is_in_pass(self) -> bool:
        """Whether the unit is being gathered for a forward or backward pass, not by ``unshard()``."""
        # Activation checkpointing runs forward passes within the backward pass.
        return backward_pass() != -1 or self._param_group._training_state.name in ("FORWARD", "PRE_BACKWARD")

    @property
    def is_sharded(self) -> bool:
        """Whether the unit must be gathered before it is used."""
        return bool(self._param_group.is_sharded)

    def flat_shard(self) -> Tensor:
        """Return the shard [L] as FSDP2 would hand it to a gather now."""
        # FSDP2's function casts all parameters in one launch.
        return torch.cat([*chain.from_iterable(_get_param_all_gather_inputs(self._param_group.fsdp_params))])

    @property
    def is_read_in_backward(self) -> bool:
        """Whether reduced gradients are read before the backward pass is over, or its end is unknown."""
        # Pipeline schedules that split the backward pass call FSDP2 by hand, when none runs.
        hooks = [getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self.parameters]
        return any(hooks) or self._param_group._all_reduce_hook is not None or backward_pass() == -1

    def divisor_after_reduction(self, dtype: torch.dtype, group: dist.ProcessGroup) -> float | None:
        """Return what FSDP2 divides gradients of ``dtype`` by after the reduction; None = nothing."""
        factor, sums = self._param_group.gradient_divide_factor, self._param_group.force_sum_reduction_for_comms
        return _get_gradient_divide_factors(group, None, dtype, self.device.type, factor, sums)[1]

    def add_gradient(self, part: UnitPart, shard: Tensor) -> None:
        """Add a reduced gradient fp32 [L] to the ``.grad`` of a part's parameters, which FSDP2 has made."""
        params = self._param_group.fsdp_params
        gradients = [params[index].sharded_param.grad.to_local() for index in part.indices]
        shard = shard.to(gradients[0].device)  # offloaded ones are in host memory
        pieces = shard.split([parameter.numel for parameter in part.parameters])  # with padding at the end of each
        unpadded = [piece[: g.numel()].view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]
        torch._foreach_add_(gradients, unpadded)

    def drop_gradients(self) -> None:
        """Drop the gradients that passes without ``set_requires_gradient_sync`` left for the next reduction."""
        for param in self.params_once_gathered():
            param.unsharded_accumulated_grad = param.unsharded_param.grad = None

    def params_once_gathered(self) -> list[Any]:
        """Return FSDP2's record of each parameter; [] until the unit has been gathered."""
        params = self._param_group.fsdp_params
        return params if hasattr(params[-1], "_unsharded_param") else []

    @property
    def is_last_backward(self) -> bool:
        """The flag that ``set_is_last_backward`` gave the root of the pass that runs."""
        return bool(self.module._get_fsdp_state()._state_ctx.is_last_backward)

    @property
    def stays_gathered(self) -> bool:
        """Whether a forward pass leaves the parameters gathered for the passes that follow."""
        return self._param_group.post_forward_mesh_info is None

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the unit's next gather and reduction depend on besides parameters and gradients."""
        name, kept, errors = self.name or "root", self.all_gather.copies_to_save(), self.reduce_scatter.errors_to_save()
        state = {f"weights/{name}/{key}": value for key, value in kept.items()}
        return state | {f"gradients/{name}/{key}": value for key, value in errors.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what ``state_dict`` of all units returned, of which a unit takes its own."""
        self.all_gather.load_copies(below(state, f"weights/{self.name or 'root'}/"))
        self.reduce_scatter.load_errors(below(state, f"gradients/{self.name or 'root'}/"))

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
        """The parameters that were ever trainable."""
        self._ever_trainable.update(self._trainable())
        return self.part(sorted(self._ever_trainable))

    @property
    def frozen(self) -> UnitPart:
        """The parameters that were never trainable."""
        trained = self.trained.indices
        return self.part(index for index in range(len(self.shards)) if index not in trained)

    def _trainable(self) -> list[int]:
        return list(compress(count(), map(attrgetter("requires_grad"), self.parameters)))


def check_collectives(unit: FSDPUnit) -> None:
    """Raise RuntimeError if FSDP2 was given other collectives since ``find_units.set_collectives``."""
    group = unit._param_group
    if (unit.all_gather, unit.reduce_scatter) != (group._all_gather_comm, group._reduce_scatter_comm):
        raise RuntimeError(
            f"the collectives of {unit.label} were replaced after apply_zeropp, by set_custom_all_gather or "
            "set_custom_reduce_scatter: leave ZeRO++'s in place, or do not apply it"
        )


def follow_backward(unit: FSDPUnit, waits: Waits) -> None:
    """Let the unit's reduce-scatter complete gradients before FSDP2 reduces them, and time where FSDP2 waits."""
    group = unit._param_group
    if unit.device.type == "cuda":  # where FSDP2 lets the stream that computes wait; on a CPU streams are one
        for name in ("wait_for_unshard", "post_backward", "finalize_backward"):
            setattr(group, name, waits.stall()(getattr(group, name)))
    before_reduction, reduce = unit.reduce_scatter.before_reduction, group.post_backward

    def post_backward(*arguments: Any) -> None:
        if group.reduce_grads:
            before_reduction()
        reduce(*arguments)

    group.post_backward = post_backward


def complete_gradients(unit: FSDPUnit, held: Sequence[int]) -> tuple[set[int], tuple[int, ...]]:
    """Give each parameter that must be reduced a gradient. Return the indices of those used, and of those to reduce.

    Trainable parameters that this backward pass did not use get zeros, and so do parameters that were frozen after
    a micro-batch whose gradients are ``held``. All gradients get one dtype, since FSDP2 reduces no others: passes that
    did not reduce left sums in ``reduce_dtype``.
    """
    params, reduced = unit.params_once_gathered(), list[int]()
    sums = {index for index, param in enumerate(params) if param.unsharded_accumulated_grad is not None}
    used = sums | {index for index, param in enumerate(params) if param.unsharded_param.grad is not None}
    for index, param in enumerate(params):
        unsharded = param.unsharded_param
        # FSDP2 copies the flag when it gathers, which it does not do for a pass that skips the unit.
        unsharded.requires_grad_(param.sharded_param.requires_grad)
        if param.unsharded_accumulated_grad is None:
            if unsharded.grad is None and (unsharded.requires_grad or index in held):
                unsharded.grad = torch.zeros_like(unsharded)
            if unsharded.grad is not None and sums:
                param.unsharded_accumulated_grad, unsharded.grad = unsharded.grad.to(param.reduce_dtype), None
        if unsharded.grad is not None or param.unsharded_accumulated_grad is not None:
            reduced.append(index)
    return used, tuple(reduced)


def follow_forward_passes(model: nn.Module, units: Sequence[FSDPUnit], begin: Callable[[bool], None]) -> None:
    """Call ``begin(is_last)`` before each forward pass of ``model``, or of a part of it, gathers anything.

    is_last: whether the backward pass that follows ends a step, by FSDP2's ``set_is_last_backward`` and
    ``set_requires_gradient_sync``. Methods of ``register_fsdp_forward_method`` are forward passes, too.
    """
    state_of: dict[nn.Module, Any] = {
        module: module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
    }
    states = set(state_of.values())

    def before_forward(module: nn.Module, inputs: Any) -> None:
        # The root of the pass, if one has begun; this unit itself, if an exception ended its last pass.
        root = state_of[module]._state_ctx.iter_forward_root
        if (root is state_of[module] or root not in states) and backward_pass() == -1:
            is_last = all([state._state_ctx.is_last_backward for state in states])
            begin(is_last and all([unit._param_group.reduce_grads for unit in units]))

    hook = torch.compiler.disable(before_forward)
    for module in state_of:
        module.register_forward_pre_hook(hook, prepend=True)

    def after_hook(pre_forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        hook(module, args)
        return pre_forward(module, args, kwargs)

    for state in states:  # for the methods: they call this, and FSDP2's hooks of modules the one before
        state._pre_forward = partial(after_hook, state._pre_forward)


def backward_pass() -> int:
    """Return the number of the backward pass that this thread is in; -1 = none."""
    return int(torch._C._current_graph_task_id())


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass that runs now is over; never, if it fails."""
    # After FSDP2's callback, which it queues when the pass begins; in the order of the calls.
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def follow_optimizers(units: Sequence[FSDPUnit], position: StepPosition) -> None:
    """Refuse steps of torch optimizers that hold parameters of ``units`` while gradients are held; note the others.

    Weights alone could not tell in time: such a step raises RuntimeError before it does anything, or, with a closure,
    which may reduce the last gradients, at its end. And without qgZ nothing else says where a step ends.
    """
    known = WeakSet(units)

    def units_of(optimizer: torch.optim.Optimizer) -> list[FSDPUnit]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        units = [unit for unit in known if not held.isdisjoint(map(id, unit.parameters))]
        if labels := [unit.label for unit in units if unit.holds_gradients]:
            raise RuntimeError(
                f"an optimizer step was taken while {min(labels)} held gradients that had not crossed nodes: call "
                "set_is_last_micro_batch(True) before a step's last backward pass, or undo_step() to drop gradients"
            )
        return units

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        has_closure = any(callable(argument) for argument in (*args, *kwargs.values()))
        if not has_closure and any([unit.holds_gradients for unit in known]):
            units_of(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = units_of(optimizer)
        for unit in stepped:
            unit.has_trained = True
        if stepped:
            position.mark_stepped(getattr(optimizer, "found_inf", None))

    # Never removed: that could happen while some optimizer's step iterates over its hooks.
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
