"""The gradient reduce-scatter of ZeRO++ (qgZ), which crosses nodes once per optimizer step, with LoCo.

FSDP2 hands over the flat gradients [N, P, L] of one unit, rank by rank, and wants this rank's reduced shard [L].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from .collectives import TorchAllocator
from .config import ZeroPPConfig
from .fsdp_unit import FSDPUnit
from .loco import ErrorFeedback
from .topology import Topology
from .traffic import Traffic
from .wire_format import ParameterShard, WireFormat


@dataclass
class MicroBatch:
    """Where the training loop is, shared by all units."""

    is_last: bool = True


class HierarchicalReduceScatter(TorchAllocator, ReduceScatter):
    """qgZ (ZeRO++ section 3.3) in two hops, both accumulated in fp32.

    Each micro-batch, an all-to-all within the node adds up the node's gradients for the N shards with this rank's
    place p, [N, L]. They stay here until the last micro-batch of the optimizer step, when an all-to-all between the
    nodes adds them up to [L]; earlier micro-batches return zeros, which FSDP2 adds to ``.grad``.
    """

    def __init__(
        self, unit: FSDPUnit, topology: Topology, config: ZeroPPConfig, traffic: Traffic, micro_batch: MicroBatch
    ) -> None:
        self.unit, self.topology, self.config, self.traffic = unit, topology, config, traffic
        self.micro_batch = micro_batch
        self.node_sum: Tensor | None = None  # fp32 [N, L], of the micro-batches so far
        self.feedback = ErrorFeedback(config.loco) if config.loco is not None and topology.num_nodes > 1 else None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        num_nodes, ranks_per_node = self.topology.num_nodes, self.topology.ranks_per_node
        parameters = self._reduced_parameters(output_tensor.numel())
        gradients = input_tensor.view(num_nodes, ranks_per_node, output_tensor.numel())

        micro_batch_sum = self._reduce_within_node(gradients, parameters)
        self.node_sum = micro_batch_sum if self.node_sum is None else self.node_sum.add_(micro_batch_sum)
        if not self.micro_batch.is_last:
            output_tensor.zero_()
            return None

        total = self._reduce_between_nodes(self.node_sum, parameters, dtype=input_tensor.dtype)
        self.node_sum = None
        self.unit.mark_changed()  # an optimizer step follows, and not every optimizer tells (see fsdp_unit)
        output_tensor.copy_(scaled_as(op, total, group.size()))
        return None

    def _reduce_within_node(self, gradients: Tensor, parameters: list[ParameterShard]) -> Tensor:
        """Intra-node hop: [N, P, L] of each of the node's P ranks into the node's sum fp32 [N, L] for this rank's p."""
        if self.topology.ranks_per_node == 1:
            return gradients.squeeze(1).to(torch.float32, copy=True)
        bits = self.config.gradient_intra_bits
        wire_format = WireFormat(parameters, bits, self.config.gradient_block_size, gradients.dtype)
        wires = wire_format.encode(gradients.transpose(0, 1))  # [P, N, nbytes]: P pieces, one for each peer
        received = torch.empty_like(wires)  # [P peers, N, nbytes]
        dist.all_to_all_single(received, wires, group=self.topology.intra_group)
        self.traffic.add(intra_node=wires.nbytes - wires[0].nbytes)
        return wire_format.decode_sum(received)

    def _reduce_between_nodes(self, node_sum: Tensor, parameters: list[ParameterShard], dtype: torch.dtype) -> Tensor:
        """Inter-node hop: the N nodes' sums fp32 [N, L] into this rank's total fp32 [L]."""
        if self.topology.num_nodes == 1:
            return node_sum.squeeze(0)
        block_size = self.config.gradient_block_size
        wire_format = WireFormat(parameters, self.config.gradient_bits, block_size, dtype)
        if self.feedback is None:
            wires = wire_format.encode(node_sum)  # [N, nbytes], one for each node
        else:
            wires = self.feedback.encode(node_sum, wire_format, parameters, block_size)
        received = torch.empty_like(wires)
        dist.all_to_all_single(received, wires, group=self.topology.inter_group)
        self.traffic.add(inter_node=wires.nbytes - wires[0].nbytes)
        return wire_format.decode_sum(received.unsqueeze(1)).squeeze(0)

    def _reduced_parameters(self, shard_numel: int) -> list[ParameterShard]:
        parameters = self.unit.parameter_shards(trainable_only=True)
        if sum(parameter.numel for parameter in parameters) != shard_numel:
            raise RuntimeError(
                f"some trainable parameters of {self.unit.label} got no gradient in this backward pass; FSDP2 then "
                "leaves them out and quantized gradients cannot tell which. Freeze them (requires_grad = False), or "
                "call model.set_reduce_scatter_unused_params(True), which newer torch releases have"
            )
        return parameters


def scaled_as(op: Any, total: Tensor, world_size: int) -> Tensor:
    """Scale the sum over all ranks as FSDP2's reduce operation asks: AVG, SUM or PREMUL_SUM."""
    if op == dist.ReduceOp.AVG:
        return total / world_size
    if op == dist.ReduceOp.SUM:
        return total
    kind, factor = op.__getstate__()  # the only way to read a PREMUL_SUM's factor
    if kind != dist.ReduceOp.PREMUL_SUM:
        raise ValueError(f"gradients cannot be reduced by {op}; ZeRO++ supports AVG, SUM and PREMUL_SUM")
    return total * factor
