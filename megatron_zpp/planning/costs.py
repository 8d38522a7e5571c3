"""Seconds of everything in a step, by a cluster's rates: arithmetic, collectives and the kernels around them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_zpp.families import Architecture
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.parallel.stages import idle_micro_batches
from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.planning.needs.estimate import Estimate, RankEstimate
from megatron_zpp.planning.needs.planned_units import pipeline_placement
from megatron_zpp.planning.needs.rank_groups import RankGroup
from megatron_zpp.planning.needs.traffic import (
    FP32,
    Exchange,
    UnitExchanges,
    effective_zero_stage,
    expert_all_to_all,
    expert_rows,
    hidden_state_bytes,
    recomputed_blocks,
    resent_share,
    wire_dtypes,
)
from megatron_zpp.planning.step import BETWEEN, WITHIN, StepShape, Transfer, UnitTimes
from megatron_zpp.settings.resolved import ResolvedSettings

LOGIT_BYTES = 16  # a pass reads and writes in 16 bit at the matrix product, in fp32 from the softmax on


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of one forward or backward pass of a micro-batch."""

    layer: float
    head: float


def step_shapes(needs: Estimate, cluster: Cluster) -> list[StepShape]:
    """Describe the step of the run that ``needs`` counts, for a rank of each pipeline stage."""
    settings, model = needs.settings, needs.planned.whole
    forward, backward = arithmetic(needs.architecture, settings, cluster, model)
    two_ranks = RankGroup(2, 1) if needs.grid.group("pipeline").nodes > 1 else RankGroup(1, 2)
    hidden = make_transfer(Exchange(two_ranks, hidden_state_bytes(settings, model), is_straight=True), cluster)
    placement, schedule = pipeline_placement(settings.distributed, model), settings.distributed.pipeline_schedule
    shapes = []
    for number, rank in enumerate(needs.ranks):
        *ends, root = (_unit_times(settings, unit, cluster) for unit in rank.exchanges if unit.unit.layer is None)
        layers = []
        collectives = {
            has_experts: layer_collectives(needs, cluster, rank.num_layers, has_experts)
            for has_experts in {unit.unit.has_experts for unit in rank.exchanges}
        }
        for layer in range(rank.num_layers):  # one unit, or two if its experts have their own
            exchanges = [unit for unit in rank.exchanges if unit.unit.layer == layer]
            units = [_unit_times(settings, unit, cluster) for unit in exchanges]
            share = 1 / len(units)
            units = [replace(unit, forward=share * forward.layer, backward=share * backward.layer) for unit in units]
            in_forward, in_backward = collectives[exchanges[-1].unit.has_experts]
            units[0] = replace(units[0], in_forward=in_forward, in_backward=in_backward)
            layers += units
        if placement is not None:
            layers[0] = replace(layers[0], in_forward=(hidden, *layers[0].in_forward))
            layers[-1] = replace(layers[-1], in_backward=(hidden, *layers[-1].in_backward))
        has_head = placement is None or placement.ranks[-1] == number
        before = (len(ends) + 1) // 2  # the root is gathered first; half of the ends come before the layers
        shapes.append(
            StepShape(
                units=(root, *ends[:before], *layers, *ends[before:]),
                micro_batches=needs.micro_batches,
                zero_stage=effective_zero_stage(settings),
                head_forward=forward.head if has_head else 0.0,
                head_backward=backward.head if has_head else 0.0,
                optimizer=_optimizer_seconds(settings, rank, cluster),
                overlaps=cluster.overlaps,
                idle_micro_batches=idle_micro_batches(schedule, placement) if schedule and placement else 0.0,
            )
        )
    return shapes


def arithmetic(
    architecture: Architecture, settings: ResolvedSettings, cluster: Cluster, model: Transformer
) -> tuple[Arithmetic, Arithmetic]:
    """Return the times of the forward pass and of the backward pass, recomputation included, on one rank.

    The time of matrix products and attention follows from their FLOPs, that of the rest from its bytes. The backward
    pass has twice the products and 2.5 times the attention, which computes scores again (FlashAttention).
    """
    config, training, activation = model.config, settings.training, settings.activation
    distributed, placement = settings.distributed, pipeline_placement(settings.distributed, model)
    tensor_parallel, num_layers = distributed.tensor_model_parallel_size, len(model.layers)
    tokens = training.micro_batch_size * training.seq_length / distributed.context_parallel_size
    head = 2 * config.hidden_size * config.vocab_size
    products = architecture.flops_per_token(config, 0) / 3 - head  # without attention
    attended = (architecture.flops_per_token(config, training.seq_length) / 3 - head - products) / num_layers
    products = tokens * products / num_layers / tensor_parallel / cluster.flops_per_second
    attended = tokens * attended / tensor_parallel / (cluster.peak_tflops * 1e12 * cluster.attention_efficiency)
    weights, _ = wire_dtypes(settings)
    kept = recomputed = 0.0
    if architecture.activations is not None:
        block = architecture.activations(config, weights.itemsize)
        block = block.per_tensor_parallel_rank(tensor_parallel, distributed.sequence_parallel)
        kept = tokens * block.everything / cluster.layer_bytes_per_second
        if activation.recompute_granularity == "selective":
            recomputed = tokens * max(0, block.everything - block.linear_layers) / cluster.layer_bytes_per_second
    logits = tokens * LOGIT_BYTES * config.vocab_size / tensor_parallel / cluster.layer_bytes_per_second
    head_products = tokens * head / tensor_parallel / cluster.flops_per_second
    host = 1e-6 * cluster.layer_microseconds
    # The forward pass writes and reads what is kept. The backward pass reads it, and writes and reads its gradient.
    forward = Arithmetic(_with_host(products + attended + 2 * kept, host / 3, cluster), head_products + logits)
    layers_per_stage = num_layers // (placement.num_stages if placement is not None else 1)
    again = recomputed_blocks(activation, layers_per_stage) / layers_per_stage * forward.layer + 2 * recomputed
    backward_layer = _with_host(2 * products + 2.5 * attended + 3 * kept + again, 2 * host / 3, cluster)
    return forward, Arithmetic(backward_layer, 2 * head_products + logits)


