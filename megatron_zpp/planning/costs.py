"""Seconds of everything in a step: arithmetic, collectives and the kernels around them, by the rates of a cluster."""

from __future__ import annotations

from dataclasses import replace

from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.step import BETWEEN, WITHIN, StepShape, Transfer, UnitTimes
from megatron_zpp.settings.groups import Settings
from megatron_zpp.training.estimate import Estimate, recomputed_blocks
from megatron_zpp.training.exchanges import Exchange, UnitExchanges, travelling_dtypes

FP32 = 4  # bytes


def step_shape(
    settings: Settings, found: Estimate, cluster: ClusterSpec, hidden_size: int, vocab_size: int, num_ends: int
) -> StepShape:
    """The step of the run that ``found`` is about. num_ends: units before and behind the layers, the root left out."""
    training = settings.training
    assert training.micro_batch_size and training.seq_length  # by parse_settings
    tokens = training.micro_batch_size * training.seq_length
    # A forward pass takes a third of the arithmetic; attention's share of it is taken to be in all layers alike.
    of_head = 2 * hidden_size * vocab_size * tokens / cluster.flops_per_second
    of_layers = found.flops_per_token / 3 * tokens / cluster.flops_per_second - of_head
    layers = {unit.unit.layer for unit in found.exchanges} - {None}
    again = recomputed_blocks(settings.activation, len(layers)) / len(layers)
    units = [_unit_times(settings, unit, cluster) for unit in found.exchanges]
    parts = {layer: [i for i, unit in enumerate(found.exchanges) if unit.unit.layer == layer] for layer in layers}
    for numbers in parts.values():
        for number in numbers:  # a layer, and its experts where they are a unit of their own
            forward = of_layers / len(layers) / len(numbers)
            units[number] = replace(units[number], forward=forward, backward=(2 + again) * forward)
    # The root has what is in no other unit, and is gathered first; of the ends half stand before the layers.
    *layers_and_ends, root = units
    in_layers = len(layers_and_ends) - num_ends
    ends = layers_and_ends[in_layers:]
    before = (num_ends + 1) // 2
    return StepShape(
        units=(root, *ends[:before], *layers_and_ends[:in_layers], *ends[before:]),
        micro_batches=found.micro_batches,
        zero_stage=settings.zero.zero_stage,
        head_forward=of_head,
        head_backward=2 * of_head,
        optimizer=_optimizer_seconds(settings, found, cluster),
        overlaps=cluster.overlaps,
    )


def _optimizer_seconds(settings: Settings, found: Estimate, cluster: ClusterSpec) -> float:
    """The norm reads gradients; clipping and the step read and write them, parameters and the optimizer's state."""
    shard = sum(unit.unit.numel for unit in found.exchanges)
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors(settings.optimizer)
    return FP32 * shard * (1 + 2 * (2 + state_tensors)) / (1e9 * cluster.kernel_gbytes)


def _unit_times(settings: Settings, exchanges: UnitExchanges, cluster: ClusterSpec) -> UnitTimes:
    config, unit = settings.zeropp, exchanges.unit
    weights, gradients = (dtype.itemsize for dtype in travelling_dtypes(settings))
    numel, nodes, per_node = unit.numel, unit.group.nodes, unit.group.ranks_per_node

    def transfer(exchange: Exchange, encoded: int = 0, decoded: int = 0) -> Transfer:
        """encoded, decoded: bytes that the kernels read and write."""
        link = BETWEEN if exchange.group.nodes > 1 else WITHIN
        rate = 1e9 * cluster.kernel_gbytes
        return Transfer(link, cluster.seconds_of(exchange), encoded / rate, decoded / rate)

    between = exchanges.weights_between
    if between is not None:
        encoded = weights * numel + between.nbytes
        weights_between = transfer(between, encoded, nodes * encoded)
        in_low_bits = config.weight_intra_bits is not None or config.hpz_secondary_dtype == "int8"
        # Each wire of the node's ranks is read, and every element of the unit written.
        decoded = per_node * exchanges.gather.nbytes + weights * unit.gathered if in_low_bits else 0
        gather = transfer(exchanges.gather, decoded=decoded)
    else:
        weights_between, nbytes = None, exchanges.gather.nbytes
        encoded = weights * numel + nbytes if config.quantized_weights else 0
        gather = transfer(exchanges.gather, encoded, unit.group.size * encoded)

    reduce = gradients_between = None
    if exchanges.reduce is not None and not config.quantized_gradients:
        reduce = transfer(exchanges.reduce)
    elif exchanges.reduce is not None:
        # Each rank sends a piece of N shards to each of its node's, adds up as many that it gets, and keeps their sum.
        encoded = gradients * unit.gathered + per_node * exchanges.reduce.nbytes
        reduce = transfer(exchanges.reduce, encoded, per_node * exchanges.reduce.nbytes + 2 * FP32 * nodes * numel)
    if exchanges.gradients_between is not None:
        wires = nodes * exchanges.gradients_between.nbytes
        gradients_between = transfer(
            exchanges.gradients_between, FP32 * nodes * numel + wires, wires + 2 * FP32 * numel
        )
    return UnitTimes(
        gather=gather,
        stays_gathered=unit.layer is None or settings.zero.zero_stage < 3,
        reduce=reduce,
        weights_between=weights_between,
        gradients_between=gradients_between,
        all_reduce=transfer(exchanges.all_reduce) if exchanges.all_reduce is not None else None,
    )
