"""The parameter all-gather of ZeRO++: quantized (qwZ) and through a secondary partition in each node (hpZ).

FSDP2 hands over the flat shard [L] of one unit and wants [N, P, L]: all ranks' shards, in rank order.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from ..fsdp.collectives import PlainAllGather, all_gather, count_flat_ring
from ..fsdp.fsdp_unit import FSDPUnit, WeightGather
from ..fsdp.shared import Shared
from ..fsdp.waits import on_stream, refuse_capture
from ..wire.layout import KeptScales
from ..wire.moves import Moves, apply_moves, measure_moves
from .sent_shards import SentShard, gather_wires, send
from .unseen_changes import UnseenChanges, load_changes, state_of_changes
from .weight_encoder import WeightEncoder, load_row


class QuantizedAllGather(WeightGather):
    """qwZ alone (ZeRO++ section 3.1): a flat all-gather of quantized shards.

    Inside ``ZeroPP.resident_weights`` a rank keeps what arrived, and decodes it again until the parameters change.

    Memory and streams: what is kept between gathers, what is in flight and all that is made of them are allocated,
    written, read and freed on ``stream``, so the allocator reuses their memory only for work that comes after them
    there. The stream waits for the caller, and the caller for the stream.
    """

    def __init__(self, unit: FSDPUnit, shared: Shared, unseen_changes: UnseenChanges, stream: torch.Stream) -> None:
        self.unit, self.topology, self.traffic = unit, unit.topology, shared.traffic
        self.encoder = WeightEncoder(unit, unit.topology.num_nodes, shared)
        self.formats = self.encoder.formats
        self.unseen_changes, self.stream = unseen_changes, stream
        unseen_changes.units.append(unit)
        # Resident weights: the wires of all W shards, uint8 [W, nbytes]; with hpZ, see ``_gather_within_node``.
        self.resident: Tensor | None = None
        self._kept_as: tuple[torch.dtype, torch.device] | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        refuse_capture(self.unit.device, self.unit.label)
        check_gathered(self.unit, input_tensor)
        # FSDP2 gathers on its own stream, but ``unshard()`` by hand on the current one.
        with on_stream(self.stream, input_tensor.device):
            kept_as = (input_tensor.dtype, input_tensor.device)
            if self.unit.has_nf4 and self.unit.remove_trainable_from_nf4():
                self.forget_copies()
            if kept_as != self._kept_as:  # the model was cast or moved
                self.forget_copies()
                self._kept_as = kept_as
            self._gather(output_tensor, input_tensor)
        return None

    def _gather(self, output: Tensor, shard: Tensor) -> None:
        is_resident = self.unseen_changes.passes.is_resident
        if is_resident:
            self.unseen_changes.look_for(self.unit)
        changed, wires = bool(self.unit.changed()), self.resident
        weights = self.formats.weights(self.unit.whole, shard.dtype)
        if changed or wires is None:
            self.encoder.versions += changed
            if is_resident:
                self.unseen_changes.gathered(self.unit, shard, self.unit.whole)
            wire = self.encoder.encode(shard, weights, self.topology.rank)
            self.encoder.sample(shard, weights, wire)
            with self.unit.waits.collective("gather", self.unit.label, crosses_nodes=self.topology.num_nodes > 1):
                wires = gather_wires(wire, self.topology.group)
            self.resident = wires if is_resident else None
            self.unit.mark_gathered()
            count_flat_ring(self.traffic, self.topology, weights.nbytes, self.unit.stays_gathered)
        weights.decode(wires, out=output.view(-1, weights.numel))

    def forget_copies(self) -> None:
        """Gather in full next time."""
        self.resident = None

    def forget_resident(self) -> None:
        """Free the resident weights, and what is known of changes since they arrived."""
        self.resident = None
        self.unit.checksums.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next gather depends on besides the parameters; nothing with the default settings."""
        return self.encoder.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.encoder.load_state_dict(state)


