"""MXFP4 (OCP Microscaling Formats 1.0), in which gpt-oss is published: 32 elements of 4 bits share a power of two."""

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1: a sign, 2 bits of exponent, 1 bit of mantissa


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """``blocks`` uint8 [E, out, in / 32, 16] of two elements each, the lower half first -> bf16 [E, in, out].

    ``scales`` uint8 [E, out, in / 32]: exponents of two, plus 127.
    """
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # [256, 2], by byte
    experts = []
    for block, scale in zip(blocks, scales, strict=True):  # one at a time: fp32 takes 8 times the memory
        elements = pairs[block.int()].flatten(-2)  # [out, in / 32, 32]
        experts.append(torch.ldexp(elements, scale.int().unsqueeze(-1) - 127).bfloat16().flatten(-2).t())
    return torch.stack(experts)
