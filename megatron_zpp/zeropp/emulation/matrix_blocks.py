"""What all emulated ranks' ``MatrixBlocks`` make of matrices, in one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..fsdp.shared import Traffic
from ..fsdp.topology import RankLayout
from ..muon.matrix_blocks import MatrixBlocks, MatrixPlan, MomentumWire, NewtonSchulz
from ..wire.format import WireFormat


class EmulatedMatrixBlocks(MatrixBlocks):
    """All ranks' parts in orthogonalizing matrices that they share. What is gathered is a list of whole matrices."""

    def __init__(self, layouts: Sequence[RankLayout], traffic: Traffic, wire: MomentumWire) -> None:
        self.layouts, self.traffic, self.wire = layouts, traffic, wire

    def gather(self, shards: Sequence[Tensor], shapes: Sequence[torch.Size], wire: MomentumWire | None = None) -> Any:
        """Do ``MatrixBlocks.gather``. Shards are whole here; returns matrices as they arrive elsewhere, in bf16."""
        if self.layouts[0].num_nodes == 1:
            return None
        plan = MatrixPlan(shapes, self.layouts[0])
        format = (wire or self.wire).format(plan.shards())
        for _ in self.layouts:
            plan.count_gather(self.traffic, format.nbytes)
        return self._arrived(shards, plan, format)

    def own_rows(self, gathered: Any, shards: Sequence[Tensor]) -> list[Tensor]:
        """Do ``MatrixBlocks.own_rows`` for all ranks."""
        return gathered

    def orthogonalized(
        self,
        shards: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        orthogonalize: NewtonSchulz,
        gathered: Any = None,
        is_stale: bool = False,
    ) -> list[Tensor]:
        """Do ``MatrixBlocks.orthogonalized``. Shards are whole matrices here."""
        plan = MatrixPlan(shapes, self.layouts[0])
        for of_rank in self.layouts:
            plan.count_owners(self.traffic, of_rank.local_rank, is_whole=gathered is not None)
        if gathered is not None and not is_stale:
            return [orthogonalize(m).float() * orthogonalize.scale(*m.shape) for m in gathered]
        results = []
        for i, matrix in enumerate(shards):
            of_nodes = []
            for node in range(self.layouts[0].num_nodes):
                rows = plan.rows(i, node)
                if rows.start == rows.stop:
                    continue
                if gathered is None:
                    block = matrix[rows].bfloat16()
                    of_nodes.append(orthogonalize(block).float() * orthogonalize.scale(*block.shape))
                else:
                    mixed = gathered[i].clone()
                    mixed[rows] = matrix[rows].bfloat16()
                    of_nodes.append(orthogonalize(mixed)[rows].float() * orthogonalize.scale(*mixed.shape))
            results.append(torch.cat(of_nodes))
        return results

    def _arrived(self, matrices: Sequence[Tensor], plan: MatrixPlan, format: WireFormat) -> list[Tensor]:
        """Return the matrices as they arrive on other nodes, in bf16."""
        world_size = len(self.layouts)
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
