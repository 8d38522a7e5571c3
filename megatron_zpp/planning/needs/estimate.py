"""Count the needs of a training run before it starts: memory per rank, bytes between nodes.

States and bytes are counted from the model's own shards and the collectives' wire formats; activations are estimates.
"""

from dataclasses import dataclass, field

from megatron_zpp.arguments.check_zero import check_replicas_on_nodes
from megatron_zpp.arguments.resolve_parallel import data_parallel_size
from megatron_zpp.families import Architecture
from megatron_zpp.families.architecture import BlockActivations
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.parallel.mesh import MODEL_PARALLEL_SETTINGS
from megatron_zpp.parallel.stages import micro_batches_kept
from megatron_zpp.planning.needs.division import (
    PlannedModel,
    PlannedUnit,
    RankGrid,
    RankGroup,
    count_layers,
    hidden_matrices,
    island_pieces,
    pipeline_placement,
    plan_model,
)
from megatron_zpp.planning.needs.traffic import (
    Collective,
    block_activations,
    effective_zero_stage,
    island_piece_bytes,
    rank_collectives,
    recomputed_blocks,
    step_traffic,
    wire_dtypes,
)
from megatron_zpp.settings.groups import ActivationSettings
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.muon.matrix_blocks import MomentumWire
from megatron_zpp.zeropp.reduce.loco import ERROR_FORMATS
from megatron_zpp.zeropp.wire.format import wire_format

# NCCL's buffers, and more for each peer of an all-to-all within a node: NVIDIA/nccl issues 964 (A100), 1685 (H100)
COMMUNICATOR_BYTES, PEER_BYTES = 688e6, 3.28e9 / 7
# All peers on other nodes share one pair: 32 channels of 16 chunks of 128 KiB (src/transport/net.cc of NVIDIA/nccl)
NETWORK_PAIR_BYTES = 2 * 32 * 16 * 2**17


@dataclass(frozen=True)
class RankEstimate:
    """Bytes of memory and collectives of one rank; each pipeline rank has its own."""

    states: dict[str, int]
    working: dict[str, int]
    host: dict[str, int]  # bytes in host memory: offloaded tensors, and the copy that a save makes
    units: list[PlannedUnit]
    collectives: list[Collective]
    resident_weights: int  # more than ``memory``, inside ``zeropp.resident_weights()``,
    cache_per_token: int  # bytes of key-value cache per generated token

    @property
    def num_layers(self) -> int:
        return count_layers(self.units)

    @property
    def memory(self) -> int:
        return sum(self.states.values()) + sum(self.working.values())


@dataclass(frozen=True)
class Estimate:
    """Memory of each rank and traffic of all nodes per optimizer step, in bytes."""

    architecture: Architecture = field(compare=False, repr=False)
    settings: ResolvedSettings = field(compare=False, repr=False)
    grid: RankGrid
    planned: PlannedModel = field(compare=False, repr=False)
    tokens: int
    steps: int
    micro_batches: int  # per rank and step
    ranks: list[RankEstimate]  # one of each pipeline stage
    sent_between_nodes: dict[str, int]
    sent_within_nodes: dict[str, int]
    sent_between_islands: float  # a mean over the steps of an interval

    @property
    def parameters(self) -> int:
        return self.planned.parameters

    @property
    def flops_per_token(self) -> float:
        return self.architecture.flops_per_token(self.planned.whole.config, self.settings.training.seq_length)

    @property
    def largest(self) -> RankEstimate:
        return max(self.ranks, key=lambda rank: rank.memory)

    @property
    def memory(self) -> int:
        return self.largest.memory

    @property
    def sent_per_node(self) -> float:
        return sum(self.sent_between_nodes.values()) / self.grid.nodes


