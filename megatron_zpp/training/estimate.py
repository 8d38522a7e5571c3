"""What a training run needs, counted before it starts: memory of each rank, bytes between nodes, seconds per step.

Parameters, states and bytes are counted from the model's own shards and the collectives' own wire formats; activations
and times are estimates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megatron_zpp.architectures import Architecture
from megatron_zpp.arguments.check_zero import check_replicas_on_nodes
from megatron_zpp.islands import IslandConfig
from megatron_zpp.islands.hops import island_format
from megatron_zpp.models.moe import active_parameters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.parallel.mesh import ranks_per_model_copy
from megatron_zpp.settings.groups import ActivationSettings, OptimizerSettings, Settings
from megatron_zpp.training.exchanges import (
    Exchange,
    PlannedUnit,
    RankGroup,
    UnitExchanges,
    exchanges_of,
    gradients_format,
    pieces_of,
    plan_units,
    travelling_dtypes,
)
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
    replicas: int = 1  # HSDP's: groups of ranks that each hold the whole model
    islands: int = 1  # the same of islands, which also train by themselves

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def replica_size(self) -> int:
        """Ranks that share the shards of one model."""
        return self.world_size // self.replicas // self.islands

    @property
    def group(self) -> RankGroup:
        """Those ranks."""
        per_node = min(self.replica_size, self.ranks_per_node)
        return RankGroup(self.replica_size // per_node, per_node)

    @property
    def replica_group(self) -> RankGroup | None:
        """The ranks that have the same shard, one of each replica; None: there is one replica."""
        if self.replicas == 1:
            return None
        nodes = min(self.nodes, self.replicas)
        return RankGroup(nodes, self.replicas // nodes)


@dataclass(frozen=True)
class Estimate:
    """Memory in bytes of one rank, traffic in bytes of all nodes per optimizer step, seconds per optimizer step."""

    cluster: Cluster
    parameters: int
    active_parameters: int  # that a token meets
    tokens: int
    steps: int
    micro_batches: int  # of one rank and step
    flops_per_token: float
    states: dict[str, int]
    working: dict[str, int]
    host: dict[str, int]  # states that are kept in the host's memory instead of the device's
    sent_between_nodes: dict[str, int]
    sent_within_nodes: dict[str, int]
    sent_between_islands: float  # a mean over the steps of an interval
    exchanges: list[UnitExchanges]

    @property
    def memory(self) -> int:
        return sum(self.states.values()) + sum(self.working.values())

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
    model: Transformer | None = None,
) -> Estimate:
    """Raises ValueError for what is not estimated: --zero-stage 0, evaluation alone.

    model: what ``architecture`` builds, if it is there already.
    """
    training, config = settings.training, settings.zeropp
    assert training.global_batch_size and training.micro_batch_size and training.seq_length  # by parse_settings
    if settings.zero.zero_stage == 0:
        raise ValueError("--zero-stage 0 shards nothing and is not estimated; give 1, 2 or 3")
    if ranks_per_model_copy(settings.distributed) > 1:
        raise ValueError("tensor, pipeline and context parallelism are not estimated; leave them out")
    if settings.distributed.emulate_ranks is not None:
        raise ValueError("the one process of --emulate-ranks is not estimated; leave it out")
    if training.skip_train:
        raise ValueError("with --skip-train there is no training to estimate; leave it out")
    if config.ranks_per_node not in (None, cluster.ranks_per_node) or config.hpz_partition_size not in (
        1,
        cluster.ranks_per_node,
    ):
        raise ValueError(
            f"--ranks-per-node {cluster.ranks_per_node} is not what --zero-ranks-per-node or --zero-hpz-partition-size "
            "say; make them agree"
        )
    expert_parallel = settings.distributed.expert_model_parallel_size
    if expert_parallel > 1 and cluster.ranks_per_node % expert_parallel:
        raise ValueError(
            "experts that are divided among nodes are not estimated; give a smaller --expert-model-parallel-size"
        )
    if cluster.replicas > 1:
        check_replicas_on_nodes(cluster.replicas, cluster.world_size, cluster.ranks_per_node)
    batches = BatchSchedule(
        training.global_batch_size,
        training.micro_batch_size,
        cluster.world_size,
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
    model = model if model is not None else architecture.build_model(settings.model, vocabulary)
    units = plan_units(model, cluster.group, expert_parallel)
    micro_batches = batches.num_micro_batches(samples)
    exchanges = [
        exchanges_of(settings, unit, micro_batches, cluster.ring_passes, cluster.replica_group) for unit in units
    ]
    states, host = _states(settings, config, units, cluster, micro_batches)
    between_nodes = _sent(exchanges, cluster, lambda exchange: exchange.sent_between_nodes)
    within_nodes = _sent(exchanges, cluster, lambda exchange: exchange.sent_within_nodes)
    if settings.optimizer.optimizer == "muon":
        between_nodes["momentum"], within_nodes["momentum"] = _sent_by_muon(settings.optimizer, units, cluster)
    return Estimate(
        cluster=cluster,
        parameters=sum(p.numel() for p in model.parameters()),
        active_parameters=active_parameters(model),
        tokens=samples * training.seq_length,
        steps=steps,
        micro_batches=micro_batches,
        flops_per_token=architecture.flops_per_token(model.config, training.seq_length),
        states=states,
        working=_working_memory(architecture, settings, model, units),
        host=host,
        sent_between_nodes=between_nodes,
        sent_within_nodes=within_nodes,
        sent_between_islands=_sent_between_islands(settings.island, units, cluster),
        exchanges=exchanges,
    )


def _states(
    settings: Settings, config: ZeroPPConfig, units: list[PlannedUnit], cluster: Cluster, micro_batches: int
) -> tuple[dict[str, int], dict[str, int]]:
    """What a rank keeps from step to step, gradients and their sums included: on the device, and in host memory."""
    shard, whole = sum(unit.numel for unit in units), sum(unit.gathered for unit in units)
    nodes = cluster.group.nodes
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
    if cluster.islands > 1:
        copies = 2 if settings.island.outer_momentum > 0 else 1
        states["what islands agreed on, and the outer momentum, fp32"] = copies * 4 * shard
        if settings.island.loco:
            error = wire_format(pieces_of(units, cluster.islands), 8, settings.island.block_size, torch.float32)
            states["LoCo's errors between islands, int8"] = (cluster.islands + 1) * error.nbytes
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
    if settings.zero.zero_stage < 3:
        states["all parameters, gathered"] = weights.itemsize * whole
    if settings.zero.zero_stage == 1 and micro_batches > 1:
        states["gradients of earlier micro-batches, whole"] = gradients.itemsize * whole
    return states, host


def _int8_sum(config: ZeroPPConfig, unit: PlannedUnit) -> int:
    """Bytes of the sum for one node's shard."""
    return wire_format(unit.shards, 8, config.gradient_block_size, torch.float32).nbytes


