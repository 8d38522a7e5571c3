"""The collectives of a planned run in bytes of the wire formats, and what they send in a step."""

import itertools
import math
from dataclasses import dataclass, replace

import torch

from megatron_zpp.islands.hops import island_format
from megatron_zpp.models.moe import MOST_PADDING
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.experts import token_format
from megatron_zpp.parallel.pipeline import sharding_stage
from megatron_zpp.parallel.sharding import mixed_precision
from megatron_zpp.planning.needs.division import (
    PlannedModel,
    PlannedUnit,
    RankGrid,
    RankGroup,
    count_layers,
    hidden_matrices,
    island_pieces,
    pipeline_placement,
)
from megatron_zpp.settings.groups import ActivationSettings
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.muon.matrix_blocks import MomentumWire

FP32 = 4  # bytes


@dataclass(frozen=True)
class Exchange:
    """A collective of one group: a ring over its ranks, or pieces that each rank sends straight to all others."""

    group: RankGroup
    nbytes: int  # per piece
    passes: int = 1  # 2: an all-reduce, which is a reduce-scatter and a gather
    is_straight: bool = False  # no ring
    encoded: int = 0  # bytes that kernels read and write before it
    decoded: int = 0  # after it
    through_host: int = 0  # bytes that a rank reads from host memory before it, or writes there after it
    per_step: int = 1  # how often it runs in a step

    @property
    def sent(self) -> int:
        """Bytes that a rank sends."""
        return self.passes * (self.group.size - 1) * self.nbytes

    @property
    def sent_between_nodes(self) -> int:
        """Bytes that all ranks of the group send to other nodes; in a ring only a node's last rank does."""
        if self.is_straight:
            return self.group.size * (self.group.size - self.group.ranks_per_node) * self.nbytes
        return self.group.nodes * self.sent if self.group.nodes > 1 else 0

    @property
    def sent_within_nodes(self) -> int:
        return self.group.size * self.sent - self.sent_between_nodes


@dataclass(frozen=True)
class UnitExchanges:
    """The collectives of one unit in a step of many equal ones."""

    unit: PlannedUnit
    weights_between: Exchange | None  # hpZ's
    weights_passed_on: Exchange | None  # within a node, where each card keeps them
    gather: Exchange
    reduce: Exchange | None
    gradients_between: Exchange | None  # qgZ's
    all_reduce: Exchange | None  # among HSDP's replicas


