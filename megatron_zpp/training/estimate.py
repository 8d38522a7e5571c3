"""What a training run needs, counted before it starts: memory of each rank, bytes between nodes, seconds per step.

Parameters, states and bytes are counted from the model's own shards and the collectives' own wire formats; activations
and times are estimates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from megatron_zpp.architectures import Architecture
from megatron_zpp.arguments.check_zero import check_replicas_on_nodes
from megatron_zpp.arguments.resolve_parallel import data_parallel_size
from megatron_zpp.models.moe import active_parameters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.parallel.schedule_costs import micro_batches_kept
from megatron_zpp.parallel.stages import Placement
from megatron_zpp.settings.groups import ActivationSettings, OptimizerSettings, Settings
from megatron_zpp.training.exchanges import (
    Exchange,
    UnitExchanges,
    exchanges_of,
    gradients_format,
    travelling_dtypes,
    zero_stage_of,
)
from megatron_zpp.training.planned_units import (
    PlannedModel,
    PlannedUnit,
    num_layers_of,
    pipeline_placement,
    plan_model,
)
from megatron_zpp.training.rank_groups import RankGrid
from megatron_zpp.zeropp.config import ZeroPPConfig
from megatron_zpp.zeropp.loco import ERROR_FORMATS
from megatron_zpp.zeropp.matrix_blocks import MomentumWire
from megatron_zpp.zeropp.wire_format import wire_format


@dataclass(frozen=True)
class Cluster:
    """What a run is planned for."""

    nodes: int
    ranks_per_node: int
    peak_tflops: float = math.nan  # dense, of one device, in 16 bit; without it and the next two there are no times
    mfu: float = math.nan  # share of it that the model's arithmetic reaches
    link_gbps: float = math.nan  # Gbit/s that leave a node, all its links together
    ring_passes: int = 1  # of an unquantized reduce-scatter: gloo's is an all-reduce, 2

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class RankEstimate:
    """Of one rank, bytes of memory and collectives: of each pipeline rank another one."""

    states: dict[str, int]
    working: dict[str, int]
    host: dict[str, int]  # states that are kept in the host's memory instead of the device's
    exchanges: list[UnitExchanges]
    num_layers: int

    @property
    def memory(self) -> int:
        return sum(self.states.values()) + sum(self.working.values())


@dataclass(frozen=True)
class Estimate:
    """Memory in bytes of each rank, traffic in bytes of all nodes per optimizer step, seconds per optimizer step."""

    cluster: Cluster
    grid: RankGrid
    planned: PlannedModel = field(compare=False, repr=False)
    parameters: int
    active_parameters: int  # that a token meets
    tokens: int
    steps: int
    micro_batches: int  # of one rank and step
    flops_per_token: float
    ranks: list[RankEstimate]  # one of each pipeline stage
    sent_between_nodes: dict[str, int]
    sent_within_nodes: dict[str, int]

    @property
    def largest(self) -> RankEstimate:
        return max(self.ranks, key=lambda rank: rank.memory)

    @property
    def memory(self) -> int:
        return self.largest.memory

    @property
    def of_a_token(self) -> str:
        """What to say behind the number of parameters, where a token does not meet all."""
        if self.active_parameters == self.parameters:
            return ""
        return f", {self.active_parameters / 1e9:.3f} billion of them for a token"

    @property
    def compute_seconds(self) -> float:
        rate = self.cluster.world_size * self.cluster.peak_tflops * 1e12 * self.cluster.mfu
        return self.tokens / self.steps * self.flops_per_token / rate

    @property
    def sent_by_a_node(self) -> float:
        return sum(self.sent_between_nodes.values()) / self.cluster.nodes

    @property
    def network_seconds(self) -> float:
        return self.sent_by_a_node * 8 / (self.cluster.link_gbps * 1e9)

    def duration(self) -> str:
        """From all communication hidden behind computing, or the other way round, to none hidden."""
        least = self.steps * max(self.compute_seconds, self.network_seconds)
        most = self.steps * (self.compute_seconds + self.network_seconds)
        unit, seconds = next((u for u in (("days", 86400), ("hours", 3600)) if most >= u[1]), ("minutes", 60))
        numbers = dict.fromkeys(short(duration / seconds) for duration in (least, most))
        return f"{' to '.join(numbers)} {unit}"

    def brief(self) -> str:
        """One line, which the comments of the scripts in examples/ repeat."""
        return (
            f"{short(self.memory / 1e9)} GB a GPU; a node sends {short(self.sent_by_a_node / 1e9)} GB per step in "
            f"{short(self.network_seconds)} s, computing takes {short(self.compute_seconds)} s; {self.duration()}"
        )


def short(number: float) -> str:
    """Two digits, or all before the point: 0.028, 3.1, 48, 603."""
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def estimate(
    architecture: Architecture,
    settings: Settings,
    vocabulary: int,
    cluster: Cluster,
    planned: PlannedModel | None = None,
) -> Estimate:
    """Raises ValueError for what is not estimated: --zero-stage 0, evaluation alone.

    planned: the model on the grid of ``settings`` and ``cluster``, if it is there already.
    """
    training, config, distributed = settings.training, settings.zeropp, settings.distributed
    assert training.global_batch_size and training.micro_batch_size and training.seq_length  # by parse_settings
    if settings.zero.zero_stage == 0:
        raise ValueError("--zero-stage 0 shards nothing and is not estimated; give 1, 2 or 3")
    if distributed.emulate_ranks is not None:
        raise ValueError("the one process of --emulate-ranks is not estimated; leave it out")
    if training.skip_train:
        raise ValueError("with --skip-train there is no training to estimate; leave it out")
    grid = RankGrid(cluster.nodes, cluster.ranks_per_node, distributed)
    averaging = grid.sharing_gradients
    if config.hpz_partition_size not in (1, averaging.ranks_per_node) or config.ranks_per_node not in (
        None,
        averaging.ranks_per_node,
    ):
        raise ValueError(
            f"of {cluster.ranks_per_node} ranks per node {averaging.ranks_per_node} share parameters, and "
            "--zero-ranks-per-node or --zero-hpz-partition-size say something else; make them agree"
        )
    expert_parallel = distributed.expert_model_parallel_size
    if expert_parallel > 1 and averaging.ranks_per_node % expert_parallel:
        raise ValueError(
            "experts that are divided among nodes are not estimated; give a smaller --expert-model-parallel-size"
        )
    if settings.model.num_experts is not None and distributed.tensor_model_parallel_size > 1:
        raise ValueError("experts with tensor parallelism are not estimated; leave one of them out")
    if distributed.num_distributed_optimizer_instances > 1:
        check_replicas_on_nodes(
            distributed.num_distributed_optimizer_instances, averaging.size, averaging.ranks_per_node
        )
    batches = BatchSchedule(
        training.global_batch_size,
        training.micro_batch_size,
        data_parallel_size(distributed, cluster.world_size),
        training.rampup_batch_size,
        training.decrease_batch_size_if_needed,
    )
    if training.train_samples is not None:
        samples = training.train_samples
        steps = batches.total_iterations(samples, 0)
    else:
        samples, steps = 0, training.train_iters or 0
        for _ in range(steps):
            samples += batches.global_batch_size(samples)
    planned = planned or plan_model(architecture, architecture.build_model(settings.model, vocabulary), grid)
    model = planned.whole
    micro_batches = batches.num_micro_batches(samples)
    ranks = [
        _estimate_rank(architecture, settings, model, units, grid, micro_batches, cluster.ring_passes, number)
        for number, units in enumerate(planned.units_of_ranks)
    ]
    between_nodes = _sent(ranks, grid, lambda exchange: exchange.sent_between_nodes)
    within_nodes = _sent(ranks, grid, lambda exchange: exchange.sent_within_nodes)
    if settings.optimizer.optimizer == "muon":
        sent = [_sent_by_muon(settings.optimizer, rank, cluster.world_size // len(ranks)) for rank in ranks]
        between_nodes["momentum"], within_nodes["momentum"] = map(sum, zip(*sent, strict=True))
    placement = pipeline_placement(settings.distributed, model)
    if placement is not None:
        by_link = between_nodes if grid.pipeline.nodes > 1 else within_nodes
        by_link["hidden states"] = _sent_between_stages(settings, model, placement, grid, micro_batches)
    return Estimate(
        cluster=cluster,
        grid=grid,
        planned=planned,
        parameters=sum(p.numel() for p in model.parameters()),
        active_parameters=active_parameters(model),
        tokens=samples * training.seq_length,
        steps=steps,
        micro_batches=micro_batches,
        flops_per_token=architecture.flops_per_token(model.config, training.seq_length),
        ranks=ranks,
        sent_between_nodes=between_nodes,
        sent_within_nodes=within_nodes,
    )


def _estimate_rank(
    architecture: Architecture,
    settings: Settings,
    model: Transformer,
    units: list[PlannedUnit],
    grid: RankGrid,
    micro_batches: int,
    ring_passes: int,
    pipeline_rank: int,
) -> RankEstimate:
    states, host = _states(settings, settings.zeropp, units, micro_batches)
    placement, schedule, kept = (
        pipeline_placement(settings.distributed, model),
        settings.distributed.pipeline_schedule,
        1.0,
    )
    if placement is not None and schedule is not None:
        kept = micro_batches_kept(schedule, placement, pipeline_rank, micro_batches)
    # Layers are alike.
    exchanges = {unit: exchanges_of(settings, unit, micro_batches, ring_passes, grid.replicas) for unit in set(units)}
    return RankEstimate(
        states=states,
        working=_working_memory(architecture, settings, model, units, kept),
        host=host,
        exchanges=[exchanges[unit] for unit in units],
        num_layers=num_layers_of(units),
    )


def _states(
    settings: Settings, config: ZeroPPConfig, units: list[PlannedUnit], micro_batches: int
) -> tuple[dict[str, int], dict[str, int]]:
    """What a rank keeps from step to step, gradients and their sums included: on the device, and in host memory."""
    shard, whole = sum(unit.numel for unit in units), sum(unit.gathered for unit in units)
    nodes, zero_stage = units[0].group.nodes, zero_stage_of(settings)
    weights, gradients = travelling_dtypes(settings)
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    optimizer_state = sum(
        state_tensors(settings.optimizer, unit.is_hidden_matrix(part)) * part.numel
        for unit in units
        for part in unit.shards
    )
    states: dict[str, int] = {}
    host: dict[str, int] = {}
    (host if settings.zero.cpu_offload else states).update(
        {
            "parameters, fp32": 4 * shard,
            "gradients, fp32": 4 * shard,
            f"{settings.optimizer.optimizer}'s state, fp32": 4 * optimizer_state,
        }
    )
    if config.hpz_partition_size > 1 and nodes > 1:
        copy = weights.itemsize * shard
        if config.hpz_secondary_dtype == "int8":
            blocks = (config.weight_bits, config.weight_block_size)
            copy = sum(wire_format(unit.shards, *blocks, weights).nbytes for unit in units)
        states[f"hpZ's secondary partition, {config.hpz_secondary_dtype}"] = nodes * copy
    if config.quantized_gradients and micro_batches > 1:
        kept = {"fp32": 4 * shard, "bf16": 2 * shard, "int8": sum(map(partial(_int8_sum, config), units))}
        dtype = config.gradient_sum_dtype
        where = host if config.offload_gradient_sums else states
        where[f"gradients of earlier micro-batches, summed within the node, {dtype}"] = nodes * kept[dtype]
    errors = 0
    if config.loco is not None:
        bits, loco_dtype = ERROR_FORMATS[config.loco.error_dtype]
        for unit in units:
            pieces = nodes * (nodes > 1)  # that a rank sends, this one's own among them
            if config.loco.hops == "both":
                pieces += unit.group.size * (unit.group.size > nodes)
            errors += pieces * wire_format(unit.shards, bits, config.gradient_block_size, loco_dtype).nbytes
    if config.loco is not None and errors:
        name, copies = f"LoCo's errors, {config.loco.error_dtype}", 1
        if config.loco.exact_undo:
            name, copies = f"{name}, and those before the step", 2
        states[name] = copies * errors
    if config.gradient_element_scales and nodes > 1:
        travelled = sum(gradients_format(config, unit, gradients).nbytes for unit in units)
        states["elements' scales, int8, and what travelled last"] = 2 * nodes * (shard + travelled)  # to and from nodes
    if settings.optimizer.muon_stale_rows and nodes > 1:
        matrices = [part for unit in units for part in unit.shards if unit.is_hidden_matrix(part)]
        rows = MomentumWire(settings.optimizer.muon_momentum_bits).format(matrices)
        # This rank's own in bf16, for checkpoints, and those of its local rank on all nodes as they travelled.
        states["matrices' rows as they travelled last"] = 2 * rows.numel + nodes * rows.nbytes
    if zero_stage < 3:
        states["all parameters, gathered"] = weights.itemsize * whole
    if zero_stage == 1 and micro_batches > 1:
        states["gradients of earlier micro-batches, whole"] = gradients.itemsize * whole
    return states, host


def _int8_sum(config: ZeroPPConfig, unit: PlannedUnit) -> int:
    """Bytes of the sum for one node's shard."""
    return wire_format(unit.shards, 8, config.gradient_block_size, torch.float32).nbytes


