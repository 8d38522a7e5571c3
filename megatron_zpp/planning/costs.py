"""Seconds of everything in a step: arithmetic, collectives and the kernels around them, by the rates of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from megatron_zpp.families import Architecture
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.parallel.stages import idle_micro_batches
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.layer_collectives import LayerCollectives, transfer_of
from megatron_zpp.planning.needs.estimate import Estimate, RankEstimate, bytes_between_stages
from megatron_zpp.planning.needs.exchanges import Exchange, UnitExchanges, travelling_dtypes, zero_stage_of
from megatron_zpp.planning.needs.planned_units import pipeline_placement
from megatron_zpp.planning.needs.rank_groups import RankGrid, RankGroup
from megatron_zpp.planning.needs.rank_memory import recomputed_blocks
from megatron_zpp.planning.step import StepShape, Transfer, UnitTimes
from megatron_zpp.settings.resolved import ResolvedSettings

FP32 = 4  # bytes
# That a pass reads and writes: in 16 bit from or to the matrix product, in fp32 for the softmax and what comes of it.
BYTES_OF_A_LOGIT = 16


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of one forward or backward pass of a micro-batch."""

    layer: float
    head: float


def step_shapes(
    architecture: Architecture, settings: ResolvedSettings, found: Estimate, cluster: ClusterSpec
) -> list[StepShape]:
    """The step of the run that ``found`` is about: for a rank of each pipeline stage."""
    model = found.planned.whole
    forward, backward = arithmetic(architecture, settings, cluster, model)
    hidden = _hidden_states(settings, found.grid, cluster, model)
    placement, schedule = pipeline_placement(settings.distributed, model), settings.distributed.pipeline_schedule
    shapes = []
    for number, rank in enumerate(found.ranks):
        *ends, root = (_unit_times(settings, unit, cluster) for unit in rank.exchanges if unit.unit.layer is None)
        layers, n = [], rank.num_layers
        dense, with_experts = (
            LayerCollectives(architecture, settings, found.grid, cluster, model, n, has_experts)
            for has_experts in (False, True)
        )
        for layer in range(n):  # a unit, and its experts where they are one of their own
            exchanges = [unit for unit in rank.exchanges if unit.unit.layer == layer]
            units = [_unit_times(settings, unit, cluster) for unit in exchanges]
            share = 1 / len(units)
            units = [replace(unit, forward=share * forward.layer, backward=share * backward.layer) for unit in units]
            waits = with_experts if exchanges[-1].unit.has_experts else dense
            units[0] = replace(units[0], in_forward=waits.in_forward, in_backward=waits.in_backward)
            layers += units
        if placement is not None:
            layers[0] = replace(layers[0], in_forward=(hidden, *layers[0].in_forward))
            layers[-1] = replace(layers[-1], in_backward=(hidden, *layers[-1].in_backward))
        has_head = placement is None or placement.ranks[-1] == number
        before = (len(ends) + 1) // 2  # the root is gathered first; of the ends half stand before the layers
        shapes.append(
            StepShape(
                units=(root, *ends[:before], *layers, *ends[before:]),
                micro_batches=found.micro_batches,
                zero_stage=zero_stage_of(settings),
                head_forward=forward.head if has_head else 0.0,
                head_backward=backward.head if has_head else 0.0,
                optimizer=_optimizer_seconds(settings, rank, cluster),
                overlaps=cluster.overlaps,
                idle_micro_batches=idle_micro_batches(schedule, placement) if schedule and placement else 0.0,
            )
        )
    return shapes


def _hidden_states(settings: ResolvedSettings, grid: RankGrid, cluster: ClusterSpec, model: Transformer) -> Transfer:
    """From a pipeline rank to the next one."""
    two_ranks = RankGroup(2, 1) if grid.pipeline.nodes > 1 else RankGroup(1, 2)
    return transfer_of(Exchange(two_ranks, bytes_between_stages(settings, model), is_straight=True), cluster)