def _working_memory(
    architecture: Architecture, settings: Settings, model: Transformer, units: list[PlannedUnit]
) -> dict[str, int]:
    """About what comes and goes within a step."""
    weights, gradients = (dtype.itemsize for dtype in travelling_dtypes(settings))
    layer = max(sum(unit.gathered for unit in units if unit.layer == i) for i in range(len(model.layers)))
    others = [unit.gathered for unit in units if unit.layer is None]  # they stay gathered
    gathered = weights * (sum(others) + 2 * layer) if settings.zero.zero_stage == 3 else 0  # this layer and the next
    return {
        "gathered weights, gradients on their way": gathered + (weights + gradients) * (max(others) + layer),
        "activations": _activations(architecture, settings, model, weights),
    }


def _activations(architecture: Architecture, settings: Settings, model: Transformer, itemsize: int) -> int:
    """What autograd keeps of one micro-batch."""
    if architecture.activations is None:
        raise ValueError(f"the architecture {architecture.name} does not say what memory its activations take")
    activation, num_blocks = settings.activation, len(model.layers)
    block = architecture.activations(model.config, itemsize)
    if activation.recompute_granularity is None:
        per_token = num_blocks * block.everything
    elif activation.recompute_granularity == "selective":
        per_token = num_blocks * block.linear_layers + block.everything
    else:
        recomputed = recomputed_blocks(activation, num_blocks)
        per_token = recomputed * block.input + (num_blocks - recomputed) * block.everything + block.everything
    assert settings.training.micro_batch_size and settings.training.seq_length
    return settings.training.micro_batch_size * settings.training.seq_length * per_token


