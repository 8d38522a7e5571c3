"""What a rank keeps in memory: states, counted from its shards and wire formats; activations and other work, about."""

from __future__ import annotations

from megatron_zpp.families import Architecture
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.planning.needs.exchanges import travelling_dtypes, zero_stage_of
from megatron_zpp.planning.needs.planned_units import PlannedUnit, num_layers_of, pieces_of
from megatron_zpp.settings.groups import ActivationSettings
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.config import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.muon.matrix_blocks import MomentumWire
from megatron_zpp.zeropp.reduce.loco import ERROR_FORMATS
from megatron_zpp.zeropp.wire.format import wire_format


def states_of_rank(
    settings: ResolvedSettings, units: list[PlannedUnit], micro_batches: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that a rank keeps from step to step, gradients and their sums included: on the device, and in host memory.

    units: those that the rank has shards of. micro_batches: of one rank and step.
    """
    config = settings.zeropp
    shard, whole = sum(unit.numel for unit in units), sum(unit.gathered for unit in units)
    zero_stage = zero_stage_of(settings)
    between = [unit for unit in units if unit.group.nodes > 1]
    weights, gradients = travelling_dtypes(settings)
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    optimizer_state = sum(
        state_tensors(settings.optimizer, unit.is_hidden_matrix(part)) * part.numel
        for unit in units
        for part in unit.shards
    )
    states: dict[str, int] = {}
    host: dict[str, int] = {}
    of_optimizer = host if settings.zero.cpu_offload else states
    of_optimizer["parameters, fp32"] = 4 * shard
    of_optimizer["gradients, fp32"] = 4 * shard
    of_optimizer[f"{settings.optimizer.optimizer}'s state, fp32"] = 4 * optimizer_state
    islands = settings.distributed.islands
    if islands > 1:
        copies = 2 if settings.island.outer_momentum > 0 else 1
        where = host if settings.island.offload else of_optimizer
        where["what islands agreed on, and the outer momentum, fp32"] = copies * 4 * shard
        if (feedback := settings.island.feedback) is not None:
            pieces, (bits, kept_in) = pieces_of(units, islands), ERROR_FORMATS[feedback.error_dtype]
            error = wire_format(pieces, bits, settings.island.block_size, kept_in)
            states[f"LoCo's errors between islands, {feedback.error_dtype}"] = (islands + 1) * error.nbytes
    if config.hpz_partition_size > 1 and between:
        states[f"hpZ's secondary partition, {config.hpz_secondary_dtype}"] = sum(
            unit.group.nodes * unit.formats(config).secondary_bytes(unit.part, weights) for unit in between
        )
    if config.quantized_gradients and micro_batches > 1:
        dtype = config.gradient_sum_dtype
        where = host if config.offload_gradient_sums else states
        where[f"gradients of earlier micro-batches, summed within the node, {dtype}"] = sum(
            unit.group.nodes * _bytes_of_sum(config, unit) for unit in units if unit.group.size > 1
        )
    if config.loco is not None and (errors := sum(_bytes_of_errors(config, config.loco, unit) for unit in units)):
        if config.loco.exact_undo:
            states[f"LoCo's errors, {config.loco.error_dtype}, and those before the step"] = 2 * errors
        else:
            states[f"LoCo's errors, {config.loco.error_dtype}"] = errors
    if config.gradient_element_scales and between:
        sent = [unit.formats(config).gradients_between_nodes(unit.part, gradients).nbytes for unit in between]
        states["elements' scales, int8, and what travelled last"] = sum(  # to and from nodes
            2 * unit.group.nodes * (unit.numel + nbytes) for unit, nbytes in zip(between, sent, strict=True)
        )
    if settings.optimizer.muon_stale_rows and between:
        nodes = units[0].group.nodes  # of all units: Muon takes no experts
        matrices = [part for unit in units for part in unit.shards if unit.is_hidden_matrix(part)]
        rows = MomentumWire(settings.optimizer.muon_momentum_bits).format(matrices)
        # This rank's own in bf16, for checkpoints, and those of its local rank on all nodes as they travelled.
        states["matrices' rows as they travelled last"] = 2 * rows.numel + nodes * rows.nbytes
    if zero_stage < 3:
        states["all parameters, gathered"] = weights.itemsize * whole
    if zero_stage == 1 and micro_batches > 1:
        states["gradients of earlier micro-batches, whole"] = gradients.itemsize * whole
    return states, host


def _bytes_of_sum(config: ZeroPPConfig, unit: PlannedUnit) -> int:
    """Of the sum for one node's shard."""
    if config.gradient_sum_dtype == "int8":
        return unit.formats(config).node_sum(unit.part).nbytes
    return {"fp32": 4, "bf16": 2}[config.gradient_sum_dtype] * unit.numel


def _bytes_of_errors(config: ZeroPPConfig, loco: LoCoConfig, unit: PlannedUnit) -> int:
    """Of the errors in all pieces that a rank sends, its own among them."""
    pieces = 0
    if unit.group.nodes > 1:
        pieces += unit.group.nodes
    if loco.hops == "both" and unit.group.ranks_per_node > 1:
        pieces += unit.group.size
    bits, dtype = ERROR_FORMATS[loco.error_dtype]
    return pieces * unit.part.format(bits, config.gradient_block_size, dtype).nbytes


def working_memory(
    architecture: Architecture, settings: ResolvedSettings, model: Transformer, units: list[PlannedUnit], kept: float
) -> dict[str, int]:
    """About what comes and goes within a step. kept: micro-batches of which activations are kept at once."""
    weights, gradients = (dtype.itemsize for dtype in travelling_dtypes(settings))
    layer = max(sum(unit.gathered for unit in units if unit.layer == i) for i in range(num_layers_of(units)))
    others = [unit.gathered for unit in units if unit.layer is None]  # they stay gathered
    gathered = weights * (sum(others) + 2 * layer) if zero_stage_of(settings) == 3 else 0  # this layer and the next
    return {
        "gathered weights, gradients on their way": gathered + (weights + gradients) * (max(others) + layer),
        "activations": _activations(architecture, settings, model, weights, num_layers_of(units), kept),
    }


def _activations(
    architecture: Architecture,
    settings: ResolvedSettings,
    model: Transformer,
    itemsize: int,
    num_blocks: int,
    micro_batches: float,
) -> int:
    """What autograd keeps of so many blocks and micro-batches, on a rank that has its part of the tokens."""
    if architecture.activations is None:
        raise ValueError(f"the architecture {architecture.name} does not say what memory its activations take")
    activation, distributed = settings.activation, settings.distributed
    block = architecture.activations(model.config, itemsize).per_tensor_parallel_rank(
        distributed.tensor_model_parallel_size, distributed.sequence_parallel
    )
    if activation.recompute_granularity is None:
        kept, recomputed = num_blocks * block.everything, 0
    elif activation.recompute_granularity == "selective":
        kept, recomputed = num_blocks * block.linear_layers, block.everything
    else:
        again = recomputed_blocks(activation, num_blocks)
        kept, recomputed = again * block.input + (num_blocks - again) * block.everything, block.everything
    tokens = settings.training.micro_batch_size * settings.training.seq_length // distributed.context_parallel_size
    return round(tokens * (micro_batches * kept + recomputed))


def recomputed_blocks(activation: ActivationSettings, num_blocks: int) -> int:
    """Blocks of which the backward pass computes the whole forward pass again."""
    if activation.recompute_granularity != "full":
        return 0
    k = activation.recompute_num_layers or 1
    return -(-num_blocks // k) if activation.recompute_method == "uniform" else k
