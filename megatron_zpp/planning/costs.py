"""Seconds of everything in a step: arithmetic, collectives and the kernels around them, by the rates of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_zpp.architectures import Architecture
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.step import BETWEEN, WITHIN, StepShape, Transfer, UnitTimes
from megatron_zpp.settings.groups import Settings
from megatron_zpp.training.estimate import Estimate, recomputed_blocks
from megatron_zpp.training.exchanges import Exchange, UnitExchanges, travelling_dtypes

FP32 = 4  # bytes
# That a pass reads and writes: in 16 bit from or to the matrix product, in fp32 for the softmax and what comes of it.
BYTES_OF_A_LOGIT = 16


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of one forward or backward pass of a micro-batch."""

    layer: float
    head: float


def step_shape(
    architecture: Architecture, settings: Settings, found: Estimate, cluster: ClusterSpec, model: Transformer
) -> StepShape:
    """The step of the run that ``found`` is about, of the whole ``model``."""
    forward, backward = arithmetic(architecture, settings, cluster, model)
    layers = sorted({unit.unit.layer for unit in found.exchanges if unit.unit.layer is not None})
    units = [_unit_times(settings, unit, cluster) for unit in found.exchanges]
    for layer in layers:  # a unit, and its experts where they are one of their own
        numbers = [i for i, unit in enumerate(found.exchanges) if unit.unit.layer == layer]
        for i in numbers:
            units[i] = replace(units[i], forward=forward.layer / len(numbers), backward=backward.layer / len(numbers))
    num_ends = len(model.end_units())
    # The root has what is in no other unit, and is gathered first; of the ends half stand before the layers.
    *layers_and_ends, root = units
    in_layers = len(layers_and_ends) - num_ends
    ends = layers_and_ends[in_layers:]
    before = (num_ends + 1) // 2
    return StepShape(
        units=(root, *ends[:before], *layers_and_ends[:in_layers], *ends[before:]),
        micro_batches=found.micro_batches,
        zero_stage=settings.zero.zero_stage,
        head_forward=forward.head,
        head_backward=backward.head,
        optimizer=_optimizer_seconds(settings, found, cluster),
        overlaps=cluster.overlaps,
    )


def arithmetic(
    architecture: Architecture, settings: Settings, cluster: ClusterSpec, model: Transformer
) -> tuple[Arithmetic, Arithmetic]:
    """Of the forward and the backward pass, the latter with what it computes again.

    Matrix products and attention take their operations, and what is between them its bytes. The backward pass has twice
    the products, and 2.5 times the operations of attention, which computes scores again (FlashAttention).
    """
    config, training, activation = model.config, settings.training, settings.activation
    assert training.micro_batch_size and training.seq_length  # by parse_settings
    tokens, num_layers = training.micro_batch_size * training.seq_length, len(model.layers)
    head = 2 * config.hidden_size * config.vocab_size
    products = architecture.flops_per_token(config, 0) / 3 - head  # where nothing is attended to
    attended = (architecture.flops_per_token(config, training.seq_length) / 3 - head - products) / num_layers
    products = tokens * products / num_layers / cluster.flops_per_second
    attended = tokens * attended / (cluster.peak_tflops * 1e12 * cluster.attention_efficiency)
    weights, _ = travelling_dtypes(settings)
    kept = recomputed = 0.0
    if architecture.activations is not None:
        block = architecture.activations(config, weights.itemsize)
        kept = tokens * block.everything / (1e9 * cluster.kernel_gbytes)
        if activation.recompute_granularity == "selective":
            recomputed = tokens * max(0, block.everything - block.linear_layers) / (1e9 * cluster.kernel_gbytes)
    logits = tokens * BYTES_OF_A_LOGIT * config.vocab_size / (1e9 * cluster.kernel_gbytes)
    head_products = tokens * head / cluster.flops_per_second
    # What is kept was written once and read once. The backward pass reads it, and writes and reads its gradient.
    forward = Arithmetic(products + attended + 2 * kept, head_products + logits)
    again = recomputed_blocks(activation, num_layers) / num_layers * forward.layer + 2 * recomputed
    backward = Arithmetic(2 * products + 2.5 * attended + 3 * kept + again, 2 * head_products + logits)
    return forward, backward


def _optimizer_seconds(settings: Settings, found: Estimate, cluster: ClusterSpec) -> float:
    """The norm reads gradients; clipping and the step read and write them, parameters and the optimizer's state."""
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    moved = sum(
        part.numel * (1 + 2 * (2 + state_tensors(settings.optimizer, unit.unit.is_hidden_matrix(part))))
        for unit in found.exchanges
        for part in unit.unit.shards
    )
    return FP32 * moved / (1e9 * cluster.kernel_gbytes)


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
