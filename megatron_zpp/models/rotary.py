"""Rotary positions (Su et al., arXiv 2104.09864), and how their frequencies are scaled for longer contexts."""

import math

import torch
from torch import Tensor

# Rotary tables are cheap, so each forward pass makes them again; a buffer would have to survive ``to_empty``.


def frequencies(dim: int, base: float, device: torch.device) -> Tensor:
    """Return base^(-2i / dim) for each pair i of ``dim`` rotated channels: fp32 [dim / 2]."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def scaled_as_llama3(frequency: Tensor, factor: float, original_context: int) -> Tensor:
    """Llama 3.1's scaling: wavelengths beyond the original context in tokens are stretched by the factor, those below
    a quarter of it are kept, and those between are interpolated."""
    low, high = 1.0, 4.0
    turns = original_context * frequency / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: high frequency, kept; 0: low frequency, stretched
    return keep * frequency + (1 - keep) * frequency / factor


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return what YaRN multiplies queries and keys by, so that attention over more tokens stays as sharp."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_table(frequency: Tensor, length: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * ``frequency``, [S, 1, dim / 2], or of ``positions`` [B, S]: [B, S, 1, dim / 2]."""
    if positions is None:
        positions = torch.arange(length, device=frequency.device)
    angle = positions.float().unsqueeze(-1) * frequency  # [..., S, dim / 2]
    return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding of ``x`` [B, S, heads, head_dim]; channel i forms a pair with channel i + dim / 2.

    interleaved: channel 2i forms a pair with channel 2i + 1. Channels beyond the ``dim`` that the table is of stay as
    they are.
    """
    dim = 2 * cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([apply_rotary(x[..., :dim], cos, sin, interleaved), x[..., dim:]], dim=-1)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
