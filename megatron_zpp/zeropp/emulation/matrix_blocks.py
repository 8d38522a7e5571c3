"""What all emulated ranks' ``MatrixBlocks`` make of matrices, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..matrix_blocks import MatrixPlan, MomentumWire, Orthogonalize
from ..topology import RankLayout
from ..traffic import Traffic


class EmulatedMatrixBlocks:
    """All ranks' parts in orthogonalizing matrices that they share."""

    def __init__(self, layouts: Sequence[RankLayout], traffic: Traffic, wire: MomentumWire) -> None:
        self.layouts, self.traffic, self.wire = layouts, traffic, wire

    def orthogonalized(
        self, shards: Sequence[Tensor], shapes: Sequence[torch.Size], whole: bool, orthogonalize: Orthogonalize
    ) -> list[Tensor]:
        """As ``MatrixBlocks.orthogonalized``; the shards are whole matrices here."""
        layout, plan = self.layouts[0], MatrixPlan(shapes, self.layouts[0])
        wire_nbytes = None
        matrices = [matrix.bfloat16() for matrix in shards]
        if whole and layout.num_nodes > 1:
            format = self.wire.format(plan.shards())
            wire_nbytes = format.nbytes
            matrices = self._arrived(shards, plan)
        for of_rank in self.layouts:
            plan.count(self.traffic, of_rank.local_rank, wire_nbytes)
        nodes: Sequence[int | None] = [None] if whole else range(layout.num_nodes)
        results = []
        for i, matrix in enumerate(matrices):
            blocks = [matrix[plan.rows(i, node)] for node in nodes]
            filled = [block for block in blocks if len(block)]
            results.append(torch.cat([orthogonalize(b).float() * orthogonalize.scale(*b.shape) for b in filled]))
        return results

    def _arrived(self, matrices: Sequence[Tensor], plan: MatrixPlan) -> list[Tensor]:
        """The matrices as they are between nodes, in bf16."""
        world_size, format = len(self.layouts), self.wire.format(plan.shards())
        flat = []
        for i in plan.order:
            padded = matrices[i].new_zeros(world_size * plan.numels[i])
            padded[: matrices[i].numel()] = matrices[i].reshape(-1)
            flat.append(padded.view(world_size, -1))
        wires = format.encode(torch.cat(flat, dim=1))  # [W, nbytes]
        decoded = torch.empty(world_size, format.numel, dtype=torch.bfloat16, device=wires.device)
        format.decode(wires, out=decoded)
        columns = dict(zip(plan.order, decoded.split([plan.numels[i] for i in plan.order], dim=1), strict=True))
        return [columns[i].reshape(-1)[: shape.numel()].view(shape) for i, shape in enumerate(plan.shapes)]