def estimate(
    architecture: Architecture,
    settings: ResolvedSettings,
    vocabulary: int,
    grid: RankGrid,
    ring_passes: int | None = None,
    planned: PlannedModel | None = None,
) -> Estimate:
    """Count what the run needs. Raises ValueError for what is not estimated: --zero-stage 0, evaluation alone.

    ring_passes: of an unquantized reduce-scatter; None: the backend's. planned: the model on ``grid``; None: plan it.
    """
    training, distributed = settings.training, settings.distributed
    _check(settings, grid)
    batches = BatchSchedule.from_settings(training, data_parallel_size(distributed, grid.world_size))
    samples = training.train_samples or batches.samples_after(training.train_iters or 0)
    steps = batches.total_iterations(samples) if training.train_samples else training.train_iters or 0
    planned = planned or plan_model(architecture, architecture.build_model(settings.model, vocabulary), grid)
    micro_batches = batches.num_micro_batches(samples)
    ring_passes = ring_passes or (2 if distributed.distributed_backend == "gloo" else 1)  # gloo's is an all-reduce
    schedule, placement = distributed.pipeline_schedule, pipeline_placement(distributed, planned.whole)
    ranks = []
    for pipeline_rank, units in enumerate(planned.units_per_rank):
        kept = 1.0
        if schedule is not None and placement is not None:
            kept = micro_batches_kept(schedule, placement, pipeline_rank, micro_batches)
        states, host = _rank_states(settings, units, micro_batches)
        working, offloaded, cache = _working_memory(architecture, settings, planned.whole, units, kept)
        weights, _ = wire_dtypes(settings)
        resident = [
            unit.group.size * unit.formats(settings.zeropp).resident_bytes(unit.part, weights)
            for unit in units
            if unit.group.size > 1 and (unit.group.nodes == 1 or settings.zeropp.weight_copies != "card")
        ]
        sent = rank_collectives(architecture, settings, grid, planned, pipeline_rank, micro_batches, ring_passes)
        ranks.append(RankEstimate(states, working, host | offloaded, units, [*sent], sum(resident), cache))
    between_nodes, within_nodes = step_traffic(grid.world_size, [rank.collectives for rank in ranks])
    # A rank sends one piece to each other island, and then one around the ring.
    pieces = island_piece_bytes(settings, planned)
    island_bytes = grid.world_size // len(pieces) * 2 * (distributed.islands - 1) * sum(pieces)
    return Estimate(
        architecture,
        settings,
        grid,
        planned,
        tokens=samples * training.seq_length,
        steps=steps,
        micro_batches=micro_batches,
        ranks=ranks,
        sent_between_nodes=between_nodes,
        sent_within_nodes=within_nodes,
        sent_between_islands=island_bytes / settings.island.sync_interval,
    )


def _check(settings: ResolvedSettings, grid: RankGrid) -> None:
    """Raise ValueError for what is not estimated, or does not fit these nodes."""
    config, distributed = settings.zeropp, settings.distributed
    if settings.zero.zero_stage == 0:
        raise ValueError("--zero-stage 0 shards nothing and is not estimated; give 1, 2 or 3")
    if settings.lora.lora_rank is not None:
        raise ValueError("adapters are not estimated; leave --lora-rank out to see what training all weights needs")
    if settings.training.skip_train:
        raise ValueError("with --skip-train there is no training to estimate; leave it out")
    averaging = grid.group("averaging")
    sharing = averaging.ranks_per_node
    if config.hpz_partition_size not in (1, sharing) or config.ranks_per_node not in (None, sharing):
        flags = "--zeropp-ranks-per-node or --zero-hpz-partition-size say something else; make them agree"
        raise ValueError(f"of {grid.ranks_per_node} ranks per node {sharing} share parameters, and {flags}")
    if distributed.num_distributed_optimizer_instances > 1:
        check_replicas_on_nodes(distributed.num_distributed_optimizer_instances, averaging.size, sharing)