class FullPrecisionAllGather(QuantizedAllGather):
    """FSDP2's own all-gather, but inside ``ZeroPP.resident_weights``, where a rank keeps the numbers that arrive."""

    def __init__(self, unit: FSDPUnit, shared: Shared, unseen_changes: UnseenChanges, stream: torch.Stream) -> None:
        super().__init__(unit, shared, unseen_changes, stream)
        self._plain = PlainAllGather(unit, shared)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gather = super().__call__ if self.unseen_changes.passes.is_resident else self._plain
        return gather(output_tensor, input_tensor, group, async_op)

    def state_dict(self) -> dict[str, Tensor]:
        return {}


class HierarchicalAllGather(QuantizedAllGather):
    """hpZ (ZeRO++ section 3.2), with or without qwZ: parameters cross nodes once per optimizer step.

    When the parameters changed, the N ranks with this local rank p gather their shards into the secondary partition
    [N, L]; every gather is then among the P ranks of the node. All ranks see the same weights: each rank quantizes and
    decodes its local shard, too. Frozen parameters of a unit are sent only when they changed.

    When a forward pass begins, the gathers of all changed shards start (``encode_for_prefetch`` names exceptions), and
    each must have finished when FSDP2 asks for its unit. If a pass did not ask, and the parameters have changed by the
    next one, what was sent is dropped.
    """

    def __init__(
        self,
        unit: FSDPUnit,
        shared: Shared,
        unseen_changes: UnseenChanges,
        consistency_check: Callable[[FSDPUnit], None] | None,
        stream: torch.Stream,
    ) -> None:
        super().__init__(unit, shared, unseen_changes, stream)
        self.consistency_check = consistency_check
        # [N, L] in the gather's dtype; where wires are kept, uint8 [N, nbytes].
        self.secondary_partition: Tensor | None = None
        self._loaded_row: Tensor | None = None  # with moves: this rank's, of a checkpoint, until it is sent in full
        self._sent: SentShard | None = None
        # Most codes of loaded parameters have moved.
        for module in unit.modules:
            module.register_load_state_dict_post_hook(lambda *_: self.forget_copies())

    def _gather(self, output: Tensor, shard: Tensor) -> None:
        # Before any collective that only some ranks may take part in. Passes that send nothing need no equals.
        if self.consistency_check is not None and not self.unseen_changes.passes.sends_nothing:
            self.consistency_check(self.unit)
        self.unseen_changes.look_for(self.unit)
        changed = self.unit.changed()
        if changed:
            changed |= self._drop_sent()
            if not self.unit.keeps_copies(changed):
                self.forget_copies()
        if self._sent is not None and self._sent.work is None:  # sending it failed
            changed |= self._drop_sent()
        if self._sent is None and (changed or self.secondary_partition is None):
            send([self._encode(shard, changed)], self.traffic)
        if self._sent is not None:
            self.secondary_partition = self._receive(shard)
        assert self.secondary_partition is not None
        num_nodes, ranks_per_node = self.topology.num_nodes, self.topology.ranks_per_node
        self._gather_within_node(self.secondary_partition, output.view(num_nodes, ranks_per_node, shard.numel()))

    def encode_for_prefetch(self) -> SentShard | None:
        """Encode the shard at the beginning of a forward pass, if it changed, for ``send``.

        Without a secondary partition (at the first step, after a load or ``invalidate``) a unit is sent only when FSDP2
        asks for it, and so is one that did not need what was sent before. With a consistency check, no rank sends
        before ranks have compared at the gather.
        """
        unit = self.unit
        if self.consistency_check is not None or not unit.can_be_gathered:
            return None
        if unit.has_nf4 and unit.remove_trainable_from_nf4():
            self.forget_copies()
        changed = unit.changed()
        if not changed:
            return None
        was_needed = self._sent is None
        changed |= self._drop_sent()
        if was_needed and self.secondary_partition is not None and unit.keeps_copies(changed):
            with torch.no_grad():
                shard = unit.flat_shard()
            if (shard.dtype, shard.device) == self._kept_as:
                return self._encode(shard, changed)
        return None

    def forget_copies(self) -> None:
        """Gather in full next time."""
        self._drop_sent()
        self.secondary_partition = self._loaded_row = self.resident = None

    def forget_resident(self) -> None:
        """Free the resident weights; the secondary partition stays."""
        self.resident = None

    # The partition outlives an evaluation in inference mode, so it must not be an inference tensor.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _encode(self, shard: Tensor, changed: set[int]) -> SentShard:
        """Begin the inter-node stage: encode the shard [L], or what changed of it, for ``send``."""
        version, state = self.encoder.versions, super().state_dict()
        part = self.unit.whole if self.secondary_partition is None else self.unit.changed_part(changed)
        self.encoder.versions += bool(changed)
        self.unseen_changes.gathered(self.unit, shard, part)
        values, format = part.take(shard), self.formats.weights(part, shard.dtype)
        if not self.formats.sends_moves:
            encoded: Tensor | Moves = self.encoder.encode(values, format, self.topology.rank)
        elif self.secondary_partition is None:
            encoded = format.encode(values, kept=KeptScales(self._loaded_row))
        else:
            old = self.encoder.copies_of(part, self.secondary_partition[self.topology.node], shard.dtype)
            encoded = measure_moves(format, old, format.encode(values, kept=KeptScales(old)))
        self._sent = SentShard(self.unit, part, format, encoded, version, state)
        self.unit.mark_gathered()
        return self._sent

    @torch.inference_mode(False)
    @torch.no_grad()
    def _receive(self, shard: Tensor) -> Tensor:
        """Finish the inter-node stage: return the shards of the N ranks with equal p as the new secondary partition."""
        sent, old = self._sent, self.secondary_partition
        assert sent is not None and sent.work is not None
        # Nothing half-done if this fails.
        self._sent = self.secondary_partition = self._loaded_row = self.resident = None
        with self.unit.waits.collective("gather", self.unit.label, crosses_nodes=True):
            sent.work.wait()
        self._count(sent)
        part = sent.part
        values = part.take(shard)
        if sent.are_moves:
            assert old is not None
            arrived = apply_moves(sent.format, self.encoder.copies_of(part, old, shard.dtype), sent.wires)
            self.encoder.sample(values, sent.format, arrived[self.topology.node])
        else:
            self.encoder.sample(values, sent.format, sent.wire)
            arrived = self._in_full(sent, values, old)
        return arrived if old is None else self.encoder.put_copies(part, arrived, old, shard.dtype)

    def _in_full(self, sent: SentShard, values: Tensor, old: Tensor | None) -> Tensor:
        """Return the shards, quantized with qwZ. They replace the old ones in place: fresh memory is slow on a CPU."""
        if self.formats.keeps_wires:
            return sent.wires
        out = old if old is not None and sent.part.is_whole else values.new_empty(len(sent.wires), values.numel())
        return sent.format.decode(sent.wires, out)

    def _drop_sent(self) -> set[int]:
        """Drop what is in flight as if it had not been sent, but count its bytes. Return its parameters' indices."""
        if self._sent is None:
            return set()
        sent, self._sent = self._sent, None
        if sent.work is not None:  # else sending it failed
            with on_stream(self.stream, sent.wire.device):
                # It must not write to memory that was reused.
                with self.unit.waits.collective("drop what was gathered", self.unit.label, crosses_nodes=True):
                    sent.work.wait()
            self._count(sent)
        self.encoder.versions = sent.version
        self.unit.mark_updated(sent.part.indices)
        return set(sent.part.indices)

    def _count(self, sent: SentShard) -> None:
        # Counted when it is used: a step's count has the bytes of the weights that its passes see.
        self.traffic.add(inter_node=(self.topology.num_nodes - 1) * sent.wire.nbytes, stays=True)

    def _gather_within_node(self, secondary_partition: Tensor, output: Tensor) -> None:
        """Run the intra-node stage: gather the secondary partitions of the node's P ranks into [N, P, L].

        Resident weights are what arrives: wires uint8 [N, P, nbytes], or numbers [N, P, L].
        """
        group, weights = self.topology.intra_group, self.formats.weights_within_node(self.unit.whole, output.dtype)
        if self.resident is not None:
            if weights is None:
                output.copy_(self.resident)
            else:
                weights.decode(self.resident, out=output)
            return
        sent, is_resident = secondary_partition, self.unseen_changes.passes.is_resident
        is_alone = self.topology.ranks_per_node == 1  # as where experts are divided among a node's ranks
        if weights is None:
            if is_alone:
                output.copy_(secondary_partition.view_as(output))
            else:
                with self.unit.waits.collective("gather", self.unit.label, crosses_nodes=False):
                    all_gather_each(output.flatten(1).unbind(), secondary_partition.unbind(), group)
            self.resident = output.clone() if is_resident else None
        else:
            if not self.formats.keeps_wires:
                sent = self.encoder.encode_within_node(secondary_partition, weights, self.topology.local_rank)
            wires = sent.unsqueeze(1)  # [N, P, nbytes]
            if not is_alone:
                with self.unit.waits.collective("gather", self.unit.label, crosses_nodes=False):
                    wires = gather_wires(sent, group).transpose(0, 1)
            weights.decode(wires, out=output)
            self.resident = wires if is_resident else None
        nbytes = (self.topology.ranks_per_node - 1) * sent.nbytes
        self.traffic.add(intra_node=nbytes, stays=self.unit.stays_gathered)

    def state_dict(self) -> dict[str, Tensor]:
        # What has not arrived yet is sent again after a resume, with the same bits.
        state = super().state_dict() if self._sent is None else dict(self._sent.state)
        if not state:
            return state
        dtype = self._kept_as[0] if self._kept_as is not None else self.unit.gathered_dtype
        changed = self.unit.changed()
        if self.formats.sends_moves:
            partition = self.secondary_partition if self.unit.keeps_copies(changed) else None
            row = partition[self.topology.node] if partition is not None else self._loaded_row
            return state | self.encoder.row_state(row, dtype)
        unsent = set() if state["is_current"] else set(self.unit.changed_part(changed).indices)
        if self._sent is not None:
            unsent.update(self._sent.part.indices)
        return state | state_of_changes(self.unit, self.unit.checksums, unsent, dtype)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        if self.formats.sends_moves:
            with on_stream(self.stream, self.unit.device):
                self._loaded_row = load_row(self.unit, state)
            self._kept_as = (state["dtype"].dtype, self.unit.device) if state else None
            return
        self.unit.checksums |= load_changes(self.unit, state)


