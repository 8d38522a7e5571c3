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
from .monitor import ErrorMonitor
from .quantization import mix_seed
from .topology import Topology
from .traffic import Traffic
from .wire_format import WireFormat, wire_format


class QuantizedAllGather(TorchAllocator, AllGather):
    """qwZ alone (ZeRO++ section 3.1): one flat all-gather of quantized shards, each time."""

    def __init__(
        self, unit: FSDPUnit, topology: Topology, config: ZeroPPConfig, traffic: Traffic, monitor: ErrorMonitor
    ) -> None:
        self.unit, self.topology, self.config = unit, topology, config
        self.traffic, self.monitor = traffic, monitor
        self.versions = 0  # of the parameters, so far

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        check_gathered(self.unit, input_tensor)
        self.versions += self.unit.parameters_changed()
        weights = self._format(self.config.weight_bits, self.config.weight_block_size, input_tensor.dtype)
        wire = self._encode(input_tensor, weights)
        weights.decode(gather_wires(wire, group), out=output_tensor.view(-1, weights.numel))
        self.unit.mark_gathered()
        count_flat_ring(self.traffic, self.topology, weights.nbytes)
        return None

    def _encode(self, shard: Tensor, weights: WireFormat, copy: Tensor | None = None) -> Tensor:
        """Encode the own shard [L], or its difference from a copy of it, and sample the error."""
        # The noise depends on the version, so that every gather of one version gives the same weights.
        wire = weights.encode(shard, self._noise_seed("inter", self.topology.rank), minus=copy)
        if self.monitor.is_due(self.versions):
            arrived = weights.decode(wire, out=torch.empty_like(shard, dtype=torch.float32))
            self.monitor.record("weights", self.unit.name, shard, arrived if copy is None else arrived.add_(copy))
        return wire

    def _format(self, bits: int | None, block_size: int | None, dtype: torch.dtype) -> WireFormat:
        return wire_format(self.unit.parameter_shards(), bits, block_size, dtype)

    def _noise_seed(self, hop: str, source: int) -> int | None:
        if self.config.weight_rounding == "nearest":
            return None
        return mix_seed(self.config.seed, "weights", hop, self.unit.name, source, self.versions)

    def forget_secondary_partition(self) -> None:
        """There is none; see HierarchicalAllGather."""

    def state_dict(self) -> dict[str, Tensor]:
        """What the weights of the next gather depend on beside the parameters; nothing with the default settings."""
        if self.config.weight_rounding == "nearest" and self.config.weight_difference_bits is None:
            return {}
        return {
            "versions": torch.tensor(self.versions),
            "is_current": torch.tensor(not self.unit.parameters_changed()),  # an evaluation may have gathered already
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            self.versions = int(state["versions"])
            if state["is_current"]:
                self.unit.mark_gathered()


class HierarchicalAllGather(QuantizedAllGather):
    """hpZ (ZeRO++ section 3.2), with or without qwZ: parameters cross nodes once per optimizer step.

    When the parameters changed, the N ranks with this rank's place p gather their shards into the secondary partition
    [N, L]; every gather then takes place among the P ranks of the node. All ranks see the same weights: a rank's own
    shard goes through the same quantization.
    """

    def __init__(
        self, unit: FSDPUnit, topology: Topology, config: ZeroPPConfig, traffic: Traffic, monitor: ErrorMonitor
    ) -> None:
        super().__init__(unit, topology, config, traffic, monitor)
        # [N, L] in the gather's dtype; with hpz_secondary_dtype "int8" uint8 [N, nbytes], as it arrived.
        self.secondary_partition: Tensor | None = None
        self._keeps_wires = config.hpz_secondary_dtype == "int8"
        self._kept_as: tuple[torch.dtype, torch.device] | None = None
        self._last_use: torch.Event | None = None
        # Loaded parameters are further from the copies than low-bit differences can say.
        for module in unit.modules:
            module.register_load_state_dict_post_hook(lambda *_: self.forget_secondary_partition())

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        check_gathered(self.unit, input_tensor)
        # FSDP2 gathers on its own stream, but ``unshard()`` by hand on the current one: order the two by an event.
        stream = torch.accelerator.current_stream() if input_tensor.device.type != "cpu" else None
        if stream is not None and self._last_use is not None:
            stream.wait_event(self._last_use)
        kept_as = (input_tensor.dtype, input_tensor.device)
        if kept_as != self._kept_as:  # the model was cast or moved
            self.secondary_partition, self._kept_as = None, kept_as
        changed = self.unit.parameters_changed()
        if changed or self.secondary_partition is None:
            self.versions += changed
            self.secondary_partition = self._gather_between_nodes(input_tensor)
            self.unit.mark_gathered()
        num_nodes, ranks_per_node = self.topology.num_nodes, self.topology.ranks_per_node
        output = output_tensor.view(num_nodes, ranks_per_node, input_tensor.numel())
        self._gather_within_node(self.secondary_partition, output)
        if stream is not None:
            self._last_use = stream.record_event()
        return None

    def forget_secondary_partition(self) -> None:
        """Gather it in full next time."""
        self.secondary_partition = None

    # The partition outlives an evaluation in inference mode, and must not be an inference tensor.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _gather_between_nodes(self, shard: Tensor) -> Tensor:
        """Inter-node stage: the shards [L] of the N ranks with equal p, as the new secondary partition."""
        old, self.secondary_partition = self.secondary_partition, None  # nothing half-done if this fails
        if self.config.weight_difference_bits is not None and old is not None:
            return self._add_differences(shard, old)
        return self._gather_in_full(shard, old)

    def _gather_in_full(self, shard: Tensor, old: Tensor | None) -> Tensor:
        """The shards themselves, quantized with qwZ, in the place of the old ones: fresh memory is slow on a CPU."""
        config = self.config
        quantize = config.quantized_weights and config.weight_difference_bits is None
        weights = self._format(config.weight_bits if quantize else None, config.weight_block_size, shard.dtype)
        wires = self._exchange(self._encode(shard, weights))
        if self._keeps_wires:
            return wires
        out = shard.new_empty(self.topology.num_nodes, shard.numel()) if old is None else old
        return weights.decode(wires, out)

    def _add_differences(self, shard: Tensor, copies: Tensor) -> Tensor:
        """What changed since the copies [N, L] (SDP4Bit section 3.1).

        All N ranks add the same dequantized differences in the same way, so their copies stay equal to the bit. What
        rounding lost of the own shard is in its next difference.
        """
        config = self.config
        differences = self._format(config.weight_difference_bits, config.weight_difference_block_size, shard.dtype)
        wires = self._exchange(self._encode(shard, differences, copies[self.topology.node]))
        return differences.decode_sum(wires.unsqueeze(0), out=copies, accumulate=True)

    def _exchange(self, wire: Tensor) -> Tensor:
        self.traffic.add(inter_node=(self.topology.num_nodes - 1) * wire.nbytes)
        return gather_wires(wire, self.topology.inter_group)  # [N, nbytes]

    def _gather_within_node(self, secondary_partition: Tensor, output: Tensor) -> None:
        """Intra-node stage: the secondary partitions of the node's P ranks into [N, P, L]."""
        config, group = self.config, self.topology.intra_group
        if not self._keeps_wires and config.weight_intra_bits is None:
            works = [
                all_gather(output[n].flatten(), secondary_partition[n], group=group, async_op=True)
                for n in range(self.topology.num_nodes)
            ]
            for work in works:
                work.wait()
            sent = secondary_partition
        else:
            bits = config.weight_bits if self._keeps_wires else config.weight_intra_bits
            weights = self._format(bits, config.weight_block_size, output.dtype)
            sent = secondary_partition
            if not self._keeps_wires:
                # The same noise in every node, so that all ranks see the same weights.
                sent = weights.encode(secondary_partition, self._noise_seed("intra", self.topology.local_rank))
            weights.decode(gather_wires(sent, group).transpose(0, 1), out=output)
        self.traffic.add(intra_node=(self.topology.ranks_per_node - 1) * sent.nbytes)

    def state_dict(self) -> dict[str, Tensor]:
        state = super().state_dict()
        if self.config.weight_difference_bits is not None and self.secondary_partition is not None:
            state["copies"] = self.secondary_partition.clone()  # training goes on in place
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        if "copies" in state:
            self.secondary_partition = state["copies"].to(self.unit.device, copy=True)
            self._kept_as = (self.secondary_partition.dtype, self.secondary_partition.device)


def gather_wires(wire: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather one buffer uint8 [...] of each of the group's G ranks: uint8 [G, ...]."""
    wires = torch.empty(group.size(), *wire.shape, dtype=torch.uint8, device=wire.device)
    all_gather(wires.flatten(), wire.flatten(), group=group)
    return wires


def check_gathered(unit: FSDPUnit, shard: Tensor) -> None:
    """Raise ValueError for what FSDP2 gathers in another form than the parameters of one floating-point type."""
    if not shard.is_floating_point():
        raise ValueError(
            f"the parameters of {unit.label} are gathered in different dtypes, or as integers; ZeRO++ needs one "
            "floating-point dtype per fully_shard unit: set MixedPrecisionPolicy(param_dtype=...) or wrap them apart"
        )
    if shard.numel() != sum(parameter.numel for parameter in unit.parameter_shards()):
        raise ValueError(
            f"the parameters of {unit.label} are gathered through an extension of their own (such as float8); ZeRO++ "
            "quantizes by itself: leave that extension out"
        )
