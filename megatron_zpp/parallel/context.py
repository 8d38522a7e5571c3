"""Context parallelism: the ranks of a context-parallel group share each sequence and attend to the whole of it.

A sequence is split into 2 * cp chunks, and rank i holds chunks i and 2 * cp - 1 - i: with causal attention every rank
then has the same work. Keys and values are gathered, queries stay where they are; gradients of keys and values are
summed over the ranks and scattered. PyTorch's ring attention (torch 2.13) knows neither CPUs nor masks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron_zpp.models.attention import attention, replace_attention, takes_variable_lengths, whole_rows
from megatron_zpp.models.moe import MoE
from megatron_zpp.models.transformer import Transformer


def shard(tensor: Tensor, rank: int, size: int) -> Tensor:
    """Return a context-parallel rank's two chunks [..., S / size] of ``tensor`` [..., S]."""
    chunks = tensor.chunk(2 * size, dim=-1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=-1)


def shard_batch(batch: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return a context-parallel rank's part of a batch, with positions; ``cu_seqlens`` still counts whole sequences."""
    length = batch["tokens"].shape[1]
    positions = {"position_ids": torch.arange(length, device=batch["tokens"].device).unsqueeze(0)}  # [1, S]
    batch = positions | dict(batch)
    return {name: value if name == "cu_seqlens" else shard(value, rank, size) for name, value in batch.items()}


def crop_cu_seqlens(cu_seqlens: Tensor, length: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the offsets of documents when rows of ``length`` are cropped to [begin, end), and to [0, end).

    These are the queries of one chunk and the keys that they may see. A document without a query there is empty.
    """
    row, column = cu_seqlens // length, cu_seqlens % length
    return row * (end - begin) + (column - begin).clamp(0, end - begin), row * end + column.clamp(max=end)


def apply_context_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Let ``model`` take what ``shard_batch`` gives; ``mesh`` has the one dimension cp. Before ``fully_shard``.

    Its attention must be an ``attention.Attention``, with what ``model.document_attention`` returns.
    """
    context = ContextParallel(mesh, mesh.get_local_rank(), mesh.size())
    replace_attention(model, context.document_attention, lambda layer: context.attention)
    for module in model.modules():
        if isinstance(module, MoE):
            module.sample_group = mesh.get_group()


@dataclass(frozen=True)
class ContextParallel:
    """Attention of this rank's queries to the keys of all ranks."""

    mesh: DeviceMesh
    rank: int
    size: int

    def document_attention(
        self, cu_seqlens: Tensor | None, tokens: Tensor, dtype: torch.dtype, needs_mask: bool, window: int | None = None
    ) -> Tensor:
        """Replace ``attention.document_attention`` for ``tokens`` [B, S / cp]; the mask is bool [B or 1, 1, S / cp, S].

        Also without documents: then each sequence is one.
        """
        batch, length, device = tokens.shape[0], tokens.shape[1] * self.size, tokens.device
        if takes_variable_lengths(device, dtype, needs_mask):
            return whole_rows(batch, length, device) if cu_seqlens is None else cu_seqlens
        if cu_seqlens is None:
            batch, cu_seqlens = 1, whole_rows(1, length, device)  # the same mask for all
        position = torch.arange(batch * length, device=device, dtype=torch.int32).view(batch, 1, length)
        document = torch.bucketize(position, cu_seqlens, right=True)
        query_document, query = (shard(tensor, self.rank, self.size).unsqueeze(-1) for tensor in (document, position))
        mask = (query_document == document.unsqueeze(-2)) & (query >= position.unsqueeze(-2))
        return mask if window is None else mask & (query - position.unsqueeze(-2) <= window)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor,
        dropout: float,
        window: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Replace ``attention.attention`` for q [B, S / cp, heads, head_dim] and k, v [B, S / cp, groups, head_dim]."""
        k, v = self._gather(k, v)
        chunk = q.shape[1] // 2
        length, attended = k.shape[1], []
        for index, number in enumerate((self.rank, 2 * self.size - 1 - self.rank)):
            begin, end = number * chunk, (number + 1) * chunk  # this chunk's queries, which see no later key
            here = slice(index * chunk, (index + 1) * chunk)
            if documents.dim() == 1:
                visible, key_seqlens = crop_cu_seqlens(documents, length, begin, end)
            else:
                visible, key_seqlens = documents[:, :, here, :end], None
            keys, values = k[:, :end], v[:, :end]
            attended.append(attention(q[:, here], keys, values, visible, dropout, window, key_seqlens, **options))
        return torch.cat(attended, dim=1)

    def _gather(self, k: Tensor, v: Tensor) -> Tensor:
        """Gather k and v [B, S / cp, groups, head_dim] in the order of the sequence: [2, B, S, groups, head_dim]."""
        # First the dimension along which is gathered: [2 chunks, k and v, B, S / cp / 2, groups, head_dim].
        mine = torch.stack([k, v]).unflatten(2, (2, -1)).movedim(2, 0)
        sharded = DTensor.from_local(mine, self.mesh, [Shard(0)], run_check=False)
        gathered = sharded.redistribute(placements=[Replicate()])
        chunks = gathered.to_local(grad_placements=[Partial()])  # each rank's gradient is one term of a sum
        heads, tails = chunks.unflatten(0, (self.size, 2)).unbind(1)  # ranks' first chunks ascend, their second descend
        return torch.cat([heads, tails.flip(0)]).movedim(0, 2).flatten(2, 3)
