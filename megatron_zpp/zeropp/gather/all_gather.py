"""The parameter all-gather of ZeRO++: quantized (qwZ) and through a secondary partition in each node (hpZ).

FSDP2 hands over the flat shard [L] of one unit and wants [N, P, L]: all ranks' shards, in rank order.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from ..fsdp.collectives import all_gather, count_flat_ring
from ..fsdp.formats import Formats, Layouts, UnitPart
from ..fsdp.fsdp_unit import FSDPUnit, UnitCollective
from ..fsdp.monitor import record_codes, record_error
from ..fsdp.shared import Shared
from ..fsdp.waits import on_stream, refuse_capture, to_host
from ..wire.moves import apply_moves, measure_moves
from ..wire.quantization import mix_seed
from .changed_weights import EncodedShard, SentShard, gather_wires, same_bits, send, send_changes


class UnitAllGather(UnitCollective):
    """The all-gather of one unit's weights, and the copies that it keeps.

    With hpZ (ZeRO++ section 3.2) parameters cross nodes once per optimizer step. When they changed, the N ranks with
    this local rank p gather their shards into the secondary partition [N, L]; every gather is then among the P ranks of
    the node. All ranks see the same weights: each rank quantizes and decodes its local shard, too. Frozen parameters of
    a unit are sent only when they changed. With ``weight_copies="card"`` what arrives is passed on within the node, and
    gathers send nothing. With ``offload`` copies are in host memory. A stream of its own reads them for each gather,
    after the gather before and beside computation, so the device holds them for one unit at a time.

    What changed leaves when a forward pass begins (changed_weights.py), and must have arrived when FSDP2 asks for the
    unit, or the next pass begins. Without a secondary partition, as at the first step, it leaves only then, in full.

    Without copies, or on one node, a gather is flat, as if all W ranks were one node's: of quantized shards with qwZ
    (section 3.1), else FSDP2's own. Inside ``ZeroPP.resident_weights`` a rank keeps what arrived, and reads it again
    until the parameters change.

    What is kept between gathers, what is in flight and all that is made of them are allocated, written, read and freed
    on ``stream``, so the allocator reuses their memory for later work there. It and the caller wait for each other.
    """

    def __init__(self, unit: FSDPUnit, shared: Shared, stream: torch.Stream, reads: torch.Stream) -> None:
        config, topology, self.unit, self.shared = shared.config, unit.topology, unit, shared
        self.topology, self.stream, self.reads = topology, stream, reads
        self.formats = Formats(config, topology.num_nodes)
        self.is_flat = not self.formats.has_secondary_partition
        # Whether weights are sent in another way than FSDP2's.
        self.is_plain = topology.world_size == 1 or (self.is_flat and not config.quantized_weights)
        if config.frozen_dtype is not None and not self.is_flat:
            unit.nf4_skip = config.nf4_skip
            unit.specify(unit.shards)
        self.versions = 1  # versions of the weights; all gathers of one draw the same noise
        self._sampled_version: int | None = None  # the last version whose error was sampled
        self.in_flight: SentShard | None = None  # on its way from other nodes
        # [N, L] in the gather's dtype; where wires are kept, uint8 [N, nbytes], or with all shards' [P, N, nbytes].
        self.secondary_partition: Tensor | None = None
        # Resident weights, as W ranks sent them: uint8 [N, P, nbytes], or numbers [N, P, L]; if flat [1, W, nbytes].
        self.resident: Tensor | None = None
        self._loaded_row: Tensor | None = None  # with moves: this rank's, of a checkpoint, until it is sent in full
        self._kept_as: tuple[torch.dtype, torch.device] | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.is_plain and not (self.shared.position.is_resident and self.topology.world_size > 1):
            count_flat_ring(self.shared.traffic, self.topology, input_tensor.nbytes, self.unit.stays_gathered)
            with self._timer(crosses_nodes=self.topology.num_nodes > 1):
                return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        refuse_capture(self.unit.device, self.unit.label)
        check_gathered(self.unit, input_tensor)
        # Before the stream waits for FSDP2's, and so for the layers before this one.
        copies = self._read() if self.unit.is_in_pass and self.resident is None else None
        # FSDP2 gathers on its own stream, but ``unshard()`` by hand on the current one.
        with on_stream(self.stream, input_tensor.device):
            if not self.unit.is_in_pass:
                send_changes([self.unit], self.shared)  # as a forward pass does when it begins
            self._forget_other(input_tensor)
            self._gather(output_tensor, input_tensor, copies)
        return None

    def _timer(self, crosses_nodes: bool) -> AbstractContextManager[None]:
        return self.shared.waits.collective("gather", self.unit.label, crosses_nodes=crosses_nodes)

    def _gather(self, output: Tensor, shard: Tensor, sent: Tensor | None) -> None:
        """Gather the shards [L] of all W ranks into ``output``, from the copies ``sent`` and the node's ranks."""
        num_nodes, ranks, group = self.topology.num_nodes, self.topology.ranks_per_node, self.topology.intra_group
        if self.is_flat:
            num_nodes, ranks, group = 1, self.topology.world_size, self.topology.group
        output = output.view(num_nodes, ranks, shard.numel())
        format = self.formats.weights_within_node(self.unit.whole, shard.dtype)
        if not self.is_flat:
            sent = self._receive(sent)
            if self.secondary_partition is None:
                send([self._encode(self.unit.whole, shard)], self.shared)
                sent = self._receive()
            elif sent is None and self.resident is None:
                sent = self._read()
        kept = self.resident
        if sent is not None and self.has_all_copies:
            kept = sent.transpose(0, 1)
        if kept is not None:
            output.copy_(kept) if format is None else format.decode(kept, out=output)
            return
        if sent is None:
            sent = self._encode_part(self.unit.whole, shard).unsqueeze(0)  # [1, nbytes]
        elif format is not None and not self.formats.keeps_wires:
            # The same noise in every node, so that all ranks see the same weights.
            sent = format.encode(sent, self._noise_seed("intra", self.topology.local_rank))
        is_alone = ranks == 1  # as where experts are divided among a node's ranks
        with nullcontext() if is_alone else self._timer(crosses_nodes=self.is_flat and self.topology.num_nodes > 1):
            if format is not None:
                wires = sent.unsqueeze(1) if is_alone else gather_wires(sent, group).transpose(0, 1)  # [N, P, nbytes]
            elif is_alone:
                output.copy_(sent.view_as(output))
            else:
                # One launch, and with NCCL no copies: an all-gather of one buffer would need a permuting copy of all.
                with _coalescing_manager(group):
                    for out, row in zip(output.flatten(1), sent, strict=True):
                        all_gather(out, row, group=group)
        if format is not None:
            format.decode(wires, out=output)
        if self.shared.position.is_resident:
            self.resident = output.clone() if format is None else wires
        if self.is_flat:
            count_flat_ring(self.shared.traffic, self.topology, sent.nbytes, self.unit.stays_gathered)
        else:
            self.shared.traffic.add(intra_node=(ranks - 1) * sent.nbytes, stays=self.unit.stays_gathered)

    def differs_from_sent(self) -> Tensor | None:
        """Return whether parameters that no step trained differ from what was sent, a bool []; None: all are sent."""
        if self.has_all_copies and self.shared.position.sends_nothing and self.in_flight is not None:
            return None  # receiving it takes the node's other ranks, which may not run this pass
        self._receive()  # what the last pass did not ask for
        if self.unit.remove_trainable_from_nf4():
            self.forget_copies()
        part = self._untrained_part()
        row = self._own_row() if part.indices else None
        if row is None or self._forget_other(shard := self.unit.flat_shard()):
            return None
        format, now = self.formats.weights(part, shard.dtype), part.select(shard)
        if self.is_flat or self.formats.keeps_wires:
            now = self._encode_part(part, shard, is_sent=False)
        elif format.quantized:
            now = format.decode(self._encode_part(part, shard, is_sent=False), out=torch.empty_like(now))
        return ~same_bits(now, part.select(row, self._layouts(part, shard.dtype)))

    def renew(self, is_different: bool) -> EncodedShard | None:
        """Encode what a step trained, or with ``is_different`` all, for ``send``; None: a gather does it in full."""
        self.unit.has_trained, self.resident = False, None
        self.versions += 1
        part = self.unit.whole if is_different or self._rounds_again() else self.unit.trained
        shard = self.unit.flat_shard() if self.secondary_partition is not None and part.indices else None
        return None if shard is None or self._forget_other(shard) else self._encode(part, shard)

    def forget_copies(self) -> None:
        """Gather in full next time."""
        if self.in_flight is not None:
            with on_stream(self.stream, self.unit.device):
                self._receive()
        self.secondary_partition = self._loaded_row = self.resident = None

    @cached_property
    def has_all_copies(self) -> bool:
        """Whether this rank keeps the codes of all W shards, instead of N."""
        return self.shared.config.weight_copies == "card" and not self.is_flat

    @torch.inference_mode(False)
    def _read(self) -> Tensor | None:
        """Return the secondary partition on the device, unless all of it is about to be replaced."""
        kept, sent = self.secondary_partition, self.in_flight
        if kept is None or not self.shared.config.offloads("copies"):
            return kept
        if sent is not None and sent.part.is_whole and not sent.are_moves:
            return None
        device = self.unit.device
        with torch.get_device_module(device).stream(self.stream), on_stream(self.reads, device):
            return torch.empty_like(kept, device=device).copy_(kept, non_blocking=True)

    def _untrained_part(self) -> UnitPart:
        """Return the parameters that are compared with what was sent: after a step those that are not sent anyway."""
        if not self.unit.has_trained:
            return self.unit.whole
        return self.unit.part([]) if self.is_flat or self._rounds_again() else self.unit.frozen

    def _rounds_again(self) -> bool:
        # Stochastic rounding is right on average over many roundings, so frozen weights are rounded again, too.
        return self.shared.config.weight_rounding == "stochastic"

    def _own_row(self) -> Tensor | None:
        """Return what receivers have of this rank's shard, if this rank keeps it: a wire buffer, or numbers [L]."""
        if self.secondary_partition is not None:
            node, local_rank = self.topology.node, self.topology.local_rank
            row = self.secondary_partition[(local_rank, node) if self.has_all_copies else node]
            return row.to(self.unit.device, non_blocking=True)
        return self.resident[0, self.topology.rank] if self.resident is not None else None

    def _layouts(self, part: UnitPart, dtype: torch.dtype) -> Layouts:
        """Return how copies of all parameters, and of a part of them, are kept."""
        if part.is_whole or not self.formats.keeps_wires:
            return None
        return self.formats.weights(self.unit.whole, dtype), self.formats.weights(part, dtype)

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
        keeps_scales, kept = self.formats.sends_moves, None
        if keeps_scales:
            row = self._own_row()
            kept = self._loaded_row if row is None else part.select(row, self._layouts(part, shard.dtype))
        seed = self._noise_seed("inter", self.topology.rank)
        wire = format.encode(values, seed, keeps_scales=keeps_scales, kept=kept)
        # A flat gather sends a version several times.
        if is_sent and self.shared.position.is_sampled(self.versions) and self._sampled_version != self.versions:
            self._sampled_version = self.versions
            arrived = format.decode(wire, out=torch.empty_like(values, dtype=torch.float32))
            record_error(self.unit, "weights", values, arrived)
            record_codes(self.unit, "weights", format, wire)
        return wire

    def _noise_seed(self, hop: str, source: int) -> int | None:
        """Return the seed of the noise with which local or data-parallel rank ``source`` rounds; None = to nearest."""
        config = self.shared.config
        if config.weight_rounding == "nearest":
            return None
        # The noise depends on the version, so that every gather of one version gives the same weights.
        return mix_seed(config.seed, "weights", hop, self.unit.name, source, self.versions)

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
        old = part.select(row, self._layouts(part, shard.dtype))
        return EncodedShard(self.unit, part, format, measure_moves(format, old, wire))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _receive(self, copies: Tensor | None = None) -> Tensor | None:
        """Finish the inter-node stage, if one began: the shards of the N ranks with equal p are the new copies.

        Return them, on the device; before that they are ``copies``, if these were read already.
        """
        sent, kept = self.in_flight, self.secondary_partition
        if sent is None:
            return copies
        old = self._read() if copies is None else copies
        self.in_flight = self.secondary_partition = self._loaded_row = self.resident = None  # nothing half-done
        with self._timer(crosses_nodes=True):
            sent.work.wait()
        # Counted when it is used: a step's count has the bytes of the weights that its passes see.
        self.shared.traffic.add(inter_node=(self.topology.num_nodes - 1) * sent.wires[0].nbytes, stays=True)
        part, format, arrived = sent.part, sent.format, sent.wires
        layouts = self._layouts(part, format.dtype)
        if self.has_all_copies:
            if self.topology.ranks_per_node > 1:
                with self._timer(crosses_nodes=False):
                    arrived = gather_wires(arrived, self.topology.intra_group)  # [P, N, n]
            self.shared.traffic.add(intra_node=(self.topology.ranks_per_node - 1) * sent.wires.nbytes, stays=True)
        if sent.are_moves:
            assert old is not None
            copies = part.select(old, layouts)
            apply_moves(format, copies.flatten(0, -2), arrived.flatten(0, -2))  # [N, ...] or [P * N, ...]
            arrived = copies
        elif self.has_all_copies:
            arrived = arrived.view(self.topology.ranks_per_node, *sent.wires.shape)
        elif not self.formats.keeps_wires:
            # In place, where it can be: fresh memory is slow on a CPU.
            out = old if part.is_whole else None
            if out is None:
                out = torch.empty(len(arrived), part.numel, dtype=format.dtype, device=arrived.device)
            arrived = format.decode(arrived, out)
        arrived = arrived if old is None else part.insert(arrived, old, layouts)
        self.secondary_partition = to_host(arrived, kept) if self.shared.config.offloads("copies") else arrived
        return arrived

    @torch.no_grad()
    def copies_to_save(self) -> dict[str, Tensor]:
        """Return what the next gather depends on besides the parameters; nothing with the default settings."""
        config = self.shared.config
        if self.is_plain or (config.weight_rounding == "nearest" and not config.weight_moves):
            return {}
        with on_stream(self.stream, self.unit.device):
            self._receive()
            flag = None if self.unit.has_trained else self.differs_from_sent()
            is_current = not self.unit.has_trained and (flag is None or not flag)
            row = self._own_row() if self.formats.sends_moves else None
        state = {"versions": torch.tensor(self.versions), "is_current": torch.tensor(is_current)}
        if self.formats.sends_moves:
            # This rank's row of codes, with the scales that are kept; the other rows are gathered again.
            dtype = self._kept_as[0] if self._kept_as else self.unit.gathered_dtype
            row = self._loaded_row if row is None else row
            nbytes = self.formats.weights(self.unit.whole, dtype).nbytes
            saved = row.clone() if row is not None else torch.zeros(nbytes, dtype=torch.uint8, device=self.unit.device)
            state |= {"has_row": torch.tensor(row is not None), "row": saved, "dtype": torch.zeros(1, dtype=dtype)}
        return state

    def load_copies(self, state: dict[str, Tensor]) -> None:
        if state:
            self.versions = int(state["versions"])
            self.unit.has_trained = not state["is_current"]
        if self.formats.sends_moves:
            self._kept_as = (state["dtype"].dtype, self.unit.device) if state else None
            with on_stream(self.stream, self.unit.device):
                has_row = bool(state.get("has_row", False))
                self._loaded_row = state["row"].to(self.unit.device, copy=True) if has_row else None


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