def _rank_states(
    settings: ResolvedSettings, units: list[PlannedUnit], micro_batches: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that a rank keeps from step to step, gradients included: on the device, and in host memory."""
    config, islands = settings.zeropp, settings.distributed.islands
    shard, whole = sum(unit.numel for unit in units), sum(unit.gathered_numel for unit in units)
    zero_stage = effective_zero_stage(settings)
    between = [unit for unit in units if unit.group.nodes > 1]
    weights, gradients = wire_dtypes(settings)
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    optimizer_state = sum(
        state_tensors(settings.optimizer, u.is_hidden_matrix(part)) * part.numel for u in units for part in u.shards
    )
    states, host = dict[str, int](), dict[str, int]()
    beside_parameters = host if settings.zero.cpu_offload else states
    beside_parameters["parameters, fp32"] = 4 * shard
    beside_parameters["gradients, fp32"] = 4 * shard
    beside_parameters[f"{settings.optimizer.optimizer}'s state, fp32"] = 4 * optimizer_state
    saved = 4 * (shard + optimizer_state)  # but for scalars and random states
    if islands > 1:
        copies = 2 if settings.island.outer_momentum > 0 else 1
        beside_parameters["the islands' outer parameters and momentum, fp32"] = copies * 4 * shard
        saved += copies * 4 * shard
        if (feedback := settings.island.feedback) is not None:
            pieces, (bits, kept_in) = island_pieces(units, islands), ERROR_FORMATS[feedback.error_dtype]
            error = wire_format(pieces, bits, settings.island.block_size, kept_in)
            states[f"LoCo's errors between islands, {feedback.error_dtype}"] = (islands + 1) * error.nbytes
            saved += (islands + 1) * error.nbytes
    if config.keeps_copies and between:
        kept_as = "codes" if config.weight_moves and config.quantized_weights else config.hpz_secondary_dtype
        whose = "the whole model's" if config.weight_copies == "card" else "hpZ's"
        where = host if config.offloads("copies") else states
        where[f"{whose} secondary partition, {kept_as}"] = sum(unit.copy_bytes(config, weights) for unit in between)
        if config.weight_moves:
            saved += sum(unit.formats(config).weights(unit.part, weights).nbytes for unit in between)
    if config.quantized_gradients and micro_batches > 1 and zero_stage > 1:
        where = host if config.offloads("sums") else states
        where[f"gradients of earlier micro-batches, summed within the node, {config.gradient_sum_dtype}"] = sum(
            unit.sum_bytes(config) for unit in units if unit.group.size > 1
        )
    if (loco := config.loco) is not None and (errors := sum(sum(unit.error_bytes(config)) for unit in units)):
        undo = ", and those before the step" if loco.exact_undo else ""
        where = host if config.offloads("errors") else states
        where[f"LoCo's errors, {loco.error_dtype}{undo}"] = (2 if undo else 1) * errors
        saved += errors
    if config.gradient_element_scales and between:
        sent = [unit.formats(config).gradients_between_nodes(unit.part, gradients).nbytes for unit in between]
        states["elements' scales, int8, and what was sent last"] = sum(  # to and from nodes
            2 * unit.group.nodes * (unit.numel + nbytes) for unit, nbytes in zip(between, sent, strict=True)
        )
        saved += sum(2 * unit.group.nodes * unit.numel for unit in between)
    if settings.optimizer.muon_stale_rows and between:
        nodes = units[0].group.nodes  # equal for all units: Muon takes no experts
        rows = MomentumWire(settings.optimizer.muon_momentum_bits).format(hidden_matrices(units))
        # This rank's rows in bf16, for checkpoints, and its local rank's rows on all nodes as they were sent.
        states["matrices' rows as they were sent last"] = 2 * rows.numel + nodes * rows.nbytes
        saved += 2 * rows.numel
    if zero_stage < 3:
        states["all parameters, gathered"] = weights.itemsize * whole
    if zero_stage == 1 and micro_batches > 1:
        states["gradients of earlier micro-batches, whole"] = gradients.itemsize * whole
    if settings.checkpoint.save is not None and not settings.checkpoint.no_async_save:
        host["copies that saves in the background write, pinned for a GPU"] = saved
    return states, host


def _working_memory(
    architecture: Architecture, settings: ResolvedSettings, model: Transformer, units: list[PlannedUnit], kept: float
) -> tuple[dict[str, int], dict[str, int], int]:
    """Estimate what is allocated within a step only: on the device, in host memory, and of generation for each token.

    kept: micro-batches whose activations are kept at once.
    """
    dtype, (weights, gradients) = wire_dtypes(settings)[0], (each.itemsize for each in wire_dtypes(settings))
    activation, distributed, num_layers = settings.activation, settings.distributed, count_layers(units)
    layer = max(sum(unit.gathered_numel for unit in units if unit.layer == i) for i in range(num_layers))
    others = [unit.gathered_numel for unit in units if unit.layer is None]
    gathered = 0  # below stage 3, states include all parameters
    if effective_zero_stage(settings) == 3:
        gathered = weights * (sum(others) + 2 * layer)  # others stay gathered, beside this layer and the next
    block = block_activations(architecture, settings, model)
    bytes_kept, recomputed = _kept_and_recomputed(activation, block, num_layers)
    placement = pipeline_placement(distributed, model)
    stages = 1 if placement is None else placement.num_stages // distributed.pipeline_model_parallel_size
    num_offloaded = stages * activation.cpu_offloading_num_layers
    offloaded, _ = _kept_and_recomputed(activation, block, num_offloaded)
    # Two offloaded layers are on the device at a time, when the backward pass has freed the others of its micro-batch.
    rest, near = bytes_kept - offloaded, offloaded * min(kept, 2 / max(2, num_offloaded))
    tokens = settings.training.micro_batch_size * settings.training.seq_length // distributed.context_parallel_size
    working = {
        "gathered weights, gradients on their way": gathered + (weights + gradients) * (max(others) + layer),
        "activations": round(tokens * (max(kept * rest, (kept - 1) * rest + near) + recomputed)),
    }
    config, between = settings.zeropp, [unit for unit in units if unit.group.nodes > 1]
    if config.keeps_copies and config.offloads("copies"):  # gathers read one unit's at a time
        copies = [unit.copy_bytes(config, dtype) for unit in between]
        working["a unit's copy of weights, read from host memory"] = max(copies, default=0)
    if config.loco is not None and config.offloads("errors"):
        errors = [2 * max(unit.error_bytes(config)) for unit in units]
        working["a unit's LoCo errors, read from host memory, and the new ones"] = max(errors)
    in_host = {"activations of offloaded layers (about)": round(tokens * kept * offloaded)} if offloaded else {}
    if masks := _attention_masks(settings, model, block.scores > 0):
        working["masks of attention"] = masks
    return working, in_host, num_layers * block.keys_and_values


def _kept_and_recomputed(activation: ActivationSettings, block: BlockActivations, num_layers: int) -> tuple[float, int]:
    """Return the bytes of a token that the first layers keep, and those that one computes again at a time."""
    if activation.recompute_granularity is None:
        return num_layers * block.everything, 0
    if modules := activation.recompute_modules:
        dropped = [block.modules.get(name, 0) for name in modules]
        return num_layers * (block.everything - sum(dropped)), max(dropped)
    if activation.recompute_granularity == "selective":
        return num_layers * block.linear_layers, block.everything
    again = min(num_layers, recomputed_blocks(activation, num_layers))
    return again * block.input + (num_layers - again) * block.everything, block.everything


def _attention_masks(settings: ResolvedSettings, model: Transformer, is_plain: bool) -> int:
    """Return the bytes of masks [B or 1, 1, S / CP, S], one for each window: where GPUs' kernels need one."""
    training, ranks, precision = settings.training, settings.distributed.context_parallel_size, settings.precision
    if (precision.bf16 or precision.fp16) and not is_plain and not settings.model.attention_dropout:
        return 0
    has_documents = settings.data.reset_attention_mask or settings.data.sft
    windows = {getattr(layer, "window", None) for layer in model.layers}
    masks = [window for window in windows if window is not None or has_documents or ranks > 1]
    rows = training.micro_batch_size if has_documents else 1
    return rows * len(masks) * (training.seq_length // ranks) * training.seq_length


def communicators(settings: ResolvedSettings, grid: RankGrid) -> tuple[int, float]:
    """Return how many communicators a rank uses, as docs/evidence/scaling.md lists them, and NCCL's bytes for them."""
    config, averaging, experts = settings.zeropp, grid.group("averaging"), grid.group("experts")
    everyone, of_experts = RankGroup(grid.nodes, grid.ranks_per_node), grid.group("expert sharding")
    shards = {everyone, averaging, grid.group("sharding"), of_experts}  # often one and the same
    sizes = [group.size for group in (*shards, grid.group("replicas"), experts)]
    sizes += [getattr(settings.distributed, name) for name in MODEL_PARALLEL_SETTINGS]
    sizes.append(settings.distributed.islands)
    units = {averaging, of_experts}
    for group in units:
        if config.enabled and group.nodes > 1:
            sizes += [group.ranks_per_node, group.ranks_per_node, group.nodes]  # weights, gradients; both
        elif config.quantized_gradients:
            sizes.append(group.ranks_per_node)  # gradients have one of their own
    number = sum(size > 1 for size in sizes)
    exchanges = [experts, *units] if config.quantized_gradients else [experts]  # those with an all-to-all
    peers = sum(group.ranks_per_node - 1 for group in exchanges)
    crossing = sum(group.nodes > 1 for group in exchanges)
    return number, COMMUNICATOR_BYTES * number + PEER_BYTES * peers + NETWORK_PAIR_BYTES * crossing
