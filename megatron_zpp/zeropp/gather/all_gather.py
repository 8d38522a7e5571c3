"""The parameter all-gather of ZeRO++: quantized (qwZ) and through a secondary partition in each node (hpZ).

FSDP2 hands over the flat shard [L] of one unit and wants [N, P, L]: all ranks' shards, in rank order.
"""

from collections.abc import Sequence

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
from ..wire.moves import apply_moves, measure_moves
from ..wire.quantization import mix_seed
from .changed_weights import EncodedShard, SentShard, gather_wires, same_bits, send, send_changes


class QuantizedAllGather(WeightGather):
    """qwZ alone (ZeRO++ section 3.1): a flat all-gather of quantized shards.

    Inside ``ZeroPP.resident_weights`` a rank keeps what arrived, and decodes it again until the parameters change.

    Memory and streams: what is kept between gathers, what is in flight and all that is made of them are allocated,
    written, read and freed on ``stream``, so the allocator reuses their memory only for work that comes after them
    there. The stream waits for the caller, and the caller for the stream.
    """

    def __init__(self, unit: FSDPUnit, shared: Shared, stream: torch.Stream) -> None:
        self.unit, self.topology, self.shared, self.stream = unit, unit.topology, shared, stream
        self.formats, self.keeps_wires = Formats(shared.config, unit.topology.num_nodes), True
        if shared.config.frozen_dtype is not None and self.formats.has_secondary_partition:
            unit.nf4_skip = shared.config.nf4_skip
            unit.specify(unit.shards)
        self.versions = 1  # versions of the weights; all gathers of one draw the same noise
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
            if not (self.unit.is_in_forward or self.unit.is_in_backward):
                send_changes([self.unit], self.shared)  # as a forward pass does when it begins
            self._forget_other(input_tensor)
            self._gather(output_tensor, input_tensor)
        return None

    def _gather(self, output: Tensor, shard: Tensor) -> None:
        format, wires = self.formats.weights(self.unit.whole, shard.dtype), self.resident
        if wires is None:
            wire = self._encode_part(self.unit.whole, shard)
            with self.shared.waits.collective("gather", self.unit.label, crosses_nodes=self.topology.num_nodes > 1):
                wires = gather_wires(wire, self.topology.group)
            self.resident = wires if self.shared.position.is_resident else None
            count_flat_ring(self.shared.traffic, self.topology, format.nbytes, self.unit.stays_gathered)
        format.decode(wires, out=output.view(-1, format.numel))

    def differs_from_sent(self) -> Tensor | None:
        """Return whether parameters that no step trained differ from what was sent: a bool [] on the device.

        None: nothing that was sent is kept, or all was trained.
        """
        part = self._untrained_part()
        row = self._own_row() if part.indices else None
        if row is None or self._forget_other(shard := self.unit.flat_shard()):
            return None
        format, now = self.formats.weights(part, shard.dtype), part.select(shard)
        if self.keeps_wires:
            now = self._encode_part(part, shard, is_sent=False)
        elif format.quantized:
            now = format.decode(self._encode_part(part, shard, is_sent=False), out=torch.empty_like(now))
        return ~same_bits(now, self._copies_of(part, row, shard.dtype))

    def renew(self, is_different: bool) -> EncodedShard | None:
        """Encode what changed, for ``send``; None: it is gathered in full when FSDP2 asks for it.

        is_different: also of parameters that no step trained.
        """
        self.unit.has_trained, self.resident = False, None
        self.versions += 1
        return None

    def forget_copies(self) -> None:
        """Gather in full next time."""
        self.resident = None

    def forget_resident(self) -> None:
        """Free the resident weights."""
        self.resident = None

    def _untrained_part(self) -> UnitPart:
        """Return the parameters that are compared with what was sent: after a step none, as all are gathered again."""
        return self.unit.part([]) if self.unit.has_trained else self.unit.whole

    def _own_row(self) -> Tensor | None:
        """Return what receivers have of this rank's shard, if this rank keeps it: a wire buffer, or numbers [L]."""
        return self.resident[self.topology.rank] if self.resident is not None else None

    def _copies_of(self, part: UnitPart, copies: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a part's copies out of a whole unit's, kept in the same way."""
        if not self.keeps_wires:
            return part.select(copies)
        return part.select_wires(
            copies, self.formats.weights(self.unit.whole, dtype), self.formats.weights(part, dtype)
        )

    def _forget_other(self, shard: Tensor) -> bool:
        """Forget the copies, and return True, if the model was cast or moved since they were made."""
        kept_as, self._kept_as = self._kept_as, (shard.dtype, shard.device)
        if kept_as == self._kept_as:
            return False
        self.forget_copies()
        return True

    def _encode_part(self, part: UnitPart, shard: Tensor, is_sent: bool = True) -> Tensor:
        """Encode a part of the shard [L]: uint8 [n], always the same bits for one version of the weights."""
        values, format = part.select(shard), self.formats.weights(part, shard.dtype)
        kept = self._kept_scales(part, shard.dtype)
        wire = format.encode(values, self._noise_seed("inter", self.topology.rank), kept=kept)
        if is_sent:
            self._sample(values, format, wire)
        return wire

    def _kept_scales(self, part: UnitPart, dtype: torch.dtype) -> KeptScales | None:
        return None

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

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next gather depends on besides the parameters; nothing with the default settings."""
        config = self.shared.config
        if config.weight_rounding == "nearest" and not config.weight_moves:
            return {}
        with on_stream(self.stream, self.unit.device):
            flag = None if self.unit.has_trained else self.differs_from_sent()
            is_current = not self.unit.has_trained and (flag is None or not flag)
        return {"versions": torch.tensor(self.versions), "is_current": torch.tensor(is_current)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            self.versions = int(state["versions"])
            self.unit.has_trained = not state["is_current"]


class FullPrecisionAllGather(QuantizedAllGather):
    """FSDP2's own all-gather, but inside ``ZeroPP.resident_weights``, where a rank keeps the numbers that arrive."""

    def __init__(self, unit: FSDPUnit, shared: Shared, stream: torch.Stream) -> None:
        super().__init__(unit, shared, stream)
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

    What changed leaves when a forward pass begins (changed_weights.py), and must have arrived when FSDP2 asks for the
    unit, or when the next pass begins. Without a secondary partition (at the first step, after ``invalidate`` or a
    resume) a unit is sent in full when FSDP2 asks for it.
    """

    def __init__(self, unit: FSDPUnit, shared: Shared, stream: torch.Stream) -> None:
        super().__init__(unit, shared, stream)
        self.keeps_wires = self.formats.keeps_wires
        # [N, L] in the gather's dtype; where wires are kept, uint8 [N, nbytes].
        self.secondary_partition: Tensor | None = None
        self._loaded_row: Tensor | None = None  # with moves: this rank's, of a checkpoint, until it is sent in full

    def _gather(self, output: Tensor, shard: Tensor) -> None:
        self._receive()
        if self.secondary_partition is None:
            send([self._encode(self.unit.whole, shard)], self.shared)
            self._receive()
        assert self.secondary_partition is not None
        num_nodes, ranks_per_node = self.topology.num_nodes, self.topology.ranks_per_node
        self._gather_within_node(self.secondary_partition, output.view(num_nodes, ranks_per_node, shard.numel()))

    def differs_from_sent(self) -> Tensor | None:
        self._receive()  # what the last pass did not ask for
        if self.unit.remove_trainable_from_nf4():
            self.forget_copies()
        return super().differs_from_sent()

    def renew(self, is_different: bool) -> EncodedShard | None:
        super().renew(is_different)
        part = self.unit.whole if is_different or self._rounds_again() else self.unit.trained
        shard = self.unit.flat_shard() if self.secondary_partition is not None and part.indices else None
        return None if shard is None or self._forget_other(shard) else self._encode(part, shard)

    def forget_copies(self) -> None:
        self._receive_by_hand()
        self.secondary_partition = self._loaded_row = self.resident = None

    def _untrained_part(self) -> UnitPart:
        return self.unit.frozen if self.unit.has_trained and not self._rounds_again() else super()._untrained_part()

    def _rounds_again(self) -> bool:
        # Stochastic rounding is right on average over many roundings, so frozen weights are rounded again, too.
        return self.shared.config.weight_rounding == "stochastic"

    def _own_row(self) -> Tensor | None:
        return self.secondary_partition[self.topology.node] if self.secondary_partition is not None else None

    def _kept_scales(self, part: UnitPart, dtype: torch.dtype) -> KeptScales | None:
        """Return the codes whose scales blocks keep while they fit, with moves."""
        if not self.formats.sends_moves:
            return None
        row = self._own_row()
        return KeptScales(self._loaded_row if row is None else self._copies_of(part, row, dtype))

    # The partition outlives an evaluation in inference mode, so it must not be an inference tensor.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _encode(self, part: UnitPart, shard: Tensor) -> EncodedShard:
        """Begin the inter-node stage: encode a part of the shard [L] for ``send``."""
        format, wire = self.formats.weights(part, shard.dtype), self._encode_part(part, shard)
        self.unit.has_trained = False
        row = self._own_row() if self.formats.sends_moves else None
        if row is None:
            return EncodedShard(self.unit, part, format, wire)
        return EncodedShard(
            self.unit, part, format, measure_moves(format, self._copies_of(part, row, shard.dtype), wire)
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _receive(self) -> None:
        """Finish the inter-node stage, if one began: the shards of the N ranks with equal p are the new copies."""
        sent, old = self.in_flight, self.secondary_partition
        if sent is None:
            return
        # Nothing half-done if this fails.
        self.in_flight = self.secondary_partition = self._loaded_row = self.resident = None
        with self.shared.waits.collective("gather", self.unit.label, crosses_nodes=True):
            sent.work.wait()
        # Counted when it is used: a step's count has the bytes of the weights that its passes see.
        self.shared.traffic.add(inter_node=(self.topology.num_nodes - 1) * sent.wires[0].nbytes, stays=True)
        part, dtype = sent.part, sent.format.dtype
        if sent.are_moves:
            assert old is not None
            arrived = apply_moves(sent.format, self._copies_of(part, old, dtype), sent.wires)
        else:
            arrived = self._in_full(sent, old)
        self.secondary_partition = arrived if old is None else self._put_copies(part, arrived, old, dtype)

    def _receive_by_hand(self) -> None:
        """Finish the inter-node stage outside of a gather."""
        if self.in_flight is not None:
            with on_stream(self.stream, self.unit.device):
                self._receive()

    def _in_full(self, sent: SentShard, old: Tensor | None) -> Tensor:
        """Return the shards, quantized with qwZ. They replace the old ones in place: fresh memory is slow on a CPU."""
        if self.keeps_wires:
            return sent.wires
        out, wires = old if sent.part.is_whole else None, sent.wires
        if out is None:
            out = torch.empty(len(wires), sent.part.numel, dtype=sent.format.dtype, device=wires.device)
        return sent.format.decode(wires, out)

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
            if not self.keeps_wires:
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

    def _put_copies(self, part: UnitPart, values: Tensor, copies: Tensor, dtype: torch.dtype) -> Tensor:
        """Write a part's copies into a whole unit's, and return these: ``values`` itself if the part is whole."""
        if not self.keeps_wires:
            return part.insert(values, copies)
        formats = self.formats.weights(self.unit.whole, dtype), self.formats.weights(part, dtype)
        return part.insert_wires(values, copies, *formats)

    def state_dict(self) -> dict[str, Tensor]:
        self._receive_by_hand()
        state, dtype = super().state_dict(), self._kept_as[0] if self._kept_as else self.unit.gathered_dtype
        if self.formats.sends_moves:
            # This rank's row of codes, with the scales that are kept; the other rows are gathered again.
            row = self._own_row()
            row = self._loaded_row if row is None else row
            nbytes = self.formats.weights(self.unit.whole, dtype).nbytes
            saved = row.clone() if row is not None else torch.zeros(nbytes, dtype=torch.uint8, device=self.unit.device)
            state |= {"has_row": torch.tensor(row is not None), "row": saved, "dtype": torch.zeros(1, dtype=dtype)}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        if self.formats.sends_moves:
            self._kept_as = (state["dtype"].dtype, self.unit.device) if state else None
            with on_stream(self.stream, self.unit.device):
                has_row = bool(state.get("has_row", False))
                self._loaded_row = state["row"].to(self.unit.device, copy=True) if has_row else None


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
