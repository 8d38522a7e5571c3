"""Training on a GPU that is not there: fake tensors on "cuda" have shapes and types, and no memory.

Python sees their device as "cuda:0". C++ is told "meta": it would ask for the streams of a GPU that is not there, and
torch may be built without CUDA. So autograd runs a backward pass on the thread that it is called on.

With the library that tests/zeropp/cuda_on_cpu builds, the operators of moved codes run for real as well, on zeros in
the memory of a device ("privateuseone") whose copies from and to the host are counted.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from megatron_zpp.zeropp.wire import kernels

CUDA, META = torch.device("cuda:0"), torch.device("meta")
RUNS_OPERATORS = kernels.why_not_loaded is None and hasattr(torch.ops.megatron_zpp, "crossings")
DEVICE = torch.device("privateuseone:0")
_REAL = WeakIdKeyDictionary()  # by fake tensor
if RUNS_OPERATORS:
    torch._register_device_module("privateuseone", ModuleType("torch.privateuseone"))

# The operators of moved codes, which allocate memory; no program may ask for shapes of what is measured.
FAKES = {
    "moves_table": lambda format: torch.empty(1, dtype=torch.uint8),
    "measure_moves": lambda old, new, format, table: [
        old.new_empty(1, dtype=torch.int64),
        *(old.new_empty(8) for _ in range(4)),
    ],
    "write_moves": lambda old, new, format, table, measured, num_bytes: old.new_empty(num_bytes),
    "apply_moves": lambda moves, format, table, wires: None,
}
if kernels.why_not_loaded is None:
    for _name, _fake in FAKES.items():
        torch.library.register_fake(f"megatron_zpp::{_name}", _fake)


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Tensors that are made in here are fake; collectives bring nothing, and kernels are found, as in a CUDA build."""
    is_device = torch.ops.prim.device.default
    dispatch, to = FakeTensor.__torch_dispatch__.__func__, Tensor.to

    def dispatch_of_cpp(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _device_in_cpp(args) if func is is_device else dispatch(cls, func, types, args, kwargs or {})

    def to_elsewhere(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """C++ would copy what is on "meta" to "cuda"."""
        if args and args[0] == tensor.device:
            args = args[1:] or (tensor.dtype,)
        return to(tensor, *args, **kwargs)

    with ExitStack() as patches:
        for owner, name, replacement in (
            (FakeTensor, "__torch_dispatch__", classmethod(dispatch_of_cpp)),
            (DTensor, "device", property(lambda tensor: tensor._local_tensor.device)),
            (Tensor, "to", to_elsewhere),
            (kernels, "has_cuda", kernels.why_not_loaded is None),
            (torch.cuda, "current_device", lambda: CUDA.index),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            # Stubs that do nothing; a Recorder has others.
            *((torch.cuda, name, getattr(torch.cpu, name)) for name in ("Stream", "Event", "stream", "current_stream")),
        ):
            patches.enter_context(patch.object(owner, name, replacement))
        patches.enter_context(patch.dict(fake_tensor._DISPATCH_META_HANDLERS, {is_device: _device_in_cpp}))
        mode = patches.enter_context(FakeTensorMode())
        patches.enter_context(_Cpp())
        yield mode


def _device_in_cpp(args: tuple[FakeTensor]) -> torch.device:
    (tensor,) = args
    return META if tensor.fake_device.type == "cuda" or tensor.fake_mode.in_kernel_invocation else tensor.fake_device


class _Cpp(TorchDispatchMode):
    """What C++ makes "where the other one is" is on the GPU; collectives are done at once and bring nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        kwargs = kwargs or {}
        if func.namespace != "prim":
            with self:  # operators that are made of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs | {"device": CUDA} if kwargs.get("device") == META else kwargs))
        if RUNS_OPERATORS and func.namespace == "megatron_zpp" and func._opname in FAKES:
            _run_for_real(func, args, kwargs, result)
        elif func is torch.ops.aten._to_copy.default and args[0] in _REAL:
            with _disable_current_modes():
                _REAL[result] = _REAL[args[0]].to(DEVICE)
        return result


def crossings() -> int:
    """Return how often operators that ran for real copied between host and device, for which the host waits."""
    return torch.ops.megatron_zpp.crossings() if RUNS_OPERATORS else 0


@_disable_current_modes()
def _run_for_real(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Run an operator on zeros, or on what an operator returned that ran for real before."""

    def real(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if value not in _REAL:
            device = DEVICE if value.fake_device.type == "cuda" else value.fake_device
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            _REAL[value] = like.zero_()
        return _REAL[value]

    real_args, real_kwargs = tree_map(real, (args, kwargs))
    made = func(*real_args, **real_kwargs)
    if made is not None:
        _REAL.update(zip(tree_leaves(result), tree_leaves(made), strict=True))
