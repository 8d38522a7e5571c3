"""What all emulated ranks' collectives make of one unit's weights and gradients, in one process."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..fsdp.collectives import count_all_reduce, count_flat_ring, count_reduce_scatter
from ..fsdp.shared import Shared
from ..fsdp.topology import RankLayout
from ..fsdp.unit import UnitPart
from ..gather.unseen_changes import Passes, checksums, keep_checksums, load_changes, refuse_changes, state_of_changes
from ..gather.weight_encoder import WeightEncoder, load_row
from ..reduce.gradient_hops import GradientHops
from ..wire.layout import KeptScales
from ..wire.moves import encode_moves
from .unit import EmulatedUnit


class EmulatedAllGather:
    """What all ranks' all-gathers make of one unit's weights, as QuantizedAllGather and HierarchicalAllGather do."""

    def __init__(
        self, unit: EmulatedUnit, layouts: list[RankLayout], shared: Shared, passes: Passes, zero_stage: int
    ) -> None:
        self.unit, self.layouts, self.traffic, self.passes = unit, layouts, shared.traffic, passes
        self.encoder = WeightEncoder(unit, layouts[0].num_nodes, shared)
        self.formats = self.encoder.formats
        self.rows: Tensor | None = None  # [W, nbytes], the ranks' shards as codes, where moves of them are sent
        self._has_secondary = self.formats.has_secondary_partition
        self._is_encoded = self._has_secondary or (shared.config.quantized_weights and len(layouts) > 1)
        self._arrived = False  # the weights of the last refresh are in unit.arrived
        # Of each part of each rank's shard, as it last went between nodes.
        self._checksums: list[dict[tuple[int, ...], Tensor]] = [{} for _ in layouts]
        self._reshards_after_forward = zero_stage == 3 and not unit.is_gathered_once
        self._reshards_after_backward = zero_stage == 3
        self._unsharded = [False] * len(layouts)
        self._has_resident = [False] * len(layouts)  # ranks whose next gathers send nothing

    @property
    def _keeps_weights(self) -> bool:
        """Whether gathers depend on what earlier ones left on the ranks."""
        return self._has_secondary or self.passes.is_resident

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, look: bool) -> None:
        """Gather the weights again, if they changed; ``look``: also where nothing says so, as UnseenChanges does."""
        if look and self._keeps_weights and self.unit.unchanged_parts() and self._look():
            if self.passes.sends_nothing:
                refuse_changes([self.unit])
            self.unit.mark_changed()
        is_thawed = self.unit.remove_trainable_from_nf4()
        changed = self.unit.changed()
        if is_thawed or not self.unit.keeps_copies(changed):
            self.forget_secondary_partition()
        # Without a secondary partition, ranks gather their parameters at every pass.
        if self._arrived and not changed and (self._keeps_weights or not look):
            return
        self._has_resident = [False] * len(self.layouts)
        self.encoder.versions += bool(changed)
        if self._keeps_weights and not self._has_secondary:
            self._keep_checksums(self.unit.shards_of(self.unit.masters, self.unit.dtype), self.unit.whole)
        if self._is_encoded:
            self._gather(changed)
        else:
            for arrived, master in zip(self.unit.arrived, self.unit.masters, strict=True):
                arrived.copy_(master)
        self.unit.mark_gathered()
        self._arrived = True

    def _look(self) -> bool:
        """Return whether some rank's shard has changed since it was sent, although nothing says so."""
        if not self._checksums[0]:
            return False
        for layout in self.layouts:
            if self.is_gathered(layout.rank) and not self.passes.sends_nothing:
                count_all_reduce(self.traffic, layout, torch.int32.itemsize)
        shards = self.unit.shards_of(self.unit.masters, self.unit.dtype)
        return any(
            then is None or not then.equal(now)
            for shard, of_parts in zip(shards, self._checksums, strict=True)
            for indices, now in checksums(shard, self.unit.unchanged_parts()).items()
            for then in [of_parts.get(indices)]
        )

    def _gather(self, changed: set[int]) -> None:
        """Fill the arrived weights with what every rank holds after the gather."""
        layout, dtype = self.layouts[0], self.unit.dtype
        part = self.unit.changed_part(changed) if self._has_secondary and self._arrived else self.unit.whole
        arrived = self._gather_between_nodes(self.unit.shards_of(self.unit.masters, dtype), part)
        within_node = self.formats.weights_within_node(part, dtype)
        if within_node is not None and self._has_secondary and not self.formats.keeps_wires:
            partitions = arrived.view(layout.num_nodes, layout.ranks_per_node, -1)  # [N, P, l]
            ranks = range(layout.ranks_per_node)
            sent = [self.encoder.encode_within_node(partitions[:, p], within_node, p) for p in ranks]
            wires = torch.stack(sent, dim=1)  # [N, P, nbytes]
            arrived = within_node.decode(wires, out=torch.empty_like(partitions)).flatten(0, 1)
        self.unit.receive(arrived, part)

    def _gather_between_nodes(self, shards: Tensor, part: UnitPart) -> Tensor:
        """Return a part of all ranks' shards [W, L] as it arrives on other nodes, [W, l]."""
        if self._has_secondary:
            self._keep_checksums(shards, part)
        shards = part.take(shards)
        if self._has_secondary and self.formats.sends_moves:
            return self._move(shards, part)
        format = self.formats.weights(part, shards.dtype)
        wires = torch.stack([self.encoder.encode(shard, format, rank) for rank, shard in enumerate(shards)])
        for rank, shard in enumerate(shards):
            self.encoder.sample(shard, format, wires[rank], rank)
        if self._has_secondary:
            self.traffic.add(inter_node=(self.layouts[0].num_nodes - 1) * wires.nbytes, stays=True)
        return format.decode(wires, out=shards)

    def _move(self, shards: Tensor, part: UnitPart) -> Tensor:
        """Return a part of all ranks' shards [W, l] as its codes say it, which ``rows`` keeps."""
        format, num_nodes = self.formats.weights(part, shards.dtype), self.layouts[0].num_nodes
        old = self.encoder.copies_of(part, self.rows, shards.dtype) if self.rows is not None else None
        wires = format.encode(shards, kept=KeptScales(old))  # [W, nbytes]
        for rank, shard in enumerate(shards):
            self.encoder.sample(shard, format, wires[rank], rank)
        nbytes = wires.nbytes
        if self._arrived:
            assert old is not None
            sizes = [encode_moves(format, *pair).nbytes for pair in zip(old, wires, strict=True)]
            longest = torch.tensor(sizes).view(num_nodes, -1).amax(0)  # of the ranks with each p
            nbytes = num_nodes * int(longest.sum()) + 4 * len(wires)  # and the sizes, int32
        self.traffic.add(inter_node=(num_nodes - 1) * nbytes, stays=True)
        self.rows = wires if self.rows is None else self.encoder.put_copies(part, wires, self.rows, shards.dtype)
        return format.decode(wires, out=torch.empty_like(shards))

    def _keep_checksums(self, shards: Tensor, part: UnitPart) -> None:
        for shard, of_parts in zip(shards, self._checksums, strict=True):
            keep_checksums(of_parts, self.unit, shard, part)

    def is_gathered(self, rank: int) -> bool:
        """Return whether the rank's next forward pass gathers: not if the last one left the weights gathered."""
        return not self._unsharded[rank]

    def count(self, rank: int, trained: bool, is_last_micro_batch: bool) -> None:
        """Count the gathers of one rank's forward pass and, if it ``trained``, its backward pass."""
        gathers = int(self.is_gathered(rank)) + int(trained and self._reshards_after_forward)
        for _ in range(gathers):
            if not self._has_resident[rank]:
                self._count_gather(self.layouts[rank])
                self._has_resident[rank] = self.passes.is_resident
        if trained:
            self._unsharded[rank] = not (self._reshards_after_backward or is_last_micro_batch)
        else:
            self._unsharded[rank] = not self._reshards_after_forward

    def _count_gather(self, layout: RankLayout) -> None:
        nbytes = self.unit.whole.numel * self.unit.dtype.itemsize
        stays = not self._reshards_after_forward
        if self._has_secondary:
            within_node = self.formats.weights_within_node(self.unit.whole, self.unit.dtype)
            sent = layout.num_nodes * (within_node.nbytes if within_node is not None else nbytes)
            self.traffic.add(intra_node=(layout.ranks_per_node - 1) * sent, stays=stays)
        else:
            if self._is_encoded or self.passes.is_resident:  # in a wire buffer, which is padded
                nbytes = self.formats.weights(self.unit.whole, self.unit.dtype).nbytes
            count_flat_ring(self.traffic, layout, nbytes, stays)

    def reshard(self) -> None:
        """Have every rank's next forward pass gather the weights."""
        self._unsharded = [False] * len(self.layouts)

    def forget_secondary_partition(self) -> None:
        """Gather the weights again, and in full."""
        self.rows, self._arrived = None, False

    def forget_resident(self) -> None:
        """Gather the weights again within nodes; without a secondary partition, between them."""
        self._has_resident = [False] * len(self.layouts)
        if not self._has_secondary:
            self._arrived, self._checksums = False, [{} for _ in self.layouts]

    def after_loading(self, *_: object) -> None:
        self.forget_secondary_partition()

    def state_dict(self, layout: RankLayout) -> dict[str, Tensor]:
        state = self.encoder.state_dict() if self._is_encoded else {}
        if not state or not self._has_secondary:
            return state
        changed = self.unit.changed()
        if self.formats.sends_moves:
            row = self.rows[layout.rank] if self.rows is not None and self.unit.keeps_copies(changed) else None
            return state | self.encoder.row_state(row, self.unit.dtype)
        known, unsent = self._checksums[layout.rank], self.unit.changed_part(changed).indices if changed else ()
        return state | state_of_changes(self.unit, known, unsent, self.unit.dtype)

    def load_state_dict(self, layout: RankLayout, state: dict[str, Tensor]) -> None:
        self.encoder.load_state_dict(state)
        if self._has_secondary and self.formats.sends_moves:
            row = load_row(self.unit, state)
            if row is not None:
                self._arrived = False  # all rows are gathered again
                self.rows = row.new_zeros(len(self.layouts), len(row)) if self.rows is None else self.rows
                self.rows[layout.rank] = row
            return
        self._checksums[layout.rank] |= load_changes(self.unit, state)