def _working_memory(
    architecture: Architecture, settings: Settings, model: Transformer, units: list[PlannedUnit], kept: float
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
    settings: Settings,
    model: Transformer,
    itemsize: int,
    num_blocks: int,
    micro_batches: float,
) -> int:
    """What autograd keeps of so many blocks and micro-batches, on a rank that has its part of the tokens."""
    if architecture.activations is None:
        raise ValueError(f"the architecture {architecture.name} does not say what memory its activations take")
    activation, distributed = settings.activation, settings.distributed
    block = architecture.activations(model.config, itemsize).of_tensor_parallel_rank(
        distributed.tensor_model_parallel_size, distributed.sequence_parallel
    )
    if activation.recompute_granularity is None:
        kept, recomputed = num_blocks * block.everything, 0
    elif activation.recompute_granularity == "selective":
        kept, recomputed = num_blocks * block.linear_layers, block.everything
    else:
        again = recomputed_blocks(activation, num_blocks)
        kept, recomputed = again * block.input + (num_blocks - again) * block.everything, block.everything
    assert settings.training.micro_batch_size and settings.training.seq_length
    tokens = settings.training.micro_batch_size * settings.training.seq_length // distributed.context_parallel_size
    return round(tokens * (micro_batches * kept + recomputed))


def recomputed_blocks(activation: ActivationSettings, num_blocks: int) -> int:
    """Blocks of which the backward pass computes the whole forward pass again."""
    if activation.recompute_granularity != "full":
        return 0
    k = activation.recompute_num_layers or 1
    return -(-num_blocks // k) if activation.recompute_method == "uniform" else k


def _sent(ranks: list[RankEstimate], grid: RankGrid, of_group: Callable[[Exchange], int]) -> dict[str, int]:
    """Bytes that all ranks send in one step, as ``megatron_zpp.zeropp.traffic`` counts them; ``of_group``: by one."""
    sent = {"weights": 0, "gradients": 0}
    ranks_of_stage = grid.world_size // len(ranks)
    for unit in (unit for rank in ranks for unit in rank.exchanges):
        for what, found in (("weights", unit.of_weights()), ("gradients", unit.of_gradients())):
            for exchange, times in found:
                sent[what] += ranks_of_stage // exchange.group.size * times * of_group(exchange)
    return sent


def _sent_by_muon(settings: OptimizerSettings, rank: RankEstimate, ranks: int) -> tuple[int, int]:
    """Bytes that so many ranks like this one send between and within nodes in one step, a mean over Muon's period."""
    units = [exchange.unit for exchange in rank.exchanges]
    nodes, per_node = units[0].group.nodes, units[0].group.ranks_per_node
    matrices = [part for unit in units for part in unit.shards if unit.is_hidden_matrix(part)]
    wire = MomentumWire(settings.muon_momentum_bits).format(matrices)
    whole = 1 / settings.muon_period if settings.muon_period else 0.0  # share of the steps that take whole matrices
    # Rows go to the owners, those of all nodes where matrices are whole, and a node's come back.
    from_others = 1.0 if settings.muon_stale_rows else whole
    to_and_from_owners = (1 + from_others * (nodes - 1) + 1) * (per_node - 1) * torch.bfloat16.itemsize * wire.numel
    return round(ranks * whole * (nodes - 1) * wire.nbytes), round(ranks // per_node * to_and_from_owners)


def bytes_between_stages(settings: Settings, model: Transformer) -> int:
    """Of the hidden states of one micro-batch that a rank sends on."""
    training, distributed = settings.training, settings.distributed
    assert training.micro_batch_size and training.seq_length
    length = training.seq_length // distributed.context_parallel_size
    length //= distributed.tensor_model_parallel_size if distributed.sequence_parallel else 1
    weights, _ = travelling_dtypes(settings)
    return weights.itemsize * training.micro_batch_size * length * model.config.hidden_size


def _sent_between_stages(settings: Settings, model: Transformer, placement: Placement, grid: RankGrid, m: int) -> int:
    """By all ranks, of m micro-batches: hidden states to the next stage, and their gradients to the one before."""
    crossings = sum(one != other for one, other in itertools.pairwise(placement.ranks))
    ranks_of_stage = grid.world_size // grid.pipeline.size
    return 2 * crossings * m * ranks_of_stage * bytes_between_stages(settings, model)


def memory_and_traffic(found: Estimate) -> list[str]:
    """What a rank keeps and a node sends, in lines."""
    nodes, rank = found.cluster.nodes, found.largest
    of_stage = f" of pipeline rank {found.ranks.index(rank)}, the largest" if len(found.ranks) > 1 else ""
    lines = [f"memory of a GPU{of_stage}, GB"]
    memory = [*rank.states.items(), *((f"{name} (about)", size) for name, size in rank.working.items())]
    lines += [f"  {size / 1e9:9.3g}  {name}" for name, size in [*memory, ("in all", found.memory)]]
    if rank.host:
        lines += ["", "host memory for each GPU, GB"]
        lines += [f"  {size / 1e9:9.3g}  {name}" for name, size in rank.host.items()]
    lines += ["", "sent to other nodes per step by each node, GB"]
    lines += [f"  {size / nodes / 1e9:9.3g}  {name}" for name, size in found.sent_between_nodes.items()]
    lines += [f"  {found.sent_by_a_node / found.parameters:9.3g}  bytes for each parameter of the model"]
    return lines
