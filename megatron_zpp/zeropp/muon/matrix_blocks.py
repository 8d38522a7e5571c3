"""Matrices that ranks hold in rows, orthogonalized whole or in each node's block of rows.

FSDP2 gives each of the W ranks c = ceil(rows / W) consecutive rows of a matrix, the last ranks fewer. So a node's ranks
hold consecutive rows, too: its block. Each matrix is orthogonalized by one rank of every node, its owner there:

    1. where whole matrices are wanted, each rank sends its rows to its peers on the other nodes: all rows
       of all matrices in one all-gather, in low bits or in bf16; or, where stale rows do, takes those that came last;
    2. what a rank now has goes to the owners within the node, in one all-to-all in bf16;
    3. the owners orthogonalize, which begins and ends in bf16, and give each rank of the node its rows in the same way.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..config import SUPPORTED_BITS
from ..fsdp.collectives import all_gather
from ..fsdp.shared import Traffic
from ..fsdp.topology import Topology
from ..wire.format import WireFormat, wire_format
from ..wire.layout import ParameterShard, rows_per_rank

# Factors of an orthogonal matrix of ``rows`` and ``columns``, by Megatron's names and torch's.
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
# Elements of whole matrices for each rank of a node at a time, where that is more than one matrix for each.
ELEMENTS_AT_ONCE = 2**25


@dataclass(frozen=True)
class NewtonSchulz:
    """Steps towards the nearest orthogonal matrix: X <- a·X + (b·XXᵀ + c·(XXᵀ)²)·X in bf16."""

    steps: int
    coefficients: tuple[float, float, float]  # a, b, c
    eps: float  # the least norm to divide by
    scaling: str  # a key of SCALES
    scale_factor: float

    def __call__(self, matrix: Tensor) -> Tensor:
        """Move the singular values of a matrix [rows, columns] to about 1, in bf16."""
        a, b, c = self.coefficients
        is_tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.T if is_tall else matrix  # XXᵀ is the smaller product
        x = x / x.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if is_tall else x

    def scale(self, rows: int, columns: int) -> float:
        return SCALES[self.scaling](rows, columns) * self.scale_factor


@dataclass(frozen=True)
class MomentumWire:
    """In what rows cross nodes."""

    bits: int | None = None  # None: bf16
    block_size: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (None, *SUPPORTED_BITS):
            raise ValueError(f"momentum_bits must be one of {SUPPORTED_BITS}, or None for bf16; got {self.bits}")
        if self.block_size < 8 or self.block_size % 8:
            raise ValueError(f"momentum_block_size must be a multiple of 8, got {self.block_size}")

    def format(self, shards: Sequence[ParameterShard]) -> WireFormat:
        return wire_format(tuple(shards), self.bits, self.block_size, torch.bfloat16)


class MatrixPlan:
    """Which rank of a node owns which of some matrices, and how many rows of each a rank has.

    In what is sent, matrices are in the order of their owners, and every rank has c rows of each: the last are padded.
    """

    def __init__(self, shapes: Sequence[torch.Size], layout: Topology) -> None:
        self.shapes, self.layout = shapes, layout
        owners = _owners(shapes, layout.ranks_per_node)
        self.order = sorted(range(len(shapes)), key=lambda i: owners[i])  # order of the matrices on the wire
        self.numels = [rows_per_rank(shape[0], layout.world_size) * shape[1] for shape in shapes]  # c * columns
        # Elements of a rank's shards that each of the P owners gets, and the matrices that it owns.
        self.owned = [[i for i in self.order if owners[i] == p] for p in range(layout.ranks_per_node)]
        self.sizes = [sum(self.numels[i] for i in of_owner) for of_owner in self.owned]

    def shape(self, matrix: int, node: int | None) -> tuple[int, int]:
        """Return the shape of a matrix's rows that the node's ranks hold; None: of all rows."""
        num_rows, columns = self.shapes[matrix]
        per_node = rows_per_rank(num_rows, self.layout.world_size) * self.layout.ranks_per_node
        return num_rows if node is None else min(per_node, max(0, num_rows - node * per_node)), columns

    def flatten(self, shards: Sequence[Tensor]) -> Tensor:
        """Join this rank's rows of all matrices, which are in the order of the shapes: [L], padded, by owners."""
        return torch.cat([pad(shards[i].reshape(-1), (0, self.numels[i] - shards[i].numel())) for i in self.order])

    def unflatten(self, flat: Tensor, shards: Sequence[Tensor]) -> list[Tensor]:
        """Undo ``flatten`` for shards of these shapes."""
        part_of = dict(zip(self.order, flat.split([self.numels[i] for i in self.order]), strict=True))
        return [part_of[i][: shard.numel()].view(shard.shape) for i, shard in enumerate(shards)]


