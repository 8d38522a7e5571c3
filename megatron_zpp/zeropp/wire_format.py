"""Encoding and decoding of wire buffers, by the operators of csrc/ or in plain torch; wire_layout.py has the bytes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import kernels, reference
from .wire_layout import Compensation, ParameterShard, WireLayout


@functools.lru_cache(maxsize=4096)
def wire_format(
    parameters: tuple[ParameterShard, ...], bits: int | None, block_size: int | None, dtype: torch.dtype
) -> WireFormat:
    """The WireFormat of these arguments, made once."""
    return WireFormat(parameters, bits, block_size, dtype)


class WireFormat(WireLayout):
    """Encoder and decoder of shards with a fixed list of parameters."""

    def encode(
        self,
        values: Tensor,
        noise_seed: int | None = None,
        *,
        source: WireFormat | None = None,
        plus: Tensor | None = None,
        minus: Tensor | None = None,
        compensation: Compensation | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode values [..., L] of any float type into wire buffers uint8 [..., nbytes], in one pass.

        noise_seed: round stochastically, with noise that depends on the seed and an element's place alone.
        source: ``values`` are what G peers sent in this format, uint8 [G, ..., nbytes]; their sum is encoded. It has
            this format's parameters and blocks, or is unquantized.
        plus, minus: [..., L] to add or to subtract, in fp32.
        compensation: LoCo's error, added and replaced.
        out: the buffers to fill, if they are there already.
        """
        addend, sign = (plus, 1) if minus is None else (minus, -1)
        shape = values.shape[1:-1] if source is not None else values.shape[:-1]
        wire = torch.empty(*shape, self.nbytes, dtype=torch.uint8, device=values.device) if out is None else out
        if not self._has_kernels(values, addend, source):
            if source is not None:
                total = torch.empty(*shape, self.numel, device=values.device)
                reference.decode(source, values, total, accumulate=False)
                values = total
            reference.encode(self, values, wire, addend, sign, compensation, noise_seed)
            return wire
        torch.ops.megatron_zpp.encode(
            values if source is None else None,
            values if source is not None else None,
            source.table if source is not None else [],
            addend,
            sign,
            wire,
            self.table,
            compensation.error if compensation is not None else None,
            compensation.new_error if compensation is not None else None,
            compensation.format.table if compensation is not None else [],
            compensation.beta if compensation is not None else 0.0,
            compensation.decay if compensation is not None else 1.0,
            noise_seed,
        )
        return wire

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Decode wire buffers uint8 [..., nbytes] into ``out`` [..., L] of any float type; returns ``out``."""
        return self.decode_sum(wire.unsqueeze(0), out)

    def decode_sum(self, peers: Tensor, out: Tensor, accumulate: bool = False) -> Tensor:
        """Decode the buffers uint8 [G, ..., nbytes] of G peers and add them in fp32, in peer order.

        accumulate: onto ``out`` [..., L], not into it. Returns ``out``.
        """
        if self._has_kernels(out):
            torch.ops.megatron_zpp.decode(peers, self.table, out, accumulate)
        else:
            reference.decode(self, peers, out, accumulate)
        return out

    def rotate(self, values: Tensor) -> Tensor:
        """Hadamard-rotate the quantized parameters of values [..., L]: fp32 [..., L]. Its own inverse.

        In groups of 32 elements; the last elements of a parameter that make up no whole group stay as they are.
        """
        rotated = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        if self._has_kernels(values):
            torch.ops.megatron_zpp.rotate(values, self.table, rotated)
        else:
            reference.rotate(self, values, rotated)
        return rotated

    def _has_kernels(self, values: Tensor, addend: Tensor | None = None, source: WireFormat | None = None) -> bool:
        dtypes = [self.dtype, source.dtype if source is not None else values.dtype]
        dtypes += [addend.dtype] if addend is not None else []
        return kernels.why_not_on(values.device) is None and all(dtype in kernels.TYPES for dtype in dtypes)