def recomputed_blocks(activation: ActivationSettings, num_blocks: int) -> int:
    """Blocks of which the backward pass computes the whole forward pass again."""
    if activation.recompute_granularity != "full":
        return 0
    k = activation.recompute_num_layers or 1
    return -(-num_blocks // k) if activation.recompute_method == "uniform" else k


def _sent(exchanges: list[UnitExchanges], cluster: Cluster, of_group: Callable[[Exchange], int]) -> dict[str, int]:
    """Bytes that all ranks send in one step, as ``megatron_zpp.zeropp.traffic`` counts them; ``of_group``: by one."""
    sent = {"weights": 0, "gradients": 0}
    for unit in exchanges:
        for what, found in (("weights", unit.of_weights()), ("gradients", unit.of_gradients())):
            for exchange, times in found:
                sent[what] += cluster.world_size // exchange.group.size * times * of_group(exchange)
    return sent


def _sent_by_muon(settings: OptimizerSettings, units: list[PlannedUnit], cluster: Cluster) -> tuple[int, int]:
    """Bytes that all ranks send between and within nodes in one step, a mean over Muon's period."""
    nodes, per_node = cluster.group.nodes, cluster.group.ranks_per_node
    matrices = [part for unit in units for part in unit.shards if unit.is_hidden_matrix(part)]
    wire = MomentumWire(settings.muon_momentum_bits).format(matrices)
    whole = 1 / settings.muon_period if settings.muon_period else 0.0  # share of the steps that take whole matrices
    # Rows go to the owners, those of all nodes where matrices are whole, and a node's come back.
    to_and_from_owners = (1 + whole * (nodes - 1) + 1) * (per_node - 1) * torch.bfloat16.itemsize * wire.numel
    return (
        round(cluster.world_size * whole * (nodes - 1) * wire.nbytes),
        round(cluster.world_size // per_node * to_and_from_owners),
    )


def _sent_between_islands(config: IslandConfig, units: list[PlannedUnit], cluster: Cluster) -> float:
    """Bytes that all ranks send in one step, a mean over an interval: a piece to each other island, and one around."""
    wire = island_format(config, pieces_of(units, cluster.islands))
    return cluster.world_size * 2 * (cluster.islands - 1) * wire.nbytes / config.sync_interval


def memory_and_traffic(found: Estimate) -> list[str]:
    """What a rank keeps and a node sends, in lines."""
    nodes = found.cluster.nodes
    lines = ["memory of a GPU, GB"]
    memory = [*found.states.items(), *((f"{name} (about)", size) for name, size in found.working.items())]
    lines += [f"  {size / 1e9:9.3g}  {name}" for name, size in [*memory, ("in all", found.memory)]]
    if found.host:
        lines += ["", "host memory for each GPU, GB"]
        lines += [f"  {size / 1e9:9.3g}  {name}" for name, size in found.host.items()]
    lines += ["", "sent to other nodes per step by each node, GB"]
    lines += [f"  {size / nodes / 1e9:9.3g}  {name}" for name, size in found.sent_between_nodes.items()]
    lines += [f"  {found.sent_by_a_node / found.parameters:9.3g}  bytes for each parameter of the model"]
    if found.cluster.islands > 1:
        of_an_island = found.sent_between_islands / found.cluster.islands
        lines += ["", "sent to other islands per step by each island, GB, a mean over an interval"]
        lines += [f"  {of_an_island / 1e9:9.3g}  what they agree by"]
        lines += [f"  {of_an_island / found.parameters:9.3g}  bytes for each parameter of the model"]
    return lines
