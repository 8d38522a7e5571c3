"""Tensor and sequence parallelism: PyTorch's DTensor shards each module as ``megatron_zpp.parallel.plans`` says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from megatron_zpp.models.attention import Attention
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.mesh import Mesh


def apply_tensor_parallelism(
    model: Transformer, mesh: Mesh, plan: dict[str, ParallelStyle], sequence_parallel: bool
) -> None:
    """Shard ``model``, built on the meta device, in place; before activation checkpointing, compile and sharding.

    plan: of ``parallel.plans``. sequence_parallel: between linear layers, activations are sharded along the sequence:
    norms, dropout and residuals work on S / tp tokens a rank. Otherwise all ranks hold them whole, and equal.
    """
    parallelize_module(model, mesh.tp, plan)
    for module in model.modules():
        if isinstance(module, Attention) and module.config.attention_dropout > 0 and not sequence_parallel:
            module.forward = _with_random_numbers_per_rank(module, mesh.tp_rank)  # type: ignore[method-assign]


class Replicated(ParallelStyle):
    """A module that every rank holds and computes whole; its output is laid out as asked."""

    def __init__(
        self,
        output_layouts: Placement | None = None,
        use_local_output: bool = False,
        input_layouts: Placement | None = None,
    ) -> None:
        """input_layouts: how the ranks hold an input that is no DTensor; default: all of it."""
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts, self.use_local_output = output_layouts or Replicate(), use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._prepare_input, self._prepare_output)

    def _prepare_input(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        (x,) = inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        return x.redistribute(placements=[Replicate()])

    def _prepare_output(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        output = output.redistribute(placements=[self.output_layouts])
        return output.to_local() if self.use_local_output else output


class ShardedRows(ParallelStyle):
    """A module whose parameters are split by rows, and which itself handles what goes in and comes out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._split)

    def _split(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            rows = distribute_tensor(parameter, mesh, [Shard(0)] * mesh.ndim)
            module.register_parameter(key, nn.Parameter(rows, requires_grad=parameter.requires_grad))


def _with_random_numbers_per_rank(attention: nn.Module, tp_rank: int) -> Callable[..., Tensor]:
    """Wrap its ``forward`` to draw other random numbers on each rank, because each has other heads.

    They start from one number, equal on all ranks of the group; so activation checkpointing, which restores
    what numbers are drawn from, gets the same ones again. An evaluation draws nothing.
    """
    forward = attention.forward

    def forward_with_seed(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not attention.training:
            return forward(x, *args, **kwargs)
        rank_seed = int(torch.randint(2**62, ())) + tp_rank  # drawn on the CPU: no wait for a GPU
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            torch.manual_seed(rank_seed)
            return forward(x, *args, **kwargs)

    return forward_with_seed