class WeightsOfRank(NamedTuple):
    """One rank's state of a unit's weights."""

    weights: EmulatedAllGather
    layout: RankLayout

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights.state_dict(self.layout)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights.load_state_dict(self.layout, state)


class EmulatedReduceScatter:
    """All ranks' reduce-scatters of one unit's gradients, as HierarchicalReduceScatter and FSDP2's own do."""

    def __init__(
        self,
        unit: EmulatedUnit,
        layouts: list[RankLayout],
        shared: Shared,
        reduce_dtype: torch.dtype | None,
        find_unused_parameters: bool,
    ) -> None:
        self.unit, self.layouts, self.traffic = unit, layouts, shared.traffic
        self.position, self.find_unused_parameters = shared.position, find_unused_parameters
        self._used: set[int] = set()  # parameters that some rank has used in this step
        self.dtype = reduce_dtype or unit.dtype
        self.hops: list[GradientHops] = []  # of each rank
        if shared.config.quantized_gradients:
            self.hops = [GradientHops(unit, layout, shared) for layout in layouts]
        self._within_node: list[Tensor] = []  # what the ranks of one node have sent so far
        self._between_nodes: list[Tensor] = []  # what all ranks have sent so far
        self._sum: Tensor | None = None  # fp32 [W, L], of unquantized gradients so far

    @torch.no_grad()
    def add(self, rank: int) -> None:
        """Reduce the gradients that ``rank`` left in the unit's arrived weights; those of the last rank complete it."""
        self._used |= self.unit.used_parameters()
        gradients = self.unit.take_gradients(self.dtype)  # [W, L]
        if gradients.shape[1] == 0:
            return
        if rank == len(self.layouts) - 1:
            self.position.reduced()
        before, after = divisors(self.dtype, len(self.layouts))
        if before is not None:
            gradients.div_(before)
        totals = self._add_quantized(rank, gradients) if self.hops else self._add_unquantized(rank, gradients)
        if totals is not None:
            if after is None:
                totals = totals / totals.new_full((), len(self.layouts))
                after = 1.0
            if not self.hops:
                totals = totals.to(self.dtype)  # FSDP2's own; ours goes to ``.grad`` as it is
            without = [i for i, master in enumerate(self.unit.masters) if master.grad is None and i not in self._used]
            self.unit.accumulate_gradients(totals.div_(after))
            if self.find_unused_parameters:
                for index in without:
                    self.unit.masters[index].grad = None
            self._used = set()

    def _add_quantized(self, rank: int, gradients: Tensor) -> Tensor | None:
        """Return the sums over all ranks fp32 [W, L], when all have sent their last gradients [W, L]."""
        layout = self.layouts[rank]
        num_nodes, ranks_per_node = layout.num_nodes, layout.ranks_per_node
        own = self.hops[rank].begin(self.unit.trainable, gradients.view(num_nodes, ranks_per_node, -1))  # [P, N, L]
        if (hop := self.hops[rank].within_node) is not None:
            self._within_node.append(hop.encode(own))
        if layout.local_rank < ranks_per_node - 1:
            return None
        from_node, self._within_node = self._within_node, []
        totals = []
        for p, hops in enumerate(self.hops[rank + 1 - ranks_per_node : rank + 1]):
            if hops.within_node is None:
                node_sum = own.only_piece()  # [N, L]
            else:
                node_sum = hops.within_node.sum_of(torch.stack([wires[p] for wires in from_node]))
            if not self.position.is_last:
                hops.keep(node_sum)
            elif hops.between_nodes is None:
                total = hops.with_kept(node_sum).only_piece()
                hops.sent()
                totals.append(hops.finish(total, sent=None))
            else:
                self._between_nodes.append(hops.between_nodes.encode(hops.with_kept(node_sum)))
                hops.sent()
        if len(self._between_nodes) == len(self.layouts):
            from_all, self._between_nodes = self._between_nodes, []
            for hops in self.hops:
                assert hops.between_nodes is not None
                of_local_rank = from_all[hops.layout.local_rank :: ranks_per_node]
                received = torch.stack([wires[hops.layout.node] for wires in of_local_rank])
                sent = from_all[hops.layout.rank]
                totals.append(hops.finish(hops.between_nodes.sum_of(received), sent))
        if not totals:
            return None
        self.unit.mark_reduced(self.unit.trainable.indices)
        return torch.stack(totals)

    def _add_unquantized(self, rank: int, gradients: Tensor) -> Tensor | None:
        count_reduce_scatter(self.traffic, self.layouts[rank], gradients[0])
        if self._sum is None:
            self._sum = torch.zeros(gradients.shape, device=gradients.device)
        self._sum += gradients
        if rank < len(self.layouts) - 1:
            return None
        self.unit.mark_reduced()
        total, self._sum = self._sum, None
        return total

    def drop_sent(self) -> None:
        """Drop what ranks have sent of a step that is undone."""
        self._within_node, self._between_nodes, self._sum, self._used = [], [], None, set()


def divisors(reduce_dtype: torch.dtype, world_size: int) -> tuple[float | None, float | None]:
    """Return what FSDP2 divides gradients by before and after it adds them up; None, None: it averages at once."""
    if reduce_dtype in (torch.float32, torch.bfloat16):
        return None, None
    before = 1.0  # about the root of the number of ranks, so that fp16 neither overflows nor underflows
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return before, world_size / before
