"""What a training run needs, counted before it starts: memory of each rank, bytes between nodes, seconds per step.

Parameters, states and bytes are counted from the model's own shards and the collectives' own wire formats; activations
and times are estimates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_zpp.arguments.check_zero import check_replicas_on_nodes
from megatron_zpp.arguments.resolve_parallel import data_parallel_size
from megatron_zpp.families import Architecture
from megatron_zpp.islands.hops import island_format
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.parallel.stages import Placement, micro_batches_kept
from megatron_zpp.planning.needs.exchanges import Exchange, UnitExchanges, exchanges_of, travelling_dtypes
from megatron_zpp.planning.needs.planned_units import (
    PlannedModel,
    PlannedUnit,
    num_layers_of,
    pieces_of,
    pipeline_placement,
    plan_model,
)
from megatron_zpp.planning.needs.rank_groups import RankGrid
from megatron_zpp.planning.needs.rank_memory import states_of_rank, working_memory
from megatron_zpp.planning.needs.token_exchanges import sent_of_tokens
from megatron_zpp.settings.groups import OptimizerSettings
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.muon.matrix_blocks import MomentumWire


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
    sent_between_islands: float  # a mean over the steps of an interval

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
    settings: ResolvedSettings,
    vocabulary: int,
    cluster: Cluster,
    planned: PlannedModel | None = None,
) -> Estimate:
    """Raises ValueError for what is not estimated: --zero-stage 0, evaluation alone.

    planned: the model on the grid of ``settings`` and ``cluster``, if it is there already.
    """
    training, distributed = settings.training, settings.distributed
    grid = RankGrid(cluster.nodes, cluster.ranks_per_node, distributed)
    _check(settings, grid)
    batches = BatchSchedule.from_settings(training, data_parallel_size(distributed, cluster.world_size))
    if training.train_samples is not None:
        samples = training.train_samples
        steps = batches.total_iterations(samples)
    else:
        steps = training.train_iters or 0
        samples = batches.samples_after(steps)
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
    if grid.expert_parallel.size > 1:
        between_nodes["tokens"], within_nodes["tokens"] = sent_of_tokens(settings, grid, planned, micro_batches)
    placement = pipeline_placement(settings.distributed, model)
    if placement is not None:
        by_link = between_nodes if grid.pipeline.nodes > 1 else within_nodes
        by_link["hidden states"] = _sent_between_stages(settings, model, placement, grid, micro_batches)
    return Estimate(
        cluster=cluster,
        grid=grid,
        planned=planned,
        parameters=planned.parameters,
        active_parameters=planned.active_parameters,
        tokens=samples * training.seq_length,
        steps=steps,
        micro_batches=micro_batches,
        flops_per_token=architecture.flops_per_token(model.config, training.seq_length),
        ranks=ranks,
        sent_between_nodes=between_nodes,
        sent_within_nodes=within_nodes,
        sent_between_islands=_sent_between_islands(settings, planned, grid),
    )


def _check(settings: ResolvedSettings, grid: RankGrid) -> None:
    """Raise ValueError for what is not estimated, or cannot be on these nodes."""
    training, config, distributed = settings.training, settings.zeropp, settings.distributed
    if settings.zero.zero_stage == 0:
        raise ValueError("--zero-stage 0 shards nothing and is not estimated; give 1, 2 or 3")
    if distributed.emulate_ranks is not None:
        raise ValueError("the one process of --emulate-ranks is not estimated; leave it out")
    if training.skip_train:
        raise ValueError("with --skip-train there is no training to estimate; leave it out")
    averaging = grid.sharing_gradients
    if config.hpz_partition_size not in (1, averaging.ranks_per_node) or config.ranks_per_node not in (
        None,
        averaging.ranks_per_node,
    ):
        raise ValueError(
            f"of {grid.ranks_per_node} ranks per node {averaging.ranks_per_node} share parameters, and "
            "--zero-ranks-per-node or --zero-hpz-partition-size say something else; make them agree"
        )
    if distributed.num_distributed_optimizer_instances > 1:
        check_replicas_on_nodes(
            distributed.num_distributed_optimizer_instances, averaging.size, averaging.ranks_per_node
        )


def _estimate_rank(
    architecture: Architecture,
    settings: ResolvedSettings,
    model: Transformer,
    units: list[PlannedUnit],
    grid: RankGrid,
    micro_batches: int,
    ring_passes: int,
    pipeline_rank: int,
) -> RankEstimate:
    states, host = states_of_rank(settings, units, micro_batches)
    schedule, placement = settings.distributed.pipeline_schedule, pipeline_placement(settings.distributed, model)
    kept = 1.0
    if schedule is not None and placement is not None:
        kept = micro_batches_kept(schedule, placement, pipeline_rank, micro_batches)
    # Layers are alike.
    exchanges = {unit: exchanges_of(settings, unit, micro_batches, ring_passes, grid.replicas) for unit in set(units)}
    return RankEstimate(
        states=states,
        working=working_memory(architecture, settings, model, units, kept),
        host=host,
        exchanges=[exchanges[unit] for unit in units],
        num_layers=num_layers_of(units),
    )


def _sent(ranks: list[RankEstimate], grid: RankGrid, of_group: Callable[[Exchange], int]) -> dict[str, int]:
    """Bytes that all ranks send in one step, as ``zeropp.fsdp.traffic`` counts them; ``of_group``: by one."""
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


def bytes_between_stages(settings: ResolvedSettings, model: Transformer) -> int:
    """Of the hidden states of one micro-batch that a rank sends on."""
    training, distributed = settings.training, settings.distributed
    length = training.seq_length // distributed.context_parallel_size
    length //= distributed.tensor_model_parallel_size if distributed.sequence_parallel else 1
    weights, _ = travelling_dtypes(settings)
    return weights.itemsize * training.micro_batch_size * length * model.config.hidden_size


def _sent_between_stages(
    settings: ResolvedSettings, model: Transformer, placement: Placement, grid: RankGrid, m: int
) -> int:
    """By all ranks, of m micro-batches: hidden states to the next stage, and their gradients to the one before."""
    crossings = sum(one != other for one, other in itertools.pairwise(placement.ranks))
    ranks_of_stage = grid.world_size // grid.pipeline.size
    return 2 * crossings * m * ranks_of_stage * bytes_between_stages(settings, model)


def _sent_between_islands(settings: ResolvedSettings, planned: PlannedModel, grid: RankGrid) -> float:
    """Bytes that all ranks send in one step, a mean over an interval: a piece to each other island, and one around."""
    wires, islands = bytes_of_pieces(settings, planned), settings.distributed.islands
    ranks_of_stage = grid.world_size // len(wires)
    return ranks_of_stage * 2 * (islands - 1) * sum(wires) / settings.island.sync_interval


def bytes_of_pieces(settings: ResolvedSettings, planned: PlannedModel) -> list[int]:
    """Of a piece of an agreement on the whole model, as a rank of each stage sends it to another island."""
    config, islands = settings.island, settings.distributed.islands
    return [island_format(config, pieces_of(units, islands)).nbytes for units in planned.units_of_ranks]


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
    islands = found.grid.distributed.islands
    if islands > 1:
        of_an_island = found.sent_between_islands / islands
        lines += ["", "sent to other islands per step by each island, GB, a mean over an interval"]
        lines += [f"  {of_an_island / 1e9:9.3g}  what they agree by"]
        lines += [f"  {of_an_island / found.parameters:9.3g}  bytes for each parameter of the model"]
    return lines
