"""Copies of what a save writes while training goes on, in host memory that is kept for the next save."""

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from megatron_zpp.zeropp.api import local_part


class Stager(AsyncStager):
    """Copies each rank's own part of a state, by name, so that only a first save allocates.

    Fresh memory is slow, and pinning it, as fast copies from a GPU need, more so. DCP's stager knows a buffer by the
    tensor that it copies, but errors and codes are other tensors after each step. The save before must have finished.
    """

    _synchronize_after_execute = False  # ``stage`` waits for its copies

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        # Free buffers of tensors that are not saved any more.
        self._buffers = {name: self._buffer(name, local_part(tensor)) for name, tensor in state_dict.items()}
        for name, tensor in state_dict.items():
            self._buffers[name].copy_(local_part(tensor), non_blocking=True)
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.accelerator.synchronize()
        return {
            name: DTensor(self._buffers[name], tensor._spec, requires_grad=False)  # DCP reads only its placement
            if isinstance(tensor, DTensor)
            else self._buffers[name]
            for name, tensor in state_dict.items()
        }

    def synchronize_staging(self) -> None:
        """Do nothing: ``stage`` has waited."""

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is not None and (known.shape, known.dtype) == (local.shape, local.dtype):
            return known
        return torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
