"""Shards on their way to other nodes, of several units at once: on slow links each collective costs a round trip."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager, _CoalescingManager

from ..fsdp.collectives import all_gather
from ..fsdp.formats import UnitPart
from ..fsdp.fsdp_unit import FSDPUnit
from ..fsdp.shared import Shared
from ..fsdp.topology import Topology
from ..wire.format import WireFormat
from ..wire.moves import Moves

# Bytes that a rank sends in one gather of several units: little in the first, for which the pass waits, and then twice
# as much each time, up to what a link takes much longer for than for a round trip.
FIRST_BATCH_BYTES, LARGEST_BATCH_BYTES = 2**18, 2**22


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
                are_moves = isinstance(shard.encoded, Moves)
                shard.unit.all_gather.in_flight = SentShard(shard.part, shard.format, are_moves, arriving, work)


def _bytes_of(by_topology: Mapping[Topology, Sequence[EncodedShard]], shared: Shared) -> dict[EncodedShard, int]:
    """Return the bytes of each shard. Moves have as many as they need: the longest of the N ranks' rules.

    The sizes of all are exchanged at once, and read at once by the host, which waits for them.
    """
    nbytes, moves, most = dict[EncodedShard, int](), list[EncodedShard](), list[Tensor]()
    for topology, shards in by_topology.items():
        nbytes |= {shard: shard.encoded.nbytes for shard in shards if isinstance(shard.encoded, Tensor)}
        measured = {shard: shard.encoded.num_bytes for shard in shards if isinstance(shard.encoded, Moves)}
        if measured:
            sizes = torch.cat([*measured.values()]).int()
            with shared.waits.collective("sizes of moves", shards[0].unit.label, crosses_nodes=True):
                most.append(gather_wires(sizes.view(torch.uint8), topology.inter_group).view(torch.int32).amax(0))
            moves += measured
            shared.traffic.add(inter_node=(topology.num_nodes - 1) * sizes.nbytes, stays=True)
    if most:
        nbytes |= dict(zip(moves, torch.cat(most).tolist(), strict=True))
    return nbytes


def _batches(shards: Sequence[EncodedShard], nbytes: dict[EncodedShard, int]) -> Iterator[list[EncodedShard]]:
    """Split shards, in their order, into those of one gather: several up to its limit, or a longer one."""
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