def arithmetic(
    architecture: Architecture, settings: ResolvedSettings, cluster: ClusterSpec, model: Transformer
) -> tuple[Arithmetic, Arithmetic]:
    """Of the forward and the backward pass on one rank, the latter with what it computes again.

    Matrix products and attention take their operations, and what is between them its bytes. The backward pass has twice
    the products, and 2.5 times the operations of attention, which computes scores again (FlashAttention).
    """
    config, training, activation = model.config, settings.training, settings.activation
    distributed, placement = settings.distributed, pipeline_placement(settings.distributed, model)
    tensor_parallel, num_layers = distributed.tensor_model_parallel_size, len(model.layers)
    tokens = training.micro_batch_size * training.seq_length / distributed.context_parallel_size
    head = 2 * config.hidden_size * config.vocab_size
    products = architecture.flops_per_token(config, 0) / 3 - head  # where nothing is attended to
    attended = (architecture.flops_per_token(config, training.seq_length) / 3 - head - products) / num_layers
    products = tokens * products / num_layers / tensor_parallel / cluster.flops_per_second
    attended = tokens * attended / tensor_parallel / (cluster.peak_tflops * 1e12 * cluster.attention_efficiency)
    weights, _ = travelling_dtypes(settings)
    kept = recomputed = 0.0
    if architecture.activations is not None:
        block = architecture.activations(config, weights.itemsize)
        block = block.per_tensor_parallel_rank(tensor_parallel, distributed.sequence_parallel)
        kept = tokens * block.everything / cluster.bytes_per_second_of_layers
        if activation.recompute_granularity == "selective":
            recomputed = tokens * max(0, block.everything - block.linear_layers) / cluster.bytes_per_second_of_layers
    logits = tokens * BYTES_OF_A_LOGIT * config.vocab_size / tensor_parallel / cluster.bytes_per_second_of_layers
    head_products = tokens * head / tensor_parallel / cluster.flops_per_second
    host = 1e-6 * cluster.layer_microseconds
    # What is kept was written once and read once. The backward pass reads it, and writes and reads its gradient.
    forward = Arithmetic(_with_host(products + attended + 2 * kept, host / 3, cluster), head_products + logits)
    of_stage = num_layers // (placement.num_stages if placement is not None else 1)
    again = recomputed_blocks(activation, of_stage) / of_stage * forward.layer + 2 * recomputed
    backward_layer = _with_host(2 * products + 2.5 * attended + 3 * kept + again, 2 * host / 3, cluster)
    return forward, Arithmetic(backward_layer, 2 * head_products + logits)


def _with_host(seconds: float, host: float, cluster: ClusterSpec) -> float:
    """With what the program itself takes. A GPU computes while its host issues what is next."""
    return max(seconds, host) if cluster.overlaps else seconds + host


def _optimizer_seconds(settings: ResolvedSettings, rank: RankEstimate, cluster: ClusterSpec) -> float:
    """The norm reads gradients; clipping and the step read and write them, parameters and the optimizer's state."""
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    moved = sum(
        part.numel * (1 + 2 * (2 + state_tensors(settings.optimizer, unit.unit.is_hidden_matrix(part))))
        for unit in rank.exchanges
        for part in unit.unit.shards
    )
    host = 1e-6 * rank.num_layers * cluster.step_microseconds
    return _with_host(FP32 * moved / (1e9 * cluster.kernel_gbytes), host, cluster)


def _unit_times(settings: ResolvedSettings, exchanges: UnitExchanges, cluster: ClusterSpec) -> UnitTimes:
    config, unit = settings.zeropp, exchanges.unit
    weights, gradients = (dtype.itemsize for dtype in travelling_dtypes(settings))
    numel, nodes, per_node = unit.numel, unit.group.nodes, unit.group.ranks_per_node
    transfer = partial(transfer_of, cluster=cluster)
    between = exchanges.weights_between
    if between is not None:
        encoded = weights * numel + between.nbytes
        weights_between = transfer(between, encoded=encoded, decoded=nodes * encoded)
        in_low_bits = config.weight_intra_bits is not None or config.hpz_secondary_dtype == "int8"
        # Each wire of the node's ranks is read, and every element of the unit written.
        decoded = per_node * exchanges.gather.nbytes + weights * unit.gathered if in_low_bits else 0
        gather = transfer(exchanges.gather, decoded=decoded)
    else:
        weights_between, nbytes = None, exchanges.gather.nbytes
        encoded = weights * numel + nbytes if config.quantized_weights else 0
        gather = transfer(exchanges.gather, encoded=encoded, decoded=unit.group.size * encoded)

    reduce = gradients_between = None
    if exchanges.reduce is not None and not config.quantized_gradients:
        reduce = transfer(exchanges.reduce)
    elif exchanges.reduce is not None:
        # Each rank sends a piece of N shards to each of its node's, adds up as many that it gets, and keeps their sum.
        encoded = gradients * unit.gathered + per_node * exchanges.reduce.nbytes
        decoded = per_node * exchanges.reduce.nbytes + 2 * FP32 * nodes * numel
        reduce = transfer(exchanges.reduce, encoded=encoded, decoded=decoded)
    if exchanges.gradients_between is not None:
        wires = nodes * exchanges.gradients_between.nbytes
        gradients_between = transfer(
            exchanges.gradients_between,
            encoded=FP32 * nodes * numel + wires,
            decoded=wires + 2 * FP32 * numel,
        )
    return UnitTimes(
        gather=gather,
        stays_gathered=unit.layer is None or zero_stage_of(settings) < 3,
        reduce=reduce,
        weights_between=weights_between,
        gradients_between=gradients_between,
        all_reduce=transfer(exchanges.all_reduce) if exchanges.all_reduce is not None else None,
    )
