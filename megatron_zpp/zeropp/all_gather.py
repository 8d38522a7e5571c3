"""The parameter all-gather of ZeRO++: quantized (qwZ) and through a secondary partition in each node (hpZ).

FSDP2 hands over the flat shard [L] of one unit and wants [N, P, L]: all ranks' shards, in rank order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Agreement
from .collectives import TorchAllocator, all_gather, count_flat_ring
from .config import ZeroPPConfig
from .fsdp_unit import AllGather, FSDPUnit, refuse_capture
from .monitor import ErrorMonitor
from .traffic import Traffic
from .unseen_changes import UnseenChanges
from .weight_encoder import WeightEncoder


class QuantizedAllGather(TorchAllocator, AllGather):
    """qwZ alone (ZeRO++ section 3.1): one flat all-gather of quantized shards, each time."""

    def __init__(self, *, unit: FSDPUnit, config: ZeroPPConfig, traffic: Traffic, monitor: ErrorMonitor) -> None:
        self.unit, self.topology, self.config, self.traffic = unit, unit.topology, config, traffic
        self.encoder = WeightEncoder(unit, unit.topology, config, monitor)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        refuse_capture(self.unit)
        check_gathered(self.unit, input_tensor)
        self.encoder.versions += self.unit.parameters_changed()
        weights = self.encoder.in_full(input_tensor.dtype)
        wire = self.encoder.encode(input_tensor, weights, self.topology.rank)
        weights.decode(gather_wires(wire, group), out=output_tensor.view(-1, weights.numel))
        self.unit.mark_gathered()
        count_flat_ring(self.traffic, self.topology, weights.nbytes, self.unit.stays_gathered)
        return None

    def forget_secondary_partition(self) -> None:
        """There is none; see HierarchicalAllGather."""

    def state_dict(self) -> dict[str, Tensor]:
        """What the weights of the next gather depend on beside the parameters; nothing with the default settings."""
        return self.encoder.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.encoder.load_state_dict(state)


class HierarchicalAllGather(QuantizedAllGather):
    """hpZ (ZeRO++ section 3.2), with or without qwZ: parameters cross nodes once per optimizer step.

    When the parameters changed, the N ranks with this local rank p gather their shards into the secondary partition
    [N, L]; every gather is then among the P ranks of the node. All ranks see the same weights: a rank's own
    shard goes through the same quantization.
    """

    def __init__(
        self,
        *,
        unit: FSDPUnit,
        config: ZeroPPConfig,
        traffic: Traffic,
        monitor: ErrorMonitor,
        unseen_changes: UnseenChanges,
        agreement: Agreement | None,
    ) -> None:
        super().__init__(unit=unit, config=config, traffic=traffic, monitor=monitor)
        self.unseen_changes, self.agreement = unseen_changes, agreement
        unseen_changes.units.append(unit)
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
        refuse_capture(self.unit)
        check_gathered(self.unit, input_tensor)
        # FSDP2 gathers on its own stream, but ``unshard()`` by hand on the current one: order the two by an event.
        stream = torch.get_device_module(input_tensor.device).current_stream()
        if self._last_use is not None:  # always None on a CPU, whose streams are one and have no events
            stream.wait_event(self._last_use)
        kept_as = (input_tensor.dtype, input_tensor.device)
        if kept_as != self._kept_as:  # the model was cast or moved
            self.secondary_partition, self._kept_as = None, kept_as
        if self.agreement is not None:  # before any collective that only some ranks may take part in
            self.agreement.check(self.unit)
        self.unseen_changes.look_for(self.unit)
        changed = self.unit.parameters_changed()
        if not self.unit.keeps_copies:
            self.forget_secondary_partition()
        if changed or self.secondary_partition is None:
            self.encoder.versions += changed
            self.secondary_partition = self._gather_between_nodes(input_tensor)
            self.unit.mark_gathered()
        num_nodes, ranks_per_node = self.topology.num_nodes, self.topology.ranks_per_node
        output = output_tensor.view(num_nodes, ranks_per_node, input_tensor.numel())
        self._gather_within_node(self.secondary_partition, output)
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
        self.unseen_changes.gathered(self.unit, shard)
        if self.config.weight_difference_bits is not None and old is not None:
            return self._add_differences(shard, old)
        return self._gather_in_full(shard, old)

    def _gather_in_full(self, shard: Tensor, old: Tensor | None) -> Tensor:
        """The shards themselves, quantized with qwZ, over the old ones: fresh memory is slow on a CPU."""
        weights = self.encoder.in_full(shard.dtype)
        wires = self._exchange(self.encoder.encode(shard, weights, self.topology.rank))
        if self._keeps_wires:
            return wires
        out = shard.new_empty(self.topology.num_nodes, shard.numel()) if old is None else old
        return weights.decode(wires, out)

    def _add_differences(self, shard: Tensor, copies: Tensor) -> Tensor:
        """What changed since the copies [N, L], or [N, nbytes] (SDP4Bit section 3.1).

        All N ranks add the same dequantized differences in the same way, so their copies stay equal to the bit. What
        rounding lost of the own shard is in its next difference.
        """
        differences = self.encoder.differences(shard.dtype)
        own_copy = self.encoder.copies_as_numbers(copies[self.topology.node], shard.dtype)
        wires = self._exchange(self.encoder.encode(shard, differences, self.topology.rank, minus=own_copy))
        return self.encoder.move_copies(copies, wires, shard.dtype)

    def _exchange(self, wire: Tensor) -> Tensor:
        self.traffic.add(inter_node=(self.topology.num_nodes - 1) * wire.nbytes, stays=True)
        return gather_wires(wire, self.topology.inter_group)  # [N, nbytes]

    def _gather_within_node(self, secondary_partition: Tensor, output: Tensor) -> None:
        """Intra-node stage: the secondary partitions of the node's P ranks into [N, P, L]."""
        group, weights = self.topology.intra_group, self.encoder.within_node(output.dtype)
        sent = secondary_partition
        if weights is None:
            works = [
                all_gather(output[n].flatten(), secondary_partition[n], group=group, async_op=True)
                for n in range(self.topology.num_nodes)
            ]
            for work in works:
                work.wait()
        else:
            if not self._keeps_wires:
                sent = self.encoder.encode_within_node(secondary_partition, weights, self.topology.local_rank)
            weights.decode(gather_wires(sent, group).transpose(0, 1), out=output)
        nbytes = (self.topology.ranks_per_node - 1) * sent.nbytes
        self.traffic.add(intra_node=nbytes, stays=self.unit.stays_gathered)

    def state_dict(self) -> dict[str, Tensor]:
        state = super().state_dict()
        if state and state["is_current"] and self.unit.checksum is not None:
            state["checksum"] = self.unit.checksum  # whatever changes before the next gather is seen there too
        if self.encoder.sends_differences and self.secondary_partition is not None and self.unit.keeps_copies:
            state["copies"] = self.secondary_partition.clone()  # training goes on in place
            if self._keeps_wires and self._kept_as is not None:
                state["copies_dtype"] = torch.zeros(1, dtype=self._kept_as[0])  # that they were encoded from
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        if "checksum" in state:
            self.unit.checksum = state["checksum"].to(self.unit.device, copy=True)
        if "copies" in state:
            self.secondary_partition = state["copies"].to(self.unit.device, copy=True)
            self._kept_as = (state.get("copies_dtype", self.secondary_partition).dtype, self.secondary_partition.device)
            self.unit.may_have_stepped = self.unit.parameters_changed()  # or there would be no copies


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