def all_gather_each(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-gather several tensors in one collective: ``inputs[i]`` of each of the group's G ranks into ``outputs[i]``.

    One launch, and with NCCL no copies: an all-gather of one buffer would need a permuting copy of all of it.
    """
    with _coalescing_manager(group):
        for output, shard in zip(outputs, inputs, strict=True):
            all_gather(output, shard, group=group)


def check_gathered(unit: FSDPUnit, shard: Tensor) -> None:
    """Raise ValueError unless FSDP2 gathers the parameters themselves, in one floating-point dtype of up to 32 bits."""
    if not shard.is_floating_point():
        raise ValueError(
            f"the parameters of {unit.label} are gathered in different dtypes, or as integers; ZeRO++ needs one "
            "floating-point dtype per fully_shard unit: set MixedPrecisionPolicy(param_dtype=...), as "
            "for fp32 adapters on a bf16 base, or wrap them apart"
        )
    if shard.dtype == torch.float64:
        raise ValueError(
            f"the parameters of {unit.label} are gathered as float64, which ZeRO++ does not send: set "
            "MixedPrecisionPolicy(param_dtype=...) to float32 or less"
        )
    if shard.numel() != unit.whole.numel or shard.dtype.itemsize == 1:  # torchao gathers bare linear layers as float8
        raise ValueError(
            f"the parameters of {unit.label} are gathered through an extension of their own (such as float8); ZeRO++ "
            "quantizes by itself: leave that extension out (torchao: enable_fsdp_float8_all_gather=False)"
        )
