"""A small FSDP2 model of awkward shapes whose gradients are chosen, to compare FSDP2's real hooks with the oracle."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron_zpp.zeropp import ZeroPP, ZeroPPConfig, apply_zeropp
from megatron_zpp.zeropp.wire.layout import ParameterShard

# Whether plain FSDP2 can give a parameter that a backward pass did not use a gradient of zeros; torch 2.11 cannot.
HAS_UNUSED_SWITCH = hasattr(FSDPModule, "set_reduce_scatter_unused_params")

SHAPES = [(13, 37), (5,), (64, 33), (3, 3, 7), (1, 600), (2,)]  # empty shards, odd sizes, less than a block


class ChosenGradients(nn.Module):
    """The loss is sum(parameter * coefficient), so each parameter's gradient is its coefficient."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES])

    def forward(self, coefficients: list[Tensor]) -> Tensor:
        return sum((p * c.to(p.dtype)).sum() for p, c in zip(self.weights, coefficients, strict=True))


def build(config: ZeroPPConfig, dtype: torch.dtype = torch.float32) -> tuple[ChosenGradients, ZeroPP]:
    model = ChosenGradients()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
    return model, apply_zeropp(model, config)


def coefficients(rank: int, micro_batch: int = 0, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + micro_batch)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def shards_of(tensors: list[Tensor], world_size: int) -> Tensor:
    """FSDP2's flat layout [W, L]: each tensor padded along dim 0 to a multiple of W and split into W chunks."""
    columns = []
    for tensor in tensors:
        rows = math.ceil(tensor.size(0) / world_size)
        padded = tensor.new_zeros(rows * world_size, *tensor.shape[1:])
        padded[: tensor.size(0)] = tensor
        columns.append(padded.reshape(world_size, -1))
    return torch.cat(columns, dim=1)


def parameters_of(world_size: int) -> list[ParameterShard]:
    return [
        ParameterShard(str(i), math.ceil(shape[0] / world_size) * math.prod(shape[1:]), len(shape) >= 2)
        for i, shape in enumerate(SHAPES)
    ]


def gathered(model: ChosenGradients) -> list[Tensor]:
    """The unsharded parameters as a forward pass sees them."""
    model.unshard()
    full = [p.detach().float().clone() for p in model.weights]
    model.reshard()
    return full


def own_state(zeropp: ZeroPP) -> dict[str, Tensor]:
    """This rank's state by KIND/UNIT/KEY, without the rank and the layout."""
    return {key.partition("/")[2]: value for key, value in zeropp.state_dict().items()}


def local_gradients(model: ChosenGradients, world_size: int) -> Tensor:
    """This rank's reduced gradients in the flat layout [L], with zeros where FSDP2 pads."""
    pieces = []
    for weight, parameter in zip(model.weights, parameters_of(world_size), strict=True):
        local = weight.grad.to_local().flatten()
        pieces.append(torch.cat([local, local.new_zeros(parameter.numel - local.numel())]))
    return torch.cat(pieces)


class CapturedWarnings(logging.Handler):
    """What zeropp says while it is in use."""

    def __enter__(self) -> CapturedWarnings:
        self.messages: list[str] = []
        logging.getLogger("megatron_zpp").addHandler(self)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        logging.getLogger("megatron_zpp").removeHandler(self)
