"""The two-level collectives as pure functions over the inputs of all ranks: what the distributed code must equal.

Written for clarity, parameter by parameter and without wire buffers, so that it shares no step with what it checks
but the arithmetic of a block. Results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import LoCoConfig
from .quantization import dequantize_blocks, quantize_blocks
from .wire_format import ParameterShard


@dataclass(frozen=True)
class Hop:
    """How values travel: in which bits, blocks, and dtype where unquantized."""

    bits: int | None
    block_size: int | None
    dtype: torch.dtype

    def transmit(self, shard: Tensor, parameters: Sequence[ParameterShard]) -> Tensor:
        """What arrives, in fp32, of a shard [L] that is sent over this hop."""
        arrived, start = [], 0
        for parameter in parameters:
            values = shard[start : start + parameter.numel]
            start += parameter.numel
            if self.bits is None or not parameter.quantizable or parameter.numel < (self.block_size or 8):
                arrived.append(values.to(self.dtype).float())
                continue
            blocks = values.split(self.block_size or parameter.numel)
            arrived += [dequantize_blocks(*quantize_blocks(block, self.bits)) for block in blocks]
        return torch.cat(arrived)


def all_gather(
    shards: Sequence[Tensor], parameters: Sequence[ParameterShard], inter: Hop, intra: Hop | None = None
) -> Tensor:
    """What every rank holds after an all-gather of the W ranks' shards [L]: [W, L].

    intra: the hop from the secondary partition; None = one flat gather, as qwZ without hpZ.
    """
    dtype = shards[0].dtype
    gathered = [inter.transmit(shard, parameters).to(dtype) for shard in shards]
    if intra is not None:
        gathered = [intra.transmit(shard, parameters).to(dtype) for shard in gathered]
    return torch.stack(gathered)


@dataclass
class Feedback:
    """LoCo's errors of all ranks and destination nodes; kept by the caller from step to step."""

    config: LoCoConfig
    block_size: int | None
    errors: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (rank, destination node) -> [L]
    steps: int = 0


def reduce_scatter(
    micro_batches: Sequence[Sequence[Tensor]],
    ranks_per_node: int,
    parameters: Sequence[ParameterShard],
    intra: Hop,
    inter: Hop,
    feedback: Feedback | None = None,
) -> list[Tensor]:
    """Each rank's sum over ranks and micro-batches, fp32 [L], from gradients [micro-batch][rank] of shape [W, L]."""
    world_size = len(micro_batches[0])
    num_nodes = world_size // ranks_per_node

    def node_sum(node: int, destination: int) -> Tensor:
        """The sum over one node's ranks and all micro-batches of the gradients for the rank ``destination``."""
        total: Tensor | None = None
        for gradients in micro_batches:
            micro_batch_sum: Tensor | None = None
            for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
                piece = gradients[rank][destination]
                arrived = piece.float() if ranks_per_node == 1 else intra.transmit(piece, parameters)
                micro_batch_sum = arrived if micro_batch_sum is None else micro_batch_sum + arrived
            assert micro_batch_sum is not None
            total = micro_batch_sum if total is None else total + micro_batch_sum
        assert total is not None
        return total

    def send_between_nodes(node: int, destination: int) -> Tensor:
        gradient = node_sum(node, destination)
        if num_nodes == 1:
            return gradient
        if feedback is None:
            return inter.transmit(gradient, parameters)
        sender = node * ranks_per_node + destination % ranks_per_node
        key = (sender, destination // ranks_per_node)
        error = feedback.errors.get(key, torch.zeros_like(gradient))
        compensated = gradient + error
        sent = inter.transmit(compensated, parameters)
        beta = feedback.config.beta
        moved = beta * error + (1 - beta) * (compensated - sent)
        feedback.errors[key] = Hop(8, feedback.block_size, torch.float32).transmit(moved, parameters)
        return sent

    totals = []
    for destination in range(world_size):
        total = send_between_nodes(0, destination)
        for node in range(1, num_nodes):
            total = total + send_between_nodes(node, destination)
        totals.append(total)
    if feedback is not None:
        feedback.steps += 1
        if feedback.config.reset_interval is not None and feedback.steps >= feedback.config.reset_interval:
            feedback.errors, feedback.steps = {}, 0
    return totals
