"""Which weights are sent: content decides.

A rank has what it sent of each unit: its own row among the copies that gathers keep. When a forward pass begins,

- what an optimizer step trained since then is sent, and nobody asks whether it moved;
- all else is encoded again and compared with that row: frozen parameters at every step, all parameters in passes that
  follow no step, as an evaluation's. (It sends what changed, so the step after it compares and sends none.) One small
  all-reduce lets a difference on one rank count on all, and the host waits for it.

Further micro-batches of a step begin nothing. ``unshard()`` by hand begins for its unit alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager, _CoalescingManager

from ..fsdp.collectives import all_gather, count_all_reduce, count_flat_ring
from ..fsdp.formats import UnitPart
from ..fsdp.fsdp_unit import FSDPUnit
from ..fsdp.shared import Shared
from ..fsdp.topology import Topology
from ..wire.format import WireFormat
from ..wire.moves import Moves

# Bytes that a rank sends in one gather of several units, as each costs a round trip: few in the first, for which the
# pass waits, and then twice as many each time, up to what a link takes much longer for than for a round trip.
FIRST_BATCH_BYTES, LARGEST_BATCH_BYTES = 2**18, 2**22


@torch.inference_mode(False)  # sent weights outlive an evaluation in inference mode
@torch.no_grad()
def send_changes(units: Sequence[FSDPUnit], shared: Shared) -> None:
    """Start to send what changed of these units, which are about to be gathered. Collective."""
    units = [unit for unit in units if unit.is_sharded]
    found = {unit: unit.all_gather.differs_from_sent() for unit in units}
    flags = {unit: flag for unit, flag in found.items() if flag is not None}
    different = set[FSDPUnit]() if shared.position.sends_nothing else agree(flags, shared)
    if shared.position.sends_nothing and flags and torch.stack([*flags.values()]).any():
        labels = ", ".join(unit.label for unit, flag in flags.items() if flag)
        raise RuntimeError(
            f"parameters of {labels} were written between two passes inside resident_weights(), where ranks need not "
            "run equally many and cannot agree to gather again: call zeropp.invalidate() on all ranks after writing "
            "them, or enter resident_weights() again"
        )
    encoded = [
        unit.all_gather.renew(is_different=unit in different) for unit in units if unit.has_trained or unit in different
    ]
    send([shard for shard in encoded if shard is not None], shared)


def agree(flags: Mapping[FSDPUnit, Tensor], shared: Shared) -> set[FSDPUnit]:
    """Return the units whose flag, a bool [], is true on any rank that shares them. Collective; the host waits."""
    by_topology: dict[Topology, list[FSDPUnit]] = {}
    for unit in flags:
        by_topology.setdefault(unit.topology, []).append(unit)
    agreed: list[Tensor] = []
    for topology, members in by_topology.items():
        agreed.append(torch.stack([flags[unit] for unit in members]).int())
        dist.all_reduce(agreed[-1], op=dist.ReduceOp.MAX, group=topology.group)
        for _ in members:
            count_all_reduce(shared.traffic, topology, agreed[-1].itemsize)
    if not agreed:
        return set()
    ordered = [unit for members in by_topology.values() for unit in members]
    return {unit for unit, flag in zip(ordered, torch.cat(agreed).tolist(), strict=True) if flag}


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return whether tensors [n] of one dtype have the same bits, a bool []; so a NaN equals itself."""
    in_words = all(part.nbytes % 8 == part.storage_offset() * part.itemsize % 8 == 0 for part in (a, b))  # fewer
    as_bits = torch.int64 if in_words else {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    return (a.view(as_bits) == b.view(as_bits)).all()


@dataclass(frozen=True, eq=False)
class EncodedShard:
    """A part of a rank's shard [L], as it will be sent to other nodes."""

    unit: FSDPUnit
    part: UnitPart
    format: WireFormat
    encoded: Tensor | Moves  # wire buffer uint8 [n], or moves of this rank's codes in the secondary partition


@dataclass(frozen=True)
class SentShard:
    """Shards of the N ranks with equal p on their way, while the program goes on: ``wires`` [N, n], after ``work``."""

    part: UnitPart
    format: WireFormat
    are_moves: bool
    wires: Tensor
    work: dist.Work | _CoalescingManager


@torch.inference_mode(False)
@torch.no_grad()
def send(shards: Sequence[EncodedShard], shared: Shared) -> None:
    """Start sending encoded shards between nodes, in the order of the pass that waits for them."""
    by_topology: dict[Topology, list[EncodedShard]] = {}
    for shard in shards:
        by_topology.setdefault(shard.unit.topology, []).append(shard)
    nbytes = _bytes_of(by_topology, shared)
    for topology, members in by_topology.items():
        for batch in _batches(members, nbytes):
            wires = [of.encoded.write(nbytes[of]) if isinstance(of.encoded, Moves) else of.encoded for of in batch]
            gathered, work = start_gathers(wires, topology.inter_group)
            for shard, arriving in zip(batch, gathered, strict=True):
                sent = SentShard(shard.part, shard.format, isinstance(shard.encoded, Moves), arriving, work)
                shard.unit.all_gather.in_flight = sent


def _bytes_of(by_topology: Mapping[Topology, Sequence[EncodedShard]], shared: Shared) -> dict[EncodedShard, int]:
    """Return the bytes of each shard: with moves the longest of the ranks they reach. The host waits once, for all."""
    nbytes, moves, most = dict[EncodedShard, int](), list[EncodedShard](), list[Tensor]()
    for topology, shards in by_topology.items():
        nbytes |= {shard: shard.encoded.nbytes for shard in shards if isinstance(shard.encoded, Tensor)}
        measured = {shard: shard.encoded.num_bytes for shard in shards if isinstance(shard.encoded, Moves)}
        if measured:
            sizes = torch.cat([*measured.values()]).int()
            is_ring = shared.config.weight_copies == "card"  # moves reach all ranks
            group = topology.group if is_ring else topology.inter_group
            with shared.waits.collective("sizes of moves", shards[0].unit.label, crosses_nodes=True):
                most.append(gather_wires(sizes.view(torch.uint8), group).view(torch.int32).amax(0))
            moves += measured
            if is_ring:
                count_flat_ring(shared.traffic, topology, sizes.nbytes, stays=True)
            else:
                shared.traffic.add(inter_node=(topology.num_nodes - 1) * sizes.nbytes, stays=True)
    if most:
        nbytes |= dict(zip(moves, torch.cat(most).tolist(), strict=True))
    return nbytes


def _batches(shards: Sequence[EncodedShard], nbytes: dict[EncodedShard, int]) -> Iterator[list[EncodedShard]]:
    """Group shards, in their order, into gathers: several up to the limit, or one longer shard."""
    batch: list[EncodedShard] = []
    limit = left = FIRST_BATCH_BYTES
    for shard in shards:
        if batch and nbytes[shard] > left:
            yield batch
            batch, limit = [], min(2 * limit, LARGEST_BATCH_BYTES)
            left = limit
        batch.append(shard)
        left -= nbytes[shard]
    if batch:
        yield batch


def gather_wires(wire: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather one buffer uint8 [...] from each of the group's G ranks, on the current stream: uint8 [G, ...]."""
    wires = wire.new_empty(group.size(), *wire.shape)
    all_gather(wires.flatten(), wire.flatten(), group=group)
    return wires


def start_gathers(
    wires: Sequence[Tensor], group: dist.ProcessGroup
) -> tuple[list[Tensor], dist.Work | _CoalescingManager]:
    """Start to all-gather buffers uint8 [...] in one collective: [G, ...] of each, valid after the returned work."""
    gathered = [torch.empty(group.size(), *wire.shape, dtype=torch.uint8, device=wire.device) for wire in wires]
    if len(wires) == 1:  # gloo would copy
        return gathered, all_gather(gathered[0].flatten(), wires[0].flatten(), group=group, async_op=True)
    with _coalescing_manager(group, async_ops=True) as work:
        for out, wire in zip(gathered, wires, strict=True):
            all_gather(out.flatten(), wire.flatten(), group=group)
    return gathered, work
