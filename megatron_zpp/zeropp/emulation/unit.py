"""The units of an emulated model: what FSDP2's would be, as plain tensors in FSDP2's layout."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..fsdp.unit import Unit, UnitPart
from ..wire.layout import ParameterShard, rows_per_rank


@dataclass(eq=False, kw_only=True)
class EmulatedUnit(Unit):
    """Some parameters of a plain model, the fp32 masters, and the weights that arrive on every rank.

    Shards are [W, L]: each parameter, row by row, split into W equal parts along dim 0, the last ones padded with 0.
    """

    module: nn.Module
    masters: list[nn.Parameter]
    owners: list[list[tuple[nn.Module, str]]]  # the attributes that hold each parameter; several if it is tied
    arrived: list[nn.Parameter]  # of the masters' shapes, in ``dtype``
    dtype: torch.dtype
    world_size: int
    casts_inputs: bool
    is_gathered_once: bool  # for a forward pass and its backward pass
    _is_shown: bool = False

    def __post_init__(self) -> None:
        self.specify(self.shards)
        if self.casts_inputs:
            self.module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)

    @property
    def device(self) -> torch.device:
        return self.masters[0].device

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    @property
    def parameters(self) -> Sequence[Tensor]:
        return self.masters

    @property
    def is_in_backward(self) -> bool:
        return False  # weights arrive before the forward pass and stay

    def shards_of(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Tensors of the shapes of all masters as shards [W, L]."""
        return self._shard(tensors, self.whole, dtype)

    def receive(self, shards: Tensor, part: UnitPart) -> None:
        """Fill the arrived weights of a part from its shards [W, l]."""
        for index, columns in zip(part.indices, _columns(shards, part), strict=True):
            _join(columns, out=self.arrived[index])

    def take_gradients(self, dtype: torch.dtype) -> Tensor:
        """Take the gradients of the trainable arrived weights as shards [W, L], zeros where there are none."""
        trainable = [self.arrived[index] for index in self.trainable.indices]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trainable]
        self.drop_gradients()
        return self._shard(gradients, self.trainable, dtype)

    def drop_gradients(self) -> None:
        for arrived in self.arrived:
            arrived.grad = None

    def used_parameters(self) -> set[int]:
        """Return the indices of the arrived weights that have a gradient."""
        return {index for index, arrived in enumerate(self.arrived) if arrived.grad is not None}

    def accumulate_gradients(self, shards: Tensor) -> None:
        """Add reduced gradients [W, L] of the trainable parameters to the masters'."""
        for index, columns in zip(self.trainable.indices, _columns(shards, self.trainable), strict=True):
            master = self.masters[index]
            gradient = _join(columns, out=torch.empty_like(master))
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def show_arrived(self) -> None:
        """Put the arrived weights in the model, in place of the masters."""
        self._is_shown = True
        for arrived, master in zip(self.arrived, self.masters, strict=True):
            arrived.requires_grad_(master.requires_grad)  # parameters may be frozen and unfrozen
        self._show(self.arrived)

    def show_masters(self) -> None:
        self._is_shown = False
        self.drop_gradients()
        self._show(self.masters)

    def _cast_inputs(self, module: nn.Module, inputs: Any, named_inputs: Any) -> Any:
        """Floating-point inputs in the weights' dtype, as FSDP2 casts them."""

        def cast(value: Any) -> Any:
            return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return (tree_map(cast, inputs), tree_map(cast, named_inputs)) if self._is_shown else None

    def _show(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, owners in zip(parameters, self.owners, strict=True):
            for module, name in owners:
                module._parameters[name] = parameter

    def _shard(self, tensors: Sequence[Tensor], part: UnitPart, dtype: torch.dtype) -> Tensor:
        shards = torch.empty(self.world_size, part.numel, dtype=dtype, device=self.device)
        for tensor, columns in zip(tensors, _columns(shards, part), strict=True):
            elements, whole = tensor.detach().reshape(-1), tensor.numel() // max(1, columns.shape[1])
            columns[:whole].copy_(elements[: whole * columns.shape[1]].view(whole, columns.shape[1]))
            if whole < len(columns):
                rest = elements[whole * columns.shape[1] :]
                columns[whole:].zero_()
                columns[whole, : rest.numel()].copy_(rest)
        return shards


def _columns(shards: Tensor, part: UnitPart) -> Sequence[Tensor]:
    """Split shards [W, L] into each parameter's columns [W, l]."""
    return shards.split([parameter.numel for parameter in part.parameters], dim=1)


def _join(columns: Tensor, out: Tensor) -> Tensor:
    """Fill ``out``, contiguous, from its shards [W, l]."""
    elements, whole = out.view(-1), out.numel() // max(1, columns.shape[1])
    elements[: whole * columns.shape[1]].view(whole, columns.shape[1]).copy_(columns[:whole])
    if whole < len(columns):
        rest = elements[whole * columns.shape[1] :]
        rest.copy_(columns[whole, : rest.numel()])
    return out


def find_emulated_units(
    model: nn.Module,
    modules: Sequence[nn.Module],
    gathered_once: Sequence[nn.Module],
    world_size: int,
    param_dtype: torch.dtype | None,
) -> list[EmulatedUnit]:
    """One unit of each of ``modules`` and one of the rest of ``model``, in the order of ``find_units``.

    That rest, and ``gathered_once`` of the modules, stay gathered from a forward pass to its backward pass.
    Raises ValueError for parameters that have no storage, no dimension, two units, or other dtypes than their unit's.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    heads = {id(module) for module in modules}
    units, taken = [], set[int]()
    for name, module in model.named_modules():
        if module is not model and id(module) not in heads:
            continue
        masters = list({id(p): p for p in _own_parameters(module, heads)}.values())
        if not masters:
            continue
        label = name or "the root module"
        if any(id(master) in taken for master in masters):
            raise ValueError(f"{label} shares a parameter with another unit: fully_shard would need both in one unit")
        taken |= {id(master) for master in masters}
        if any(master.is_meta for master in masters):
            raise ValueError(f"{label} has no storage yet: call to_empty and initialize it before it is emulated")
        if any(master.ndim == 0 or not master.is_contiguous() for master in masters):
            raise ValueError(f"{label} has a parameter without dimensions or rows, which FSDP2 cannot shard")
        gathered = {param_dtype or master.dtype for master in masters}
        trained = {master.dtype for master in masters if master.requires_grad}
        if len(gathered) > 1 or len(trained) > 1 or not all(master.is_floating_point() for master in masters):
            raise ValueError(
                f"the parameters of {label} must have one floating-point dtype; frozen ones may have another where "
                "param_dtype is set"
            )
        dtype = param_dtype or masters[0].dtype
        arrived = [nn.Parameter(torch.empty_like(m, dtype=dtype), requires_grad=m.requires_grad) for m in masters]
        units.append(
            EmulatedUnit(
                name=name,
                module=module,
                shards=tuple(
                    ParameterShard(
                        names[id(master)],
                        numel=rows_per_rank(master.shape[0], world_size) * math.prod(master.shape[1:]),
                        quantizable=master.ndim >= 2,
                    )
                    for master in masters
                ),
                masters=masters,
                owners=[owners[id(master)] for master in masters],
                arrived=arrived,
                dtype=dtype,
                world_size=world_size,
                casts_inputs=param_dtype is not None,
                is_gathered_once=module is model or module in gathered_once,
            )
        )
    return units


def _own_parameters(module: nn.Module, heads: set[int], is_head: bool = True) -> Iterator[nn.Parameter]:
    """Yield the parameters of ``module`` without those of other units, in FSDP2's order: children's first."""
    if id(module) in heads and not is_head:
        return
    for child in module.children():
        yield from _own_parameters(child, heads, is_head=False)
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def step_by_shards(optimizer: torch.optim.Optimizer, world_size: int) -> None:
    """Let torch's AdamW move each of ``world_size`` shards of a parameter by itself, as the ranks do.

    Its fused kernel for CPUs rounds the last elements of a tensor, less than a vector, differently from the others.
    The optimizer's state stays whole. Other optimizers of torch need none of this.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    whole_group = optimizer._init_group

    def init_group(group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = whole_group(group, *lists)
        *moved, steps = lists  # parameters, gradients and moments; counters
        shapes = [parameter.shape for parameter in lists[0]]
        rows = [rows_per_rank(shape[0], world_size) * math.prod(shape[1:]) for shape in shapes]
        counts = [-(-shape.numel() // max(1, n)) for shape, n in zip(shapes, rows, strict=True)]
        for tensors in moved:
            tensors[:] = [s for t, n in zip(tensors, rows, strict=False) for s in t.view(-1).split(max(1, n))]
        # Every counter in the list is increased: the shards after the first get copies.
        steps[:] = [step if i == 0 else step.clone() for step, n in zip(steps, counts, strict=True) for i in range(n)]
        return bool(has_complex)

    optimizer._init_group = init_group  # type: ignore[method-assign]
