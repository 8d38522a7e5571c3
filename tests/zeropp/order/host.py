"""What a program does in host memory, what its host waits for, and what it launches."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.zeropp.order.fake_cuda import crossings
from tests.zeropp.order.recorder import ANSWERS_THE_HOST, _arguments


class Host(TorchDispatchMode):
    """Work in host memory, and waits of the host; a number as a tensor is no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = crossings()
        result = func(*args, **(kwargs or {}))
        self.waits += [f"a copy in {func.name()}"] * (crossings() - before)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        on_host = [t for t in tensors if t.device.type == "cpu"]
        if any(t.dim() > 0 for t in on_host) and func.namespace != "prim":
            self.operators.add(func.name())
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        crosses = func.name() in ("aten::copy_", "aten::_to_copy") and 0 < len(on_host) < len(tensors)
        if func.name() in ANSWERS_THE_HOST or (crosses and not given.get("non_blocking")):
            self.waits.append(func.name())
        return result


class Launches(TorchDispatchMode):
    """Counts operators that launch kernels, and keeps the group of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.groups = 0, list[dist.ProcessGroup]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors come here
        if func.namespace == "c10d":
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            self.groups.append(dist.ProcessGroup.unbox(given["process_group"]))
        elif func.namespace not in ("prim", "profiler"):
            with self:  # operators that are made of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            _, _, is_view = _arguments(func, args, kwargs)
            self.launches += not (is_view or "empty" in func.name() or "view" in func.name())
        return func(*args, **kwargs)
