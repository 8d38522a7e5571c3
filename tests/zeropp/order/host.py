"""What a program does in host memory, whom its host waits for, and what of it this package launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_zpp.zeropp
from tests.zeropp.order.recorder import ANSWERS_THE_HOST
from tests.zeropp.order.trace import Operation

OURS = {file.name for file in Path(megatron_zpp.zeropp.__file__).parent.rglob("*.py")}


class Host(TorchDispatchMode):
    """What is done in host memory, and what the host waits for; a number as a tensor is no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        on_host = [t for t in tensors if t.device.type == "cpu"]
        if any(t.dim() > 0 for t in on_host) and func.namespace != "prim":
            self.operators.add(func.name())
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        crosses = func.name() in ("aten::copy_", "aten::_to_copy") and 0 < len(on_host) < len(tensors)
        if func.name() in ANSWERS_THE_HOST or (crosses and not given.get("non_blocking")):
            self.waits.append(func.name())
        return result


def is_ours(op: Operation) -> bool:
    """Whether this package launched it, or had FSDP2 launch it for a flat shard."""
    return op.site[0].file in OURS or "flat_shard" in {line.function for line in op.site}
