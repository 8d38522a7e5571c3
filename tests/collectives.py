"""Records the collectives that a program starts, and where its host waits for the device, also on CPUs."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators for which the host waits for a GPU: they return a number, or a tensor whose shape depends on values.
HOST_WAITS = {"_local_scalar_dense", "bincount", "masked_select", "nonzero", "unique_dim", "_unique2", "equal"}


class Collective(NamedTuple):
    name: str  # of c10d's operator
    ranks: tuple[int, ...]


class Recorder(TorchDispatchMode):
    """Within this context: collectives in the order in which they start, and the names of operators that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.host_waits: list[str] = []
        self.launches = 0

    def __enter__(self) -> Recorder:
        to_list, recorder = Tensor.tolist, self

        def tolist(tensor: Tensor) -> Any:  # not an operator on CPUs
            recorder.host_waits.append("tolist")
            return to_list(tensor)

        self._patch = patch.object(Tensor, "tolist", tolist)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            group = next(
                each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
            )
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            self.collectives.append(Collective(name, tuple(ranks)))
        elif name in HOST_WAITS or (name.startswith("index") and any(_is_mask(each) for each in tree_leaves(args))):
            self.host_waits.append(name)
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.host_waits.append(name)
        self.launches += func.namespace != "c10d" and not func.is_view
        return func(*args, **kwargs)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.ndim > 0
