"""A stand-in in torch for DeepSpeed's CUDA quantizer, which lets its ZeRO++ (qwZ and qgZ) run on processors.

It takes group sizes, codes, scales and partitions from csrc/quantization of DeepSpeed 0.19.8. DeepSpeed itself calls
the collectives, so bytes are its own; seconds are not. One difference: its kernel reads bf16 gradients as if they were
fp16, which this does not.
"""

import sys
from typing import Any

import torch
from torch import Tensor


class Quantizer:
    """The functions of DeepSpeed's extension that stage 3 calls, with symmetric codes in 8 and 4 bits."""

    Symmetric = 0

    @staticmethod
    def quantize(x: Tensor, groups: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
        """Return int8 codes, two of 4 bits in a byte, and a step in fp32 for each group of consecutive elements."""
        rows = x.reshape(groups, -1).float()
        largest = rows.abs().amax(1, keepdim=True)
        steps = torch.where(largest == 0, 1.0, largest / 2 ** (bits - 1))
        codes = (rows / steps).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
        if bits == 4:
            codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        return codes.reshape(*x.shape[:-1], -1), steps.flatten()  # gloo compares shapes

    @staticmethod
    def dequantize(codes: Tensor, steps: Tensor, groups: int, bits: int, kind: int) -> Tensor:
        shape = (*codes.shape[:-1], -1)
        if bits == 4:
            codes = torch.stack([(codes << 4) >> 4, codes >> 4], dim=-1)
        return (codes.reshape(groups, -1) * steps.reshape(groups, 1)).half().reshape(shape)

    @staticmethod
    def swizzle_quant(
        x: Tensor, groups: int, bits: int, kind: int, pipeline: int, nodes: int, ranks: int
    ) -> tuple[Tensor, Tensor]:
        """Quantize, with the partitions of [nodes, ranks] in the order [ranks, nodes] of the exchange within a node."""
        return Quantizer.quantize(x.reshape(nodes, ranks, -1).transpose(0, 1).flatten(), groups, bits, kind)

    @staticmethod
    def quantized_reduction(
        codes: Tensor, steps: Tensor, groups: int, out_groups: int, bits: int, kind: int, ranks: int
    ) -> tuple[Tensor, Tensor]:
        """Sum what the ranks of a node sent, and quantize the sum for the other nodes."""
        parts = Quantizer.dequantize(codes, steps, groups, bits, kind).view(ranks, -1)
        return Quantizer.quantize(parts.float().sum(0), out_groups, bits, kind)


def install() -> None:
    """Let DeepSpeed load this in the place of its extension."""
    import deepspeed

    builder: Any = type("QuantizerBuilder", (), {"load": lambda self: Quantizer})
    sys.modules["deepspeed.ops.op_builder"].QuantizerBuilder = builder  # type: ignore[attr-defined]
    assert deepspeed.ops.op_builder.QuantizerBuilder is builder
