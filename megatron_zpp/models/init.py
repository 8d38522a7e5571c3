"""Initial weights by Megatron's rules, equal to the bit for every world size and every way of sharding.

A weight is split into blocks of rows, and each block is drawn from a generator seeded with (seed, parameter, block).
A rank draws the blocks that its shard touches, on the CPU and in fp32, whatever the parameter's device and dtype are;
so it never holds more of the whole model than its own shards and one block.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .layers import LayerNorm1p, RMSNorm1p
from .lora import is_adapter
from .transformer import Transformer, TransformerConfig

BLOCK_ELEMENTS = 2**20


@torch.no_grad()
def init_weights(model: Transformer, seed: int, std_of: Callable[[str, Any], float] | None = None) -> None:
    """Fill every parameter in place, plain tensors and DTensors. Buffers begin at 0.

    Norms multiply by 1, biases are 0, other weights normal with the standard deviation ``std_of(name, config)``.
    """
    std_of = std_of or initial_std
    for buffer in model.buffers():
        buffer.zero_()
    kept_less_1 = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, (LayerNorm1p, RMSNorm1p))}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device; call model.to_empty(device=...) before init_weights")
        if name.endswith(("bias", ".lora_B")) or name in kept_less_1:
            parameter.zero_()
        elif is_adapter(name):
            fill_normal(parameter, (3 * parameter.shape[1]) ** -0.5, seed, name)  # PEFT's variance
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            fill_normal(parameter, std_of(name, model.config), seed, name)


def initial_std(name: str, config: TransformerConfig) -> float:
    """Megatron's standard deviation of initial weights: less for layers that add to the residual stream."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return config.init_method_std / math.sqrt(2 * config.num_layers)
    return config.init_method_std


def fill_normal(parameter: Tensor, std: float, seed: int, name: str) -> None:
    """Fill ``parameter``, or this rank's shard of it, from N(0, std)."""
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        shard = parameter.to_local()
    else:
        shape, offset = tuple(parameter.shape), (0,) * parameter.dim()
        shard = parameter
    if shard.numel() == 0:
        return

    rows, row_shape = parameter.shape[0], parameter.shape[1:]
    block_rows = max(1, BLOCK_ELEMENTS // row_shape.numel())
    columns = tuple(slice(o, o + s) for o, s in zip(offset[1:], shape[1:], strict=True))
    first, last = offset[0], offset[0] + shape[0]  # rows of the shard
    for block in range(first // block_rows, math.ceil(last / block_rows)):
        start, stop = block * block_rows, min((block + 1) * block_rows, rows)
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        values = torch.empty(stop - start, *row_shape, device="cpu").normal_(0.0, std, generator=generator)
        top, bottom = max(first, start), min(last, stop)
        shard[top - first : bottom - first].copy_(values[(slice(top - start, bottom - start), *columns)])
