"""Activation offloading: what blocks save for the backward pass waits in host memory, copied beside compute.

PyTorch's own ``torch.autograd.graph.save_on_cpu`` copies on the stream that computes, copies weights too, copies a
storage once for each view of it, and brings a tensor back only when the backward pass asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SMALLEST = 1024  # bytes: smaller storages stay on the device, as in torchtune


class ActivationOffload:
    """Offloads the first blocks of a model, or of each stage of a rank; at most two blocks' tensors are on the device.

    A block's tensors leave while the next block computes, and come back while that block's backward pass runs.
    """

    def __init__(self) -> None:
        self._near: list[_BlockPass] = []  # whose tensors are on the device, or on their way there
        self._in_backward: _BlockPass | None = None
        self._copies: Any = None  # the stream of all copies, in both directions

    def apply(self, blocks: Sequence[nn.Module], num_layers: int) -> None:
        """Replace ``forward`` of blocks in place; call it after activation checkpointing and ``compile``.

        The block after the first ``num_layers`` keeps its tensors, and brings back the tensors of the block before it.
        """
        for i, block in enumerate(blocks[: num_layers + 1]):
            block.forward = self._offloading(block, is_first=i == 0, is_offloaded=i < num_layers)

    def _offloading(self, block: nn.Module, is_first: bool, is_offloaded: bool) -> Callable[..., Any]:
        forward = block.forward

        def offloading_forward(x: Tensor, *shared: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(x, *shared)
            done = _BlockPass(x.device, None if is_first else self._near[0])
            with saved_tensors_hooks(done.pack, partial(self._unpack, done)):
                output = forward(x, *shared)
            if is_offloaded:
                # Weights stay: FSDP2 frees their memory and fills it again. So does what blocks share.
                done.choose(staying=[*block.parameters(), *block.buffers(), *shared])
                pinned = done.device.type == "cuda"
                done.in_host = [torch.empty_like(flat, device="cpu", pin_memory=pinned) for flat in done.on_device]
                self._copy(done, done.in_host, done.on_device)
            done.saved.clear()
            self._free_all_but([done])
            self._in_backward = None
            return output

        return offloading_forward

    def _unpack(self, needed: _BlockPass, saved: Any) -> Tensor:
        if needed is not self._in_backward:  # the backward pass has come to another block
            self._in_backward = needed
            near = [each for each in (needed, needed.previous()) if each is not None]
            self._free_all_but(near)
            for each in near:
                if each.in_host and not each.on_device:  # memory of the computing stream, which frees it too
                    each.on_device = [torch.empty_like(flat, device=each.device) for flat in each.in_host]
                    self._copy(each, each.on_device, each.in_host)
            needed.wait()
        return needed.restored(saved)

    def _free_all_but(self, near: list[_BlockPass]) -> None:
        for block_pass in self._near:
            if block_pass not in near:
                block_pass.wait()
                block_pass.on_device = []
        self._near = near

    def _copy(self, block_pass: _BlockPass, targets: list[Tensor], sources: list[Tensor]) -> None:
        streams = block_pass.streams
        self._copies = self._copies or streams.Stream()
        self._copies.wait_stream(streams.current_stream())
        with streams.stream(self._copies):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        block_pass.copied = self._copies.record_event()


@dataclass
class _Saved:
    """A tensor that autograd saved, or, when its storage is offloaded, a function that returns it."""

    value: Any


class _BlockPass:
    """The tensors that one forward pass of a block saved."""

    def __init__(self, device: torch.device, previous: _BlockPass | None) -> None:
        self.device, self.streams = device, torch.get_device_module(device)
        self.previous: Callable[[], _BlockPass | None] = weakref.ref(previous) if previous else lambda: None
        self.saved: list[_Saved] = []  # until the forward pass ends: autograd keeps them, and drops them
        self.on_device: list[Tensor] = []  # whole storages, flat
        self.in_host: list[Tensor] = []
        self.copied: Any = None  # an event

    def pack(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor  # a part of a tensor subclass that is no tensor, such as a mesh
        if is_traceable_wrapper_subclass(tensor):  # such as a DTensor
            names, context = tensor.__tensor_flatten__()
            parts = {name: self.pack(getattr(tensor, name)) for name in names}
            return type(tensor), parts, context, tensor.size(), tensor.stride()
        self.saved.append(_Saved(tensor.detach()))
        return self.saved[-1]

    def restored(self, saved: Any) -> Any:
        if isinstance(saved, tuple):
            subclass, parts, *rest = saved
            return subclass.__tensor_unflatten__({name: self.restored(part) for name, part in parts.items()}, *rest)
        value = saved.value if isinstance(saved, _Saved) else saved
        return value() if isinstance(value, partial) else value

    def _view(self, place: int, dtype: torch.dtype, *layout: Any) -> Tensor:
        return self.on_device[place].view(dtype).as_strided(*layout)

    def choose(self, staying: Iterable[Any]) -> None:
        """Choose what to offload: each storage once, but for small ones and the storages of ``staying`` tensors."""
        stay = _BlockPass(self.device, None)
        for tensor in staying:
            stay.pack(tensor)
        places: dict[int, int | None] = {saved.value.untyped_storage()._cdata: None for saved in stay.saved}
        for saved in self.saved:
            tensor, storage = saved.value, saved.value.untyped_storage()
            if tensor.device != self.device or storage.nbytes() < SMALLEST:  # 0: of weights that are freed by now
                continue
            if storage._cdata not in places:
                places[storage._cdata] = len(self.on_device)
                self.on_device.append(tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0))
            if (place := places[storage._cdata]) is not None:
                layout = tensor.size(), tensor.stride(), tensor.storage_offset()
                saved.value = partial(self._view, place, tensor.dtype, *layout)

    def wait(self) -> None:
        """Let the current stream wait for the latest copies."""
        if self.copied is not None:
            self.streams.current_stream().wait_event(self.copied)