@dataclass(frozen=True)
class GatheredRows:
    """Rows that the ranks with one local rank, on all nodes, sent."""

    plan: MatrixPlan
    format: WireFormat
    wires: Tensor  # uint8 [N, nbytes]

    def decode(self) -> Tensor:
        """Return the rows in bf16 as all nodes have them, [N, L]."""
        out = torch.empty(len(self.wires), self.format.numel, dtype=torch.bfloat16, device=self.wires.device)
        return self.format.decode(self.wires, out)

    def own_rows(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's rows as they were sent, in bf16."""
        own = replace(self, wires=self.wires[self.plan.layout.node, None])
        return self.plan.unflatten(own.decode()[0], shards)


class MatrixBlocks:
    """This rank's part in orthogonalizing matrices that the ranks of ``topology`` share."""

    def __init__(self, topology: Topology, traffic: Traffic, wire: MomentumWire) -> None:
        self.topology, self.traffic, self.wire = topology, traffic, wire

    def gather(
        self, shards: Sequence[Tensor], shapes: Sequence[torch.Size], wire: MomentumWire | None = None
    ) -> GatheredRows | None:
        """Gather the rows of all nodes for ``orthogonalized``; None: there is one node. wire: not the usual one."""
        if self.topology.num_nodes == 1:
            return None
        plan = MatrixPlan(shapes, self.topology)
        format = (wire or self.wire).format([ParameterShard(str(i), plan.numels[i], True) for i in plan.order])
        sent = format.encode(plan.flatten(shards))
        wires = sent.new_empty(self.topology.num_nodes, format.nbytes)
        all_gather(wires.view(-1), sent, group=self.topology.inter_group)
        self.traffic.add(inter_node=(self.topology.num_nodes - 1) * format.nbytes)
        return GatheredRows(plan, format, wires)

    def orthogonalized(
        self,
        shards: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        orthogonalize: NewtonSchulz,
        gathered: GatheredRows | None = None,
        is_stale: bool = False,
    ) -> list[Tensor]:
        """Orthogonalize matrices of ``shapes``; return this rank's rows of the results, fp32, like ``shards``.

        gathered: what whole matrices are made of; None: each node's block by itself. is_stale: it came in an earlier
        step, and this node puts the rows of now into it.
        """
        topology = self.topology
        plan = MatrixPlan(shapes, topology) if gathered is None else gathered.plan
        if gathered is None:
            rows = plan.flatten(shards).bfloat16().unsqueeze(0)
        else:
            rows = gathered.decode()  # this node's rows as well, so that all nodes have the same matrices,
            if is_stale:
                rows[topology.node] = plan.flatten(shards)  # or each its own
        node = topology.node if gathered is None else None
        results = plan.unflatten(self._by_owners(rows, plan, node, orthogonalize), shards)
        return [result.float() * orthogonalize.scale(*plan.shape(i, node)) for i, result in enumerate(results)]

    def _by_owners(self, rows: Tensor, plan: MatrixPlan, node: int | None, orthogonalize: NewtonSchulz) -> Tensor:
        """Return this rank's rows of the results, [L]. rows: [n, L] of this local rank, on one node or on all."""
        n, topology, own = len(rows), self.topology, plan.sizes[self.topology.local_rank]
        sent_elements = n * (sum(plan.sizes) - own) + (topology.ranks_per_node - 1) * own  # to owners, and as an owner
        self.traffic.add(intra_node=sent_elements * torch.bfloat16.itemsize)
        # All nodes' rows for the first owner, then for the second, ...
        sent = torch.cat([part.reshape(-1) for part in rows.split(plan.sizes, dim=1)])
        received = self._all_to_all(sent, [n * size for size in plan.sizes], [n * own] * topology.ranks_per_node)
        in_rank_order = received.view(topology.ranks_per_node, n, own).transpose(0, 1)  # [n, P, own]
        owned = plan.owned[topology.local_rank]
        results = [received.new_empty(topology.ranks_per_node, 0)]
        for i, part in zip(owned, in_rank_order.split([plan.numels[i] for i in owned], dim=2), strict=True):
            num_rows, columns = plan.shape(i, node)
            matrix = part.reshape(-1, columns)  # [n * P * c, columns], in the order of the rows, padded behind
            if num_rows > 0:
                matrix[:num_rows] = orthogonalize(matrix[:num_rows])
            results.append(matrix.view(part.shape)[topology.node if n > 1 else 0])  # [P, c * columns]
        back = torch.cat(results, dim=1).reshape(-1)
        return self._all_to_all(back, [own] * topology.ranks_per_node, plan.sizes)

    def _all_to_all(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if self.topology.ranks_per_node == 1:
            return tensor
        arrived = tensor.new_empty(sum(received))
        dist.all_to_all_single(arrived, tensor, received, sent, group=self.topology.intra_group)
        return arrived


def _owners(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Assign each matrix to a local rank that orthogonalizes it: most work first, to the rank with least so far."""
    work, owners = [0] * ranks, [0] * len(shapes)
    cost = [math.prod(shape) * min(shape) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -cost[i]):
        owners[i] = work.index(min(work))
        work[owners[i]] += cost[i]
    return owners


def batches(matrices: Sequence[Tensor], ranks: int) -> Iterator[list[Tensor]]:
    """``matrices`` in batches that bound memory and give each of a node's ranks work: the largest first."""
    rest = sorted(matrices, key=lambda matrix: -matrix.numel())
    while rest:
        count = ranks
        while count < len(rest) and sum(m.numel() for m in rest[: count + ranks]) <= ranks * ELEMENTS_AT_ONCE:
            count += ranks
        yield rest[:count]
        rest = rest[count:]
