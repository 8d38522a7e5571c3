"""The gradient reduce-scatter of ZeRO++ (qgZ), which crosses nodes once per optimizer step, with LoCo.

FSDP2 hands over the flat gradients [N, P, L] of one unit, rank by rank, and wants this rank's reduced shard [L].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import TorchAllocator
from .config import ZeroPPConfig
from .fsdp_unit import FSDPUnit, ReduceScatter, refuse_capture
from .gradient_hops import GradientHop, GradientHops, MicroBatch
from .gradient_sum import GradientSum
from .monitor import ErrorMonitor
from .traffic import Traffic


class HierarchicalReduceScatter(TorchAllocator, ReduceScatter):
    """qgZ (ZeRO++ section 3.3) in two hops, both accumulated in fp32.

    Each micro-batch, an all-to-all within the node adds up the node's gradients for the N shards of this local
    rank p, [N, L]. They stay here until the last micro-batch of the optimizer step, when an all-to-all between the
    nodes adds them up to [L]; earlier micro-batches return zeros, which FSDP2 adds to ``.grad``.
    """

    def __init__(
        self,
        *,
        unit: FSDPUnit,
        config: ZeroPPConfig,
        traffic: Traffic,
        monitor: ErrorMonitor,
        micro_batch: MicroBatch,
    ) -> None:
        self.unit, self.micro_batch = unit, micro_batch
        self.hops = GradientHops(
            unit=unit, layout=unit.topology, config=config, traffic=traffic, monitor=monitor, micro_batch=micro_batch
        )

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        refuse_capture(self.unit)
        topology, hops = self.unit.topology, self.hops
        self.micro_batch.reduced()
        self._check_reduced(output_tensor.numel())
        gradients = hops.begin(input_tensor.view(topology.num_nodes, topology.ranks_per_node, output_tensor.numel()))
        node_sum = exchange(gradients, hops.within_node, topology.intra_group)  # [N, L]
        if not self.micro_batch.is_last:
            hops.keep(node_sum)
            output_tensor.zero_()
            return None
        total = exchange(hops.with_kept(node_sum), hops.between_nodes, topology.inter_group)  # [L]
        output_tensor.copy_(scaled_as(op, hops.finish(total), group.size()))
        self.unit.mark_reduced(completes_step=True)
        return None

    def _check_reduced(self, shard_numel: int) -> None:
        if sum(parameter.numel for parameter in self.unit.parameter_shards(trainable_only=True)) != shard_numel:
            raise RuntimeError(
                f"some trainable parameters of {self.unit.label} got no gradient in this backward pass; FSDP2 then "
                "leaves them out and quantized gradients cannot tell which. Freeze them (requires_grad = False), or "
                "call model.set_reduce_scatter_unused_params(True), which newer torch releases have"
            )


def exchange(gradients: GradientSum, hop: GradientHop | None, group: dist.ProcessGroup) -> GradientSum:
    """Send a piece of gradients [G, ..., L] to each rank of the hop's group: the sum [..., L] of those sent here."""
    if hop is None:  # a group of one rank
        return gradients.only_piece()
    return hop.receive(all_to_all(hop.send(gradients), group))


def all_to_all(wires: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send wires[g] to the group's rank g: what each of the G ranks sent here, uint8 [G, ...]."""
    received = torch.empty_like(wires)
    dist.all_to_all_single(received, wires, group=group)
    return received


def scaled_as(op: Any, total: Tensor, world_size: int) -> Tensor:
    """Scale the sum over all ranks as FSDP2's reduce operation asks: AVG, SUM or PREMUL_SUM."""
    if op == dist.ReduceOp.AVG:
        return total / total.new_full((), world_size)  # by a tensor: see quantize_blocks
    if op == dist.ReduceOp.SUM:
        return total
    kind, factor = op.__getstate__()  # the only way to read a PREMUL_SUM's factor
    if kind != dist.ReduceOp.PREMUL_SUM:
        raise ValueError(f"gradients cannot be reduced by {op}; ZeRO++ supports AVG, SUM and PREMUL_SUM")
    return total * factor
