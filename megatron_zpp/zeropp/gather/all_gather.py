"""The parameter all-gather of ZeRO++: quantized (qwZ) and through a secondary partition in each node (hpZ).

FSDP2 hands over the flat shard [L] of one unit and wants [N, P, L]: all ranks' shards, in rank order.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from ..fsdp.collectives import PlainAllGather, all_gather, count_flat_ring
from ..fsdp.formats import Formats, UnitPart
from ..fsdp.fsdp_unit import FSDPUnit, WeightGather
from ..fsdp.shared import Shared
from ..fsdp.waits import on_stream, refuse_capture
from ..wire.format import WireFormat
from ..wire.layout import KeptScales
from ..wire.moves import Moves, apply_moves, measure_moves
from ..wire.quantization import mix_seed
from .sent_shards import SentShard, gather_wires, send
from .unseen_changes import UnseenChanges, load_changes, state_of_changes


class QuantizedAllGather(WeightGather):
    """qwZ alone (ZeRO++ section 3.1): a flat all-gather of quantized shards.

    Inside ``ZeroPP.resident_weights`` a rank keeps what arrived, and decodes it again until the parameters change.

    Memory and streams: what is kept between gathers, what is in flight and all that is made of them are allocated,
    written, read and freed on ``stream``, so the allocator reuses their memory only for work that comes after them
    there. The stream waits for the caller, and the caller for the stream.
    """

    def __init__(self, unit: FSDPUnit, shared: Shared, unseen_changes: UnseenChanges, stream: torch.Stream) -> None:
        self.unit, self.topology, self.shared = unit, unit.topology, shared
        self.formats = Formats(shared.config, unit.topology.num_nodes)
        self.unseen_changes, self.stream = unseen_changes, stream
        # Stochastic rounding is right on average over many roundings, so frozen weights are rounded again, too.
        unit.gathers_frozen = shared.config.weight_rounding == "stochastic"
        if shared.config.frozen_dtype is not None and self.formats.has_secondary_partition:
            unit.nf4_skip = shared.config.nf4_skip
            unit.specify(unit.shards, unit.packed)
        self.versions = 0  # how often the parameters changed
        self._sampled_version: int | None = None  # whose error the monitor has
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
        is_resident = self.shared.position.is_resident
        if is_resident:
            self.unseen_changes.look_for(self.unit)
        changed, wires = bool(self.unit.changed()), self.resident
        weights = self.formats.weights(self.unit.whole, shard.dtype)
        if changed or wires is None:
            self.versions += changed
            if is_resident:
                self.unseen_changes.gathered(self.unit, shard, self.unit.whole)
            wire = weights.encode(shard, self._noise_seed("inter", self.topology.rank))
            self._sample(shard, weights, wire)
            with self.shared.waits.collective("gather", self.unit.label, crosses_nodes=self.topology.num_nodes > 1):
                wires = gather_wires(wire, self.topology.group)
            self.resident = wires if is_resident else None
            self.unit.mark_gathered()
            count_flat_ring(self.shared.traffic, self.topology, weights.nbytes, self.unit.stays_gathered)
        weights.decode(wires, out=output.view(-1, weights.numel))

    def forget_copies(self) -> None:
        """Gather in full next time."""
        self.resident = None

    def forget_resident(self) -> None:
        """Free the resident weights, and what is known of changes since they arrived."""
        self.resident = None
        self.unit.checksums.clear()

    def _noise_seed(self, hop: str, source: int) -> int | None:
        """Return the seed of the noise with which local or data-parallel rank ``source`` rounds; None = to nearest."""
        config = self.shared.config
        if config.weight_rounding == "nearest":
            return None
        # The noise depends on the version, so that every gather of one version gives the same weights.
        return mix_seed(config.seed, "weights", hop, self.unit.name, source, self.versions)

    def _sample(self, shard: Tensor, format: WireFormat, wire: Tensor) -> None:
        """Sample the error of what is sent of a shard [L], as ``wire`` says it, if a sample is due."""
        monitor = self.shared.monitor
        # qwZ alone gathers a version several times.
        if monitor.is_due(self.versions) and self._sampled_version != self.versions:
            self._sampled_version = self.versions
            arrived = format.decode(wire, out=torch.empty_like(shard, dtype=torch.float32))
            monitor.record("weights", self.unit.name, shard, arrived)
            monitor.record_codes("weights", self.unit.name, format, wire)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next gather depends on besides the parameters; nothing with the default settings."""
        config = self.shared.config
        if config.weight_rounding == "nearest" and not config.weight_moves:
            return {}
        is_current = not self.unit.changed()  # an evaluation may have gathered already
        return {"versions": torch.tensor(self.versions), "is_current": torch.tensor(is_current)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            self.versions = int(state["versions"])
            if state["is_current"]:
                self.unit.mark_gathered()


class FullPrecisionAllGather(QuantizedAllGather):
    """FSDP2's own all-gather, but inside ``ZeroPP.resident_weights``, where a rank keeps the numbers that arrive."""

    def __init__(self, unit: FSDPUnit, shared: Shared, unseen_changes: UnseenChanges, stream: torch.Stream) -> None:
        super().__init__(unit, shared, unseen_changes, stream)
        self._plain = PlainAllGather(unit, shared)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gather = super().__call__ if self.shared.position.is_resident else self._plain
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
        if self.consistency_check is not None and not self.shared.position.sends_nothing:
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
            send([self._encode(shard, changed)], self.shared)
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
        if self.consistency_check is not None or not unit.is_sharded:
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
        version = self.versions
        part = self.unit.whole if self.secondary_partition is None else self.unit.changed_part(changed)
        self.versions += bool(changed)
        self.unseen_changes.gathered(self.unit, shard, part)
        values, format = part.select(shard), self.formats.weights(part, shard.dtype)
        if not self.formats.sends_moves:
            encoded: Tensor | Moves = format.encode(values, self._noise_seed("inter", self.topology.rank))
        elif self.secondary_partition is None:
            encoded = format.encode(values, kept=KeptScales(self._loaded_row))
        else:
            old = self._copies_of(part, self.secondary_partition[self.topology.node], shard.dtype)
            encoded = measure_moves(format, old, format.encode(values, kept=KeptScales(old)))
        self._sent = SentShard(self.unit, part, format, encoded, version, was_current=not changed)
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
        with self.shared.waits.collective("gather", self.unit.label, crosses_nodes=True):
            sent.work.wait()
        self._count(sent)
        part = sent.part
        values = part.select(shard)
        if sent.are_moves:
            assert old is not None
            arrived = apply_moves(sent.format, self._copies_of(part, old, shard.dtype), sent.wires)
            self._sample(values, sent.format, arrived[self.topology.node])
        else:
            self._sample(values, sent.format, sent.wire)
            arrived = self._in_full(sent, values, old)
        return arrived if old is None else self._put_copies(part, arrived, old, shard.dtype)

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
                with self.shared.waits.collective("drop what was gathered", self.unit.label, crosses_nodes=True):
                    sent.work.wait()
            self._count(sent)
        self.versions = sent.version
        self.unit.mark_updated(sent.part.indices)
        return set(sent.part.indices)

    def _count(self, sent: SentShard) -> None:
        # Counted when it is used: a step's count has the bytes of the weights that its passes see.
        self.shared.traffic.add(inter_node=(self.topology.num_nodes - 1) * sent.wire.nbytes, stays=True)

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
        sent, is_resident = secondary_partition, self.shared.position.is_resident
        is_alone = self.topology.ranks_per_node == 1  # as where experts are divided among a node's ranks
        if weights is None:
            if is_alone:
                output.copy_(secondary_partition.view_as(output))
            else:
                with self.shared.waits.collective("gather", self.unit.label, crosses_nodes=False):
                    all_gather_each(output.flatten(1).unbind(), secondary_partition.unbind(), group)
            self.resident = output.clone() if is_resident else None
        else:
            if not self.formats.keeps_wires:
                # The same noise in every node, so that all ranks see the same weights.
                sent = weights.encode(secondary_partition, self._noise_seed("intra", self.topology.local_rank))
            wires = sent.unsqueeze(1)  # [N, P, nbytes]
            if not is_alone:
                with self.shared.waits.collective("gather", self.unit.label, crosses_nodes=False):
                    wires = gather_wires(sent, group).transpose(0, 1)
            weights.decode(wires, out=output)
            self.resident = wires if is_resident else None
        nbytes = (self.topology.ranks_per_node - 1) * sent.nbytes
        self.shared.traffic.add(intra_node=nbytes, stays=self.unit.stays_gathered)

    def _copies_of(self, part: UnitPart, copies: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a part's copies out of a whole unit's, kept in the same way."""
        if not self.formats.keeps_wires:
            return part.select(copies)
        return part.select_wires(
            copies, self.formats.weights(self.unit.whole, dtype), self.formats.weights(part, dtype)
        )

    def _put_copies(self, part: UnitPart, values: Tensor, copies: Tensor, dtype: torch.dtype) -> Tensor:
        """Write a part's copies into a whole unit's, and return these: ``values`` itself if the part is whole."""
        if not self.formats.keeps_wires:
            return part.insert(values, copies)
        formats = self.formats.weights(self.unit.whole, dtype), self.formats.weights(part, dtype)
        return part.insert_wires(values, copies, *formats)

    def state_dict(self) -> dict[str, Tensor]:
        state, unit = super().state_dict(), self.unit
        if not state:
            return state
        if self._sent is not None:  # what has not arrived yet is sent again after a resume, with the same bits
            state = {"versions": torch.tensor(self._sent.version), "is_current": torch.tensor(self._sent.was_current)}
        dtype = self._kept_as[0] if self._kept_as is not None else unit.gathered_dtype
        changed = unit.changed()
        if self.formats.sends_moves:
            # This rank's row of codes, with the scales that are kept; the other rows are gathered again.
            partition = self.secondary_partition if unit.keeps_copies(changed) else None
            row = partition[self.topology.node] if partition is not None else self._loaded_row
            nbytes = self.formats.weights(unit.whole, dtype).nbytes
            saved = torch.zeros(nbytes, dtype=torch.uint8, device=unit.device) if row is None else row.clone()
            state |= {"has_row": torch.tensor(row is not None), "row": saved, "dtype": torch.zeros(1, dtype=dtype)}
            return state
        unsent = set() if state["is_current"] else set(unit.changed_part(changed).indices)
        if self._sent is not None:
            unsent.update(self._sent.part.indices)
        return state | state_of_changes(unit, unit.checksums, unsent, dtype)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        if not self.formats.sends_moves:
            self.unit.checksums |= load_changes(self.unit, state)
            return
        self._kept_as = (state["dtype"].dtype, self.unit.device) if state else None
        self._loaded_row = None
        if state.get("has_row", False):
            # By a step, as far as the row is concerned: what has changed is gathered in full in any case.
            if self.unit.changed():
                self.unit.mark_gathered()
                self.unit.mark_updated(self.unit.trained.indices)
                self.unit.may_have_stepped = True
            with on_stream(self.stream, self.unit.device):
                self._loaded_row = state["row"].to(self.unit.device, copy=True)


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
