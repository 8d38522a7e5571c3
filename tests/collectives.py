"""Records the collectives that a program starts, and what it reads from the device, also on CPUs."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The host waits for a GPU to know a number, or a shape that depends on values.
READS = {"_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero", "unique_consecutive"}


class Collective(NamedTuple):
    name: str  # c10d's operator
    ranks: list[int]

    def crosses_nodes(self, ranks_per_node: int) -> bool:
        return len({rank // ranks_per_node for rank in self.ranks}) > 1


class Collectives(TorchDispatchMode):
    """The collectives that start in here, in order, and the operators that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Collective] = []
        self.reads: list[str] = []

    def __enter__(self) -> Collectives:
        tolist = Tensor.tolist  # not an operator on CPUs

        def noted(tensor: Tensor) -> Any:
            self.reads.append("tolist")
            return tolist(tensor)

        self._patch = patch.object(Tensor, "tolist", noted)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "c10d":
            (group,) = [dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a)]
            self.started.append(Collective(name, dist.get_process_group_ranks(group)))
        elif name in READS or (name in ("index", "index_put_") and any(_is_mask(index) for index in args[1])):
            self.reads.append(name)
        return function(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    """Every operator that is called in here, in order, with the elements of each tensor that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[int]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]))
        return result


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
