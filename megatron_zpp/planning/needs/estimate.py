"""What a training run needs, counted before it starts: memory of each rank, bytes between nodes.

Parameters, states and bytes are counted from the model's own shards and the collectives' own wire formats; activations
are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_zpp.arguments.check_zero import check_replicas_on_nodes
from megatron_zpp.arguments.resolve_parallel import data_parallel_size
from megatron_zpp.families import Architecture
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.parallel.stages import micro_batches_kept
from megatron_zpp.planning.needs.planned_units import PlannedModel, count_layers, pipeline_placement, plan_model
from megatron_zpp.planning.needs.rank_groups import RankGrid
from megatron_zpp.planning.needs.rank_memory import rank_states, working_memory
from megatron_zpp.planning.needs.traffic import UnitExchanges, island_traffic, step_traffic, unit_exchanges
from megatron_zpp.settings.resolved import ResolvedSettings


@dataclass(frozen=True)
class RankEstimate:
    """Bytes of memory and collectives of one rank; each pipeline rank has its own."""

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
    """Memory of each rank and traffic of all nodes per optimizer step, in bytes."""

    grid: RankGrid
    planned: PlannedModel = field(compare=False, repr=False)
    parameters: int
    active_parameters: int  # used by one token
    tokens: int
    steps: int
    micro_batches: int  # per rank and step
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
    def length(self) -> str:
        """The run's length, as text."""
        return (
            f"{self.tokens:,} tokens in {self.steps:,} steps, the last of {self.micro_batches} micro-batch(es) a rank"
        )

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

    ring_passes: of an unquantized reduce-scatter; None: those of the settings' backend. planned: the model on ``grid``,
    if it is there already.
    """
    training, distributed = settings.training, settings.distributed
    _check(settings, grid)
    batches = BatchSchedule.from_settings(training, data_parallel_size(distributed, grid.world_size))
    if training.train_samples is not None:
        samples = training.train_samples
        steps = batches.total_iterations(samples)
    else:
        steps = training.train_iters or 0
        samples = batches.samples_after(steps)
    planned = planned or plan_model(architecture, architecture.build_model(settings.model, vocabulary), grid)
    micro_batches = batches.num_micro_batches(samples)
    ring_passes = ring_passes or (2 if distributed.distributed_backend == "gloo" else 1)  # gloo's is an all-reduce
    schedule, placement = distributed.pipeline_schedule, pipeline_placement(distributed, planned.whole)
    ranks = []
    for pipeline_rank, units in enumerate(planned.units_per_rank):
        kept = 1.0
        if schedule is not None and placement is not None:
            kept = micro_batches_kept(schedule, placement, pipeline_rank, micro_batches)
        states, host = rank_states(settings, units, micro_batches)
        working = working_memory(architecture, settings, planned.whole, units, kept)
        # Layers are alike.
        exchanges = {
            unit: unit_exchanges(settings, unit, micro_batches, ring_passes, grid.replicas) for unit in set(units)
        }
        ranks.append(RankEstimate(states, working, host, [exchanges[unit] for unit in units], count_layers(units)))
    sending = [rank.exchanges for rank in ranks]
    between_nodes, within_nodes = step_traffic(settings, planned, grid, sending, micro_batches)
    return Estimate(
        grid=grid,
        planned=planned,
        parameters=planned.parameters,
        active_parameters=planned.active_parameters,
        tokens=samples * training.seq_length,
        steps=steps,
        micro_batches=micro_batches,
        flops_per_token=architecture.flops_per_token(planned.whole.config, training.seq_length),
        ranks=ranks,
        sent_between_nodes=between_nodes,
        sent_within_nodes=within_nodes,
        sent_between_islands=island_traffic(settings, planned, grid),
    )


def _check(settings: ResolvedSettings, grid: RankGrid) -> None:
    """Raise ValueError for what is not estimated, or cannot be on these nodes."""
    config, distributed = settings.zeropp, settings.distributed
    if settings.zero.zero_stage == 0:
        raise ValueError("--zero-stage 0 shards nothing and is not estimated; give 1, 2 or 3")
    if distributed.emulate_ranks is not None:
        raise ValueError("the one process of --emulate-ranks is not estimated; leave it out")
    if settings.training.skip_train:
        raise ValueError("with --skip-train there is no training to estimate; leave it out")
    averaging = grid.gradient_averaging
    sharing = averaging.ranks_per_node
    if config.hpz_partition_size not in (1, sharing) or config.ranks_per_node not in (None, sharing):
        raise ValueError(
            f"of {grid.ranks_per_node} ranks per node {sharing} share parameters, and "
            "--zeropp-ranks-per-node or --zero-hpz-partition-size say something else; make them agree"
        )
    if distributed.num_distributed_optimizer_instances > 1:
        check_replicas_on_nodes(distributed.num_distributed_optimizer_instances, averaging.size, sharing)


def memory_and_traffic(needs: Estimate) -> list[str]:
    """Format the model's size, what a rank keeps and what a node sends."""
    rank, nodes, islands = needs.largest, needs.grid.nodes, needs.grid.distributed.islands
    which = f" of pipeline rank {needs.ranks.index(rank)}, the largest" if len(needs.ranks) > 1 else ""
    working = {f"{name} (about)": nbytes for name, nbytes in rank.working.items()}
    active = "" if needs.active_parameters == needs.parameters else f", {needs.active_parameters:,} of them for a token"
    lines = [f"{needs.parameters:,} parameters{active}", ""]
    lines += _gigabytes(f"memory of a GPU{which}, GB", rank.states | working | {"in all": needs.memory})
    if rank.host:
        lines += ["", *_gigabytes("host memory for each GPU, GB", rank.host)]
    sent = {what: nbytes / nodes for what, nbytes in needs.sent_between_nodes.items()}
    lines += ["", *_gigabytes("sent to other nodes per step by each node, GB", sent)]
    lines += [f"  {needs.sent_per_node / needs.parameters:9.3g}  bytes for each parameter of the model"]
    if islands > 1:
        per_island = needs.sent_between_islands / islands
        title = "sent to other islands per step by each island, GB, a mean over an interval"
        lines += ["", *_gigabytes(title, {"island synchronization": per_island})]
        lines += [f"  {per_island / needs.parameters:9.3g}  bytes for each parameter of the model"]
    return lines


def _gigabytes(title: str, rows: dict[str, int] | dict[str, float]) -> list[str]:
    return [title, *(f"  {nbytes / 1e9:9.3g}  {name}" for name, nbytes in rows.items())]
