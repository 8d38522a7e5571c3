"""What the arithmetic of a layer waits for: collectives of tensor, context and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zpp.families import Architecture
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.needs.exchanges import Exchange, travelling_dtypes
from megatron_zpp.planning.needs.rank_groups import RankGrid
from megatron_zpp.planning.needs.rank_memory import recomputed_blocks
from megatron_zpp.planning.needs.token_exchanges import passes_again, rows_of_experts, tokens_to_experts
from megatron_zpp.planning.step import BETWEEN, WITHIN, Transfer
from megatron_zpp.settings.resolved import ResolvedSettings


def transfer_of(exchange: Exchange, cluster: ClusterSpec, encoded: int = 0, decoded: int = 0) -> Transfer:
    """encoded, decoded: bytes that the kernels read and write."""
    link = BETWEEN if exchange.group.nodes > 1 else WITHIN
    rate = 1e9 * cluster.kernel_gbytes
    return Transfer(link, cluster.seconds_of(exchange), encoded / rate, decoded / rate)


@dataclass(frozen=True)
class LayerCollectives:
    """Of one of a rank's layers, which all are alike but for experts, by the way in which a run divides it."""

    architecture: Architecture
    settings: ResolvedSettings
    grid: RankGrid
    cluster: ClusterSpec
    model: Transformer
    num_layers: int
    has_experts: bool

    @cached_property
    def in_forward(self) -> tuple[Transfer, ...]:
        """In the pass of one micro-batch."""
        return self._of_parts_of_layers() + self._of_tokens()

    @cached_property
    def in_backward(self) -> tuple[Transfer, ...]:
        """With those of what is computed again, a mean over the layers."""
        activation, n = self.settings.activation, self.num_layers
        of_parts, of_tokens = self._of_parts_of_layers(), self._of_tokens()
        again = _share(of_parts, recomputed_blocks(activation, n) / n)
        return of_parts + again + of_tokens + _share(of_tokens, passes_again(activation, n))

    def _of_parts_of_layers(self) -> tuple[Transfer, ...]:
        """Of tensor and context parallelism."""
        training, config, transfers = self.settings.training, self.model.config, list[Transfer]()
        weights, _ = travelling_dtypes(self.settings)
        tensor, context = self.grid.tensor_parallel, self.grid.context_parallel
        tokens = training.micro_batch_size * training.seq_length // context.size
        if tensor.size > 1:
            # Hidden states are summed up behind attention and behind the MLP. Sequence parallelism makes of each
            # all-reduce a gather before and a reduce-scatter behind, with as many bytes.
            piece = weights.itemsize * tokens * config.hidden_size // tensor.size
            sums = transfer_of(Exchange(tensor, piece, passes=2), self.cluster)
            transfers += [sums, *(self._of_whole_tokens(piece, sums) if self.has_experts else [sums])]
        if context.size > 1 and self.architecture.activations is not None:
            # Keys and values are gathered, and their gradients summed up and scattered.
            width = self.architecture.activations(config, weights.itemsize).keys_and_values
            transfers.append(transfer_of(Exchange(context, tokens * width // tensor.size), self.cluster))
        return tuple(transfers)

    @property
    def _bytes_of_rows(self) -> int:
        """Of the rows that a rank has experts run for its samples, as they are computed."""
        weights, _ = travelling_dtypes(self.settings)
        rows = rows_of_experts(self.settings) / self.grid.tensor_parallel.size
        return round(weights.itemsize * self.model.config.hidden_size * rows)

    def _of_whole_tokens(self, piece: int, sums: Transfer) -> list[Transfer]:
        """Tensor-parallel ranks have all tokens, of which each runs those of its experts; what these make is gathered.

        Gradients are gathered as often. piece: bytes of a rank's part of the tokens; sums: of an all-reduce of them.
        """
        group = self.grid.tensor_parallel
        exchanges = [Exchange(group, self._bytes_of_rows, is_straight=True)]
        if self.settings.distributed.sequence_parallel:
            exchanges.append(Exchange(group, piece))
        shared = [sums] if self.settings.model.moe_shared_expert_intermediate_size else []
        return [*(transfer_of(exchange, self.cluster) for exchange in exchanges), *shared]

    def _of_tokens(self) -> tuple[Transfer, ...]:
        """To their experts and back."""
        exchange = tokens_to_experts(self.settings, self.grid, self.model) if self.has_experts else None
        if exchange is None:
            return ()
        quantized = 0
        if self.settings.distributed.moe_token_bits is not None:
            quantized = self._bytes_of_rows + exchange.group.size * exchange.nbytes
        return 2 * (transfer_of(exchange, self.cluster, encoded=quantized, decoded=quantized),)


def _share(transfers: tuple[Transfer, ...], share: float) -> tuple[Transfer, ...]:
    return tuple(
        replace(each, seconds=share * each.seconds, encode=share * each.encode, decode=share * each.decode)
        for each in transfers
        if share > 0
    )
