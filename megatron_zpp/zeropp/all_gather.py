"""The parameter all-gather of ZeRO++: quantized (qwZ) and through a secondary partition in each node (hpZ).

FSDP2 hands over the flat shard [L] of one unit and wants [N, P, L]: all ranks' shards, in rank order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from .collectives import TorchAllocator, all_gather, count_flat_ring
from .config import ZeroPPConfig
from .fsdp_unit import FSDPUnit
from .topology import Topology
from .traffic import Traffic
from .wire_format import WireFormat


def gather_encoded(shards: Tensor, wire_format: WireFormat, group: dist.ProcessGroup) -> Tensor:
    """All-gather shards [S, L] of each of the group's G ranks as one encoded buffer: uint8 [G, S, nbytes]."""
    wire = wire_format.encode(shards)
    wires = torch.empty(group.size(), *wire.shape, dtype=torch.uint8, device=wire.device)
    all_gather(wires.flatten(), wire.flatten(), group=group)
    return wires


class QuantizedAllGather(TorchAllocator, AllGather):
    """qwZ alone (ZeRO++ section 3.1): one flat all-gather of quantized shards, each time."""

    def __init__(self, unit: FSDPUnit, topology: Topology, config: ZeroPPConfig, traffic: Traffic) -> None:
        self.unit, self.topology, self.config, self.traffic = unit, topology, config, traffic

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        check_uniform_dtype(self.unit, input_tensor)
        weights = WireFormat(
            self.unit.parameter_shards(), self.config.weight_bits, self.config.weight_block_size, input_tensor.dtype
        )
        wires = gather_encoded(input_tensor.unsqueeze(0), weights, group)  # [W, 1, nbytes]
        weights.decode(wires.squeeze(1), out=output_tensor.view(-1, weights.numel))
        count_flat_ring(self.traffic, self.topology, weights.nbytes)
        return None


class HierarchicalAllGather(TorchAllocator, AllGather):
    """hpZ (ZeRO++ section 3.2), with or without qwZ: parameters cross nodes once per optimizer step.

    When the parameters changed, the N ranks with this rank's place p gather their shards into the secondary partition
    [N, L]; every gather then takes place among the P ranks of the node. All ranks see the same weights: a rank's own
    shard goes through the same quantization.
    """

    def __init__(self, unit: FSDPUnit, topology: Topology, config: ZeroPPConfig, traffic: Traffic) -> None:
        self.unit, self.topology, self.config, self.traffic = unit, topology, config, traffic
        self.secondary_partition: Tensor | None = None  # [N, L], in the dtype of the gather
        self._last_use: torch.Event | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        check_uniform_dtype(self.unit, input_tensor)
        # FSDP2 gathers on its own stream, but ``unshard()`` by hand on the current one: order the two by an event.
        stream = torch.accelerator.current_stream() if input_tensor.is_cuda else None
        if stream is not None and self._last_use is not None:
            stream.wait_event(self._last_use)
        if self.unit.parameters_changed() or self.secondary_partition is None:
            self._refresh_secondary_partition(input_tensor)
        self._gather_within_node(
            output_tensor.view(self.topology.num_nodes, self.topology.ranks_per_node, input_tensor.numel())
        )
        if stream is not None:
            self._last_use = stream.record_event()
        return None

    def _refresh_secondary_partition(self, shard: Tensor) -> None:
        """Inter-node stage: shards [L] of the N ranks with equal p into the secondary partition [N, L]."""
        if self.secondary_partition is None or self.secondary_partition.dtype != shard.dtype:
            self.secondary_partition = shard.new_empty(self.topology.num_nodes, shard.numel())
        weights = self._wire_format(self.config.weight_bits if self.config.quantized_weights else None, shard.dtype)
        wires = gather_encoded(shard.unsqueeze(0), weights, self.topology.inter_group)  # [N, 1, nbytes]
        weights.decode(wires.squeeze(1), out=self.secondary_partition)
        self.traffic.add(inter_node=(self.topology.num_nodes - 1) * weights.nbytes)

    def _gather_within_node(self, output: Tensor) -> None:
        """Intra-node stage: the secondary partitions [N, L] of the node's P ranks into [N, P, L]."""
        assert self.secondary_partition is not None
        group, others = self.topology.intra_group, self.topology.ranks_per_node - 1
        if self.config.weight_intra_bits is None:
            works = [
                all_gather(output[n].flatten(), self.secondary_partition[n], group=group, async_op=True)
                for n in range(self.topology.num_nodes)
            ]
            for work in works:
                work.wait()
            self.traffic.add(intra_node=others * self.secondary_partition.nbytes)
        else:
            weights = self._wire_format(self.config.weight_intra_bits, output.dtype)
            wires = gather_encoded(self.secondary_partition, weights, group)  # [P, N, nbytes]
            weights.decode(wires.transpose(0, 1), out=output)
            self.traffic.add(intra_node=others * self.topology.num_nodes * weights.nbytes)

    def _wire_format(self, bits: int | None, dtype: torch.dtype) -> WireFormat:
        return WireFormat(self.unit.parameter_shards(), bits, self.config.weight_block_size, dtype)


def check_uniform_dtype(unit: FSDPUnit, buffer: Tensor) -> None:
    """FSDP2 gathers a unit of several dtypes as raw bytes, in which parameters can't be told apart."""
    if buffer.dtype == torch.uint8:
        raise ValueError(
            f"the parameters of {unit.label} are gathered in different dtypes; ZeRO++ needs one dtype per fully_shard "
            "unit: set MixedPrecisionPolicy(param_dtype=...) or wrap them separately"
        )