def unit_exchanges(
    settings: ResolvedSettings, unit: PlannedUnit, micro_batches: int, ring_passes: int, replicas: RankGroup
) -> UnitExchanges:
    """Return what ``apply_zeropp`` and FSDP2 would send for a unit. ring_passes: of a reduce-scatter; 2 with gloo."""
    config, stage = settings.zeropp, effective_zero_stage(settings)
    weights, gradients = wire_dtypes(settings)
    group, part, formats, numel = unit.group, unit.part, unit.formats(config), unit.numel
    nodes, per_node = group.nodes, group.ranks_per_node
    between_nodes, within_node = RankGroup(nodes, 1), RankGroup(1, per_node)
    weights_between = passed_on = reduce = gradients_between = all_reduce = None
    gather = Exchange(group, weights.itemsize * numel)
    if formats.has_secondary_partition:
        moved = formats.bytes_between_nodes(part, weights)
        encoded = weights.itemsize * numel + moved
        # Each gather reads a copy in host memory, and what arrived is written back once per step.
        in_host = unit.copy_bytes(config, weights) if config.offloads("copies") else 0
        weights_between = Exchange(between_nodes, moved, encoded=encoded, decoded=nodes * encoded, through_host=in_host)
        wire = formats.weights_within_node(part, weights)
        nbytes = nodes * (wire.nbytes if wire is not None else gather.nbytes)
        decoded = 0
        if config.weight_intra_bits is not None or formats.keeps_wires:
            # Read each wire of the node's ranks, write every element of the unit.
            decoded = per_node * nbytes + weights.itemsize * unit.gathered_numel
        gather = Exchange(within_node, nbytes, decoded=decoded, through_host=in_host)
        if config.weight_copies == "card":  # gathers decode, and send nothing
            passed_on = Exchange(within_node, nodes * moved, decoded=(per_node - 1) * weights_between.decoded)
            gather = replace(gather, group=RankGroup(1, 1))
    elif config.quantized_weights:
        nbytes = formats.weights(part, weights).nbytes
        encoded = weights.itemsize * numel + nbytes
        gather = Exchange(group, nbytes, encoded=encoded, decoded=group.size * encoded)
    # Each reduction of a hop reads its errors and writes them back. A micro-batch writes sums, and the next reads them.
    error_within, error_between = unit.error_bytes(config) if config.offloads("errors") else (0, 0)
    sums = unit.sum_bytes(config) * (micro_batches - 1) if config.offloads("sums") and stage > 1 else 0
    if not config.quantized_gradients:
        reduce = Exchange(group, gradients.itemsize * numel, ring_passes)
    else:
        if per_node > 1:
            # Each rank sends a piece of N shards to each rank of its node, and adds up those that it receives.
            nbytes = nodes * formats.gradients_within_node(part, gradients).nbytes
            encoded = gradients.itemsize * unit.gathered_numel + per_node * nbytes
            decoded = per_node * nbytes + 2 * FP32 * nodes * numel
            reduce = Exchange(within_node, nbytes, is_straight=True, encoded=encoded, decoded=decoded)
            reduce = replace(reduce, through_host=2 * error_within)
        if nodes > 1:
            nbytes = formats.gradients_between_nodes(part, gradients).nbytes
            encoded, decoded = FP32 * nodes * numel + nodes * nbytes, nodes * nbytes + 2 * FP32 * numel
            gradients_between = Exchange(between_nodes, nbytes, is_straight=True, encoded=encoded, decoded=decoded)
            gradients_between = replace(gradients_between, through_host=2 * (error_between + sums))
    if replicas.size > 1:
        all_reduce = Exchange(replicas, math.ceil(gradients.itemsize * numel / replicas.size), passes=2)
    if stage == 3:  # layers are gathered for each pass; other units stay gathered between the two
        gather = replace(gather, per_step=(2 if unit.layer is not None else 1) * micro_batches)
    if stage >= 2 and reduce is not None:
        reduce = replace(reduce, per_step=micro_batches)
    return UnitExchanges(unit, weights_between, passed_on, gather, reduce, gradients_between, all_reduce)


def effective_zero_stage(settings: ResolvedSettings) -> int:
    """Return the ZeRO stage that ``--zero-stage`` becomes under the pipeline's schedule."""
    return sharding_stage(settings.zero.zero_stage, settings.distributed.pipeline_schedule)