def _with_host(seconds: float, host: float, cluster: Cluster) -> float:
    """Add the program's own time. A GPU computes while its host issues what is next."""
    return max(seconds, host) if cluster.overlaps else seconds + host


def _optimizer_seconds(settings: ResolvedSettings, rank: RankEstimate, cluster: Cluster) -> float:
    # The norm reads gradients. Clipping and the step read and write them, parameters and the optimizer's state.
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    moved = sum(
        part.numel * (1 + 2 * (2 + state_tensors(settings.optimizer, unit.unit.is_hidden_matrix(part))))
        for unit in rank.exchanges
        for part in unit.unit.shards
    )
    host = 1e-6 * rank.num_layers * cluster.step_microseconds
    return _with_host(FP32 * moved / (1e9 * cluster.kernel_gbytes), host, cluster)


def _unit_times(settings: ResolvedSettings, exchanges: UnitExchanges, cluster: Cluster) -> UnitTimes:
    def transfer(exchange: Exchange | None) -> Transfer | None:
        return make_transfer(exchange, cluster) if exchange is not None else None

    return UnitTimes(
        gather=make_transfer(exchanges.gather, cluster),
        stays_gathered=exchanges.unit.layer is None or effective_zero_stage(settings) < 3,
        reduce=transfer(exchanges.reduce),
        weights_between=transfer(exchanges.weights_between),
        gradients_between=transfer(exchanges.gradients_between),
        all_reduce=transfer(exchanges.all_reduce),
    )


def make_transfer(exchange: Exchange, cluster: Cluster) -> Transfer:
    """Return the times of a collective and of the kernels before and after it."""
    link = BETWEEN if exchange.group.nodes > 1 else WITHIN
    rate = 1e9 * cluster.kernel_gbytes
    return Transfer(link, cluster.exchange_seconds(exchange), exchange.encoded / rate, exchange.decoded / rate)


def layer_collectives(
    needs: Estimate, cluster: Cluster, num_layers: int, has_experts: bool
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return the collectives of one mean layer that each pass waits for: tensor, context and expert parallelism's."""
    settings, grid, model = needs.settings, needs.grid, needs.planned.whole
    training, distributed, config = settings.training, settings.distributed, model.config
    weights, _ = wire_dtypes(settings)
    tensor, context = grid.group("tensor"), grid.group("context")
    tokens = training.micro_batch_size * training.seq_length // context.size
    row_bytes = 0  # rows that experts compute for a rank's samples
    if has_experts:
        row_bytes = round(weights.itemsize * config.hidden_size * (expert_rows(settings) / tensor.size))
    parts: list[Transfer] = []
    if tensor.size > 1:
        # All-reduces after attention and the MLP; with sequence parallelism, gathers and reduce-scatters.
        piece = weights.itemsize * tokens * config.hidden_size // tensor.size
        all_reduce = make_transfer(Exchange(tensor, piece, passes=2), cluster)
        parts.append(all_reduce)
        if has_experts:
            # Every rank has all tokens and runs those of its experts; results and gradients are gathered.
            parts.append(make_transfer(Exchange(tensor, row_bytes, is_straight=True), cluster))
            if distributed.sequence_parallel:
                parts.append(make_transfer(Exchange(tensor, piece), cluster))
        if not has_experts or settings.model.moe_shared_expert_intermediate_size:
            parts.append(all_reduce)
    if context.size > 1 and needs.architecture.activations is not None:
        # Keys and values are gathered, and their gradients are reduce-scattered.
        width = needs.architecture.activations(config, weights.itemsize).keys_and_values
        parts.append(make_transfer(Exchange(context, tokens * width // tensor.size), cluster))
    to_experts: list[Transfer] = []
    exchange = expert_all_to_all(settings, grid, model) if has_experts else None
    if exchange is not None:  # there and back
        if distributed.moe_token_bits is not None:
            quantized = row_bytes + exchange.group.size * exchange.nbytes
            exchange = replace(exchange, encoded=quantized, decoded=quantized)
        to_experts = 2 * [make_transfer(exchange, cluster)]
    again = _scale(parts, recomputed_blocks(settings.activation, num_layers) / num_layers)
    sent_again = _scale(to_experts, resent_share(settings.activation, num_layers))
    return (*parts, *to_experts), (*parts, *again, *to_experts, *sent_again)


def _scale(transfers: list[Transfer], share: float) -> list[Transfer]:
    return [
        replace(each, seconds=share * each.seconds, encode=share * each.encode, decode=share * each.decode)
        for each in transfers
        if share > 0
    ]
