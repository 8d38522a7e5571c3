"""Gradients that are added up only when needed, so that one pass may add up and encode; and a node's kept sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..fsdp.formats import Formats
from ..fsdp.unit import Unit, UnitPart
from ..wire.format import WireFormat
from ..wire.layout import Compensation, encoded_addend
from ..wire.quantization import counter_uniform


@dataclass(frozen=True)
class GradientSum:
    """Gradients [..., L]: those of one rank, or the sum of what G ranks sent; and ``plus``, if there is any.

    parts: [..., L] of any float type; with a ``format`` uint8 [G, ..., nbytes] in it.
    """

    parts: Tensor
    format: WireFormat | None = None
    plus: Tensor | None = None  # fp32 [..., L]
    exponents: Tensor | None = None  # uint8 [G, ..., L], of the scales that multiply what each rank sent (scales.py)

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @property
    def rows(self) -> torch.Size:
        """The shape without L."""
        return self.parts.shape[:-1] if self.format is None else self.parts.shape[1:-1]

    def only_piece(self) -> GradientSum:
        """Return [..., L] of [1, ..., L]."""
        assert self.exponents is None  # one piece is not sent, and has no scales
        parts = self.parts[0] if self.format is None else self.parts[:, 0]
        return replace(self, parts=parts, plus=self.plus[0] if self.plus is not None else None)

    def compute(self) -> Tensor:
        """Add up in fp32, in rank order: [..., L], in the memory of ``plus`` if there is any."""
        if self.format is None:
            return self.parts.to(torch.float32, copy=True) if self.plus is None else self.plus.add_(self.parts)
        out = self.plus
        if out is None:
            out = torch.empty(*self.parts.shape[1:-1], self.format.numel, device=self.parts.device)
        return self.format.decode_sum(self.parts, out, accumulate=self.plus is not None, exponents=self.exponents)

    def computed(self) -> GradientSum:
        """Return the same gradients with nothing left to add up."""
        is_sum = self.format is not None or self.plus is not None
        return GradientSum(self.compute()) if is_sum else self

    def encode(
        self,
        format: WireFormat,
        noise_seed: int | None,
        compensation: Compensation | None = None,
        exponents: Tensor | None = None,
    ) -> Tensor:
        """Add up and encode: uint8 [..., nbytes]. exponents: uint8 [..., L], of the scales that divide the sum."""
        plus = self.plus
        if self.format is None:
            return format.encode(self.parts, noise_seed, plus=plus, compensation=compensation, exponents=exponents)
        assert self.exponents is None  # scaled gradients are decoded, not sent again
        return format.encode_sum(
            self.parts, self.format, noise_seed, plus=plus, compensation=compensation, exponents=exponents
        )


class NodeSum:
    """One unit's sum [N, L] within a node over the micro-batches so far, kept as ``gradient_sum_dtype``.

    In bf16 and int8 it is rounded stochastically after every micro-batch but the last: rounding to nearest would lose
    every addend below half a step of a sum that has grown. Keeping what rounding lost would take a second buffer.

    With ``offload_gradient_sums`` it is kept in host memory. The copies run on the stream that reduces gradients.
    """

    def __init__(self, unit: Unit, formats: Formats) -> None:
        self.formats, self.config = formats, formats.config
        self.unit, self.part = unit, unit.whole  # the parameters that are added up
        self.kept: Tensor | None = None  # fp32 or bf16 [N, L]; int8: wire buffers uint8 [N, nbytes]

    @property
    def format(self) -> WireFormat:
        """The format of int8 sums."""
        return self.formats.node_sum(self.part)

    def begin(self, part: UnitPart) -> None:
        """Add up gradients of ``part`` from now on. What is kept gets zeros for parameters unfrozen since."""
        if part != self.part and (kept := self._on_device()) is not None:
            assert set(self.part.indices) <= set(part.indices), "a parameter was frozen while its gradients were held"
            if self.config.gradient_sum_dtype == "int8":
                old, new, whole = (self.formats.node_sum(each) for each in (self.part, part, self.unit.whole))
                wires = kept.new_zeros(len(kept), whole.nbytes)  # which decode to zeros
                self._keep(part.take_wires(self.part.put_wires(kept, wires, whole, old), whole, new))
            else:
                sums = kept.new_zeros(len(kept), self.unit.whole.numel)
                self._keep(part.take(self.part.put(kept, sums)))
        self.part = part

    def plus(self, arrived: GradientSum) -> GradientSum:
        """Return the sum [N, L] of what arrived for this micro-batch and what was kept."""
        kept = self._on_device()
        if kept is None or kept.dtype == torch.float32:
            return replace(arrived, plus=kept)
        if kept.dtype == torch.bfloat16:
            return replace(arrived, plus=kept.float())
        out = torch.empty(*arrived.rows, self.format.numel, device=kept.device)
        return replace(arrived, plus=self.format.decode(kept, out))

    def add(self, arrived: GradientSum, noise_seed: int | None) -> None:
        """Keep the sum [N, L] of what arrived for this micro-batch and what was kept.

        noise_seed: of stochastic rounding; may be None for fp32 sums.
        """
        if self.config.gradient_sum_dtype == "int8":
            total = arrived.encode(self.format, noise_seed, encoded_addend(self.format, self._on_device()))
        else:
            total = self.plus(arrived).compute()
            if self.config.gradient_sum_dtype == "bf16":
                assert noise_seed is not None
                total = round_to_bf16(total, noise_seed)
        self._keep(total)

    def drop(self) -> None:
        self.kept = None

    def _keep(self, total: Tensor) -> None:
        self.kept = _in_host_memory(total) if self.config.offload_gradient_sums else total

    def _on_device(self) -> Tensor | None:
        return self.kept.to(self.unit.device, non_blocking=True) if self.kept is not None else None


def round_to_bf16(values: Tensor, noise_seed: int) -> Tensor:
    """Round fp32 values to bf16 stochastically, with the same noise as quantization; NaN and Inf stay."""
    # bf16 is the upper half of an fp32 number. Random bits that are added to the lower half carry into it with the
    # probability that the lower half asks for.
    noise = (counter_uniform(values.numel(), noise_seed, values.device) * 2**16).to(torch.int32).view(values.shape)
    upper = (values.view(torch.int32) + noise) & -(2**16)
    return torch.where(values.isfinite(), upper.view(torch.float32), values).to(torch.bfloat16)


def _in_host_memory(tensor: Tensor) -> Tensor:
    """Copy the tensor to host memory: pinned, so that the current stream does it and the host does not wait."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
