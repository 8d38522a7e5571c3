"""What a rank keeps in memory: states, counted from its shards and wire formats; activations are estimated."""

from __future__ import annotations

from megatron_zpp.families import Architecture
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.planning.needs.planned_units import PlannedUnit, count_layers, hidden_matrices, island_pieces
from megatron_zpp.planning.needs.traffic import effective_zero_stage, recomputed_blocks, wire_dtypes
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.config import LoCoConfig, ZeroPPConfig
from megatron_zpp.zeropp.muon.matrix_blocks import MomentumWire
from megatron_zpp.zeropp.reduce.loco import ERROR_FORMATS
from megatron_zpp.zeropp.wire.format import wire_format

SUM_BYTES = {"fp32": 4, "bf16": 2}  # of an element of a gradient sum


def rank_states(
    settings: ResolvedSettings, units: list[PlannedUnit], micro_batches: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that a rank keeps from step to step, gradients included: on the device, and in host memory.

    units: those that the rank has shards of. micro_batches: per rank and step.
    """
    config = settings.zeropp
    shard, whole = sum(unit.numel for unit in units), sum(unit.gathered_numel for unit in units)
    zero_stage = effective_zero_stage(settings)
    between = [unit for unit in units if unit.group.nodes > 1]
    weights, gradients = wire_dtypes(settings)
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    optimizer_state = sum(
        state_tensors(settings.optimizer, unit.is_hidden_matrix(part)) * part.numel
        for unit in units
        for part in unit.shards
    )
    states: dict[str, int] = {}
    host: dict[str, int] = {}
    beside_parameters = host if settings.zero.cpu_offload else states
    beside_parameters["parameters, fp32"] = 4 * shard
    beside_parameters["gradients, fp32"] = 4 * shard
    beside_parameters[f"{settings.optimizer.optimizer}'s state, fp32"] = 4 * optimizer_state
    islands = settings.distributed.islands
    if islands > 1:
        copies = 2 if settings.island.outer_momentum > 0 else 1
        where = host if settings.island.offload else beside_parameters
        where["the islands' outer parameters and momentum, fp32"] = copies * 4 * shard
        if (feedback := settings.island.feedback) is not None:
            pieces, (bits, kept_in) = island_pieces(units, islands), ERROR_FORMATS[feedback.error_dtype]
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
            unit.group.nodes
            * (unit.formats(config).node_sum(unit.part).nbytes if dtype == "int8" else SUM_BYTES[dtype] * unit.numel)
            for unit in units
            if unit.group.size > 1
        )
    if config.loco is not None and (errors := sum(_loco_error_bytes(config, config.loco, unit) for unit in units)):
        if config.loco.exact_undo:
            states[f"LoCo's errors, {config.loco.error_dtype}, and those before the step"] = 2 * errors
        else:
            states[f"LoCo's errors, {config.loco.error_dtype}"] = errors
    if config.gradient_element_scales and between:
        sent = [unit.formats(config).gradients_between_nodes(unit.part, gradients).nbytes for unit in between]
        states["elements' scales, int8, and what was sent last"] = sum(  # to and from nodes
            2 * unit.group.nodes * (unit.numel + nbytes) for unit, nbytes in zip(between, sent, strict=True)
        )
    if settings.optimizer.muon_stale_rows and between:
        nodes = units[0].group.nodes  # of all units: Muon takes no experts
        rows = MomentumWire(settings.optimizer.muon_momentum_bits).format(hidden_matrices(units))
        # This rank's own in bf16, for checkpoints, and those of its local rank on all nodes as they were sent.
        states["matrices' rows as they were sent last"] = 2 * rows.numel + nodes * rows.nbytes
    if zero_stage < 3:
        states["all parameters, gathered"] = weights.itemsize * whole
    if zero_stage == 1 and micro_batches > 1:
        states["gradients of earlier micro-batches, whole"] = gradients.itemsize * whole
    return states, host


def _loco_error_bytes(config: ZeroPPConfig, loco: LoCoConfig, unit: PlannedUnit) -> int:
    """Return the bytes of LoCo's errors in all pieces that a rank sends, its own among them."""
    pieces = unit.group.nodes if unit.group.nodes > 1 else 0
    if loco.hops == "both" and unit.group.ranks_per_node > 1:
        pieces += unit.group.size
    bits, dtype = ERROR_FORMATS[loco.error_dtype]
    return pieces * unit.part.format(bits, config.gradient_block_size, dtype).nbytes


def working_memory(
    architecture: Architecture, settings: ResolvedSettings, model: Transformer, units: list[PlannedUnit], kept: float
) -> dict[str, int]:
    """Estimate what comes and goes within a step. kept: micro-batches whose activations are kept at once.

    Raises ValueError for an architecture that does not say what its activations take.
    """
    if architecture.activations is None:
        raise ValueError(f"the architecture {architecture.name} does not say what memory its activations take")
    weights, gradients = (dtype.itemsize for dtype in wire_dtypes(settings))
    activation, distributed, num_layers = settings.activation, settings.distributed, count_layers(units)
    layer = max(sum(unit.gathered_numel for unit in units if unit.layer == i) for i in range(num_layers))
    others = [unit.gathered_numel for unit in units if unit.layer is None]  # they stay gathered
    gathered = weights * (sum(others) + 2 * layer)  # this layer and the next
    if effective_zero_stage(settings) < 3:
        gathered = 0  # all parameters are among the states
    block = architecture.activations(model.config, weights).per_tensor_parallel_rank(
        distributed.tensor_model_parallel_size, distributed.sequence_parallel
    )
    if activation.recompute_granularity is None:
        bytes_kept, recomputed = num_layers * block.everything, 0
    elif activation.recompute_granularity == "selective":
        bytes_kept, recomputed = num_layers * block.linear_layers, block.everything
    else:
        again = recomputed_blocks(activation, num_layers)
        bytes_kept, recomputed = again * block.input + (num_layers - again) * block.everything, block.everything
    tokens = settings.training.micro_batch_size * settings.training.seq_length // distributed.context_parallel_size
    return {
        "gathered weights, gradients on their way": gathered + (weights + gradients) * (max(others) + layer),
        "activations": round(tokens * (kept * bytes_kept + recomputed)),
    }