def wire_dtypes(settings: ResolvedSettings) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of weights, in computing and on the wire, and of unquantized gradients on the wire."""
    policy = mixed_precision(settings.precision)
    return policy.param_dtype or torch.float32, policy.reduce_dtype or torch.float32


Traffic = dict[str, int]  # bytes per step, by what is sent


def step_traffic(
    settings: ResolvedSettings,
    planned: PlannedModel,
    grid: RankGrid,
    exchanges: list[list[UnitExchanges]],
    micro_batches: int,
) -> tuple[Traffic, Traffic]:
    """Return what all ranks send between and within nodes. exchanges: of a rank of each stage."""
    between, within = {"weights": 0, "gradients": 0}, {"weights": 0, "gradients": 0}
    ranks_per_stage = grid.world_size // len(exchanges)
    for unit in itertools.chain(*exchanges):
        weights = (unit.weights_between, unit.weights_passed_on, unit.gather)
        gradients = (unit.reduce, unit.gradients_between, unit.all_reduce)
        for what, sent in (*(("weights", sent) for sent in weights), *(("gradients", sent) for sent in gradients)):
            if sent is not None:
                runs = sent.per_step * (ranks_per_stage // sent.group.size)
                between[what] += runs * sent.sent_between_nodes
                within[what] += runs * sent.sent_within_nodes
    if settings.optimizer.optimizer == "muon":
        momentum = [_muon_traffic(settings, units, ranks_per_stage) for units in planned.units_per_rank]
        between["momentum"], within["momentum"] = map(sum, zip(*momentum, strict=True))
    exchange = expert_all_to_all(settings, grid, planned.whole)
    if exchange is not None:  # to experts and back, in both passes
        times = sum(
            2
            * (2 + resent_share(settings.activation, count_layers(units), "moe"))
            * sum(unit.has_experts for unit in units)
            for units in planned.units_per_rank
        )
        times *= micro_batches * ranks_per_stage / exchange.group.size
        between["tokens"] = round(times * exchange.sent_between_nodes)
        within["tokens"] = round(times * exchange.sent_within_nodes)
    placement = pipeline_placement(settings.distributed, planned.whole)
    if placement is not None:  # hidden states to the next stage, and their gradients to the one before
        crossings = sum(one != other for one, other in itertools.pairwise(placement.ranks))
        hidden = 2 * crossings * micro_batches * ranks_per_stage * hidden_state_bytes(settings, planned.whole)
        (between if grid.group("pipeline").nodes > 1 else within)["hidden states"] = hidden
    return between, within


def _muon_traffic(settings: ResolvedSettings, units: list[PlannedUnit], ranks: int) -> tuple[int, int]:
    """Return the bytes that all ranks of a stage send between and within nodes, a mean over Muon's period."""
    optimizer, nodes, per_node = settings.optimizer, units[0].group.nodes, units[0].group.ranks_per_node
    wire = MomentumWire(optimizer.muon_momentum_bits).format(hidden_matrices(units))
    whole = 1 / optimizer.muon_period if optimizer.muon_period else 0.0  # share of the steps with whole matrices
    # Rows go to the owners, from all nodes if matrices are whole, and a node's rows come back.
    from_others = 1.0 if optimizer.muon_stale_rows else whole
    to_and_from_owners = (1 + from_others * (nodes - 1) + 1) * (per_node - 1) * torch.bfloat16.itemsize * wire.numel
    return round(ranks * whole * (nodes - 1) * wire.nbytes), round(ranks // per_node * to_and_from_owners)


def hidden_state_bytes(settings: ResolvedSettings, model: Transformer) -> int:
    """Return the bytes of hidden states that one rank sends to the next stage per micro-batch."""
    training, distributed = settings.training, settings.distributed
    length = training.seq_length // distributed.context_parallel_size
    length //= distributed.tensor_model_parallel_size if distributed.sequence_parallel else 1
    weights, _ = wire_dtypes(settings)
    return weights.itemsize * training.micro_batch_size * length * model.config.hidden_size


def island_piece_bytes(settings: ResolvedSettings, planned: PlannedModel) -> list[int]:
    """Return the bytes of a piece of the whole model, as a rank of each stage sends it to another island."""
    config, islands = settings.island, settings.distributed.islands
    return [island_format(config, island_pieces(units, islands)).nbytes for units in planned.units_per_rank]


# Tokens of divided experts, as if routers spread them evenly: what ``parallel.experts`` counts depends on the data.


def expert_rows(settings: ResolvedSettings, grid: RankGrid) -> float:
    """Return the tokens of a micro-batch that one rank's samples send to experts, each counted once per expert."""
    training, model = settings.training, settings.model
    tokens = training.micro_batch_size * training.seq_length / settings.distributed.context_parallel_size
    capacity = model.expert_capacity_factor or math.inf
    is_padded = capacity <= MOST_PADDING and grid.group("experts").nodes == 1
    return tokens * model.router_topk * (capacity if is_padded else min(1.0, capacity))


def expert_all_to_all(settings: ResolvedSettings, grid: RankGrid, model: Transformer) -> Exchange | None:
    """Return one all-to-all of a layer and micro-batch, to the experts or back; None if tokens stay on their rank."""
    group = grid.group("experts")
    if settings.model.num_experts is None or group.size == 1:
        return None
    weights, _ = wire_dtypes(settings)
    row = token_format(model.config.hidden_size, settings.distributed.moe_token_bits, weights)
    rows = expert_rows(settings, grid) / grid.group("tensor").size / group.size  # each rank sends its own experts' rows
    return Exchange(group, math.ceil(rows * row.nbytes), is_straight=True)


def recomputed_blocks(activation: ActivationSettings, num_blocks: int) -> int:
    """Return the number of blocks whose forward pass the backward pass repeats."""
    if activation.recompute_granularity != "full":
        return 0
    k = activation.recompute_num_layers or 1
    return -(-num_blocks // k) if activation.recompute_method == "uniform" else k


def resent_share(activation: ActivationSettings, num_layers: int, module: str) -> float:
    """Return the share of layers whose backward pass communicates again.

    module: "core_attn", which gathers keys and values, or "moe", which sends tokens to experts.
    """
    if activation.recompute_modules:
        return float(module in activation.recompute_modules)
    if activation.recompute_granularity == "selective":
        return 1.0  # results of linear layers and attention are kept, but not what they take from other ranks
    return recomputed_blocks(activation, num_layers) / num_layers
