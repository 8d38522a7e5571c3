"""The collectives of a planned run in bytes of the wire formats, and what they send in a step."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_zpp.families import Architecture
from megatron_zpp.families.architecture import BlockActivations
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
class Collective:
    """A collective that one rank runs in a step."""

    what: str  # the kind of data; "" for activations between a layer's ranks, which estimates and logs do not count
    exchange: Exchange
    runs: float = 1  # per step, a mean over Muon's period
    behind: Literal["", "forward", "backward"] = ""  # the pass that hides it: forward hides hpZ's, backward qgZ's


def unit_collectives(
    settings: ResolvedSettings, unit: PlannedUnit, micro_batches: int, ring_passes: int, replicas: RankGroup
) -> Iterator[Collective]:
    """Yield what ``apply_zeropp`` and FSDP2 would send for a unit. ring_passes: of a reduce-scatter; 2 with gloo."""
    config, stage = settings.zeropp, effective_zero_stage(settings)
    weights, gradients = wire_dtypes(settings)
    group, part, formats, numel = unit.group, unit.part, unit.formats(config), unit.numel
    nodes, per_node = group.nodes, group.ranks_per_node
    between_nodes, within_node = RankGroup(nodes, 1), RankGroup(1, per_node)
    gather = Exchange(group, weights.itemsize * numel)
    if formats.has_secondary_partition:
        moved = formats.bytes_between_nodes(part, weights)
        encoded = weights.itemsize * numel + moved
        # Each gather reads a copy in host memory, and what arrived is written back once per step.
        in_host = unit.copy_bytes(config, weights) if config.offloads("copies") else 0
        hop = Exchange(between_nodes, moved, encoded=encoded, decoded=nodes * encoded, through_host=in_host)
        yield Collective("weights", hop, behind="forward")
        wire = formats.weights_within_node(part, weights)
        nbytes = nodes * (wire.nbytes if wire is not None else gather.nbytes)
        decoded = 0
        if config.weight_intra_bits is not None or formats.keeps_wires:
            # Read each wire of the node's ranks, write every element of the unit.
            decoded = per_node * nbytes + weights.itemsize * unit.gathered_numel
        gather = Exchange(within_node, nbytes, decoded=decoded, through_host=in_host)
        if config.weight_copies == "card":  # gathers decode, and send nothing
            yield Collective("weights", Exchange(within_node, nodes * moved, decoded=(per_node - 1) * hop.decoded))
            gather = replace(gather, group=RankGroup(1, 1))
    elif config.quantized_weights:
        nbytes = formats.weights(part, weights).nbytes
        encoded = weights.itemsize * numel + nbytes
        gather = Exchange(group, nbytes, encoded=encoded, decoded=group.size * encoded)
    # Layers are gathered for each pass; other units stay gathered between the two.
    yield Collective("weights", gather, (2 if unit.layer is not None else 1) * micro_batches if stage == 3 else 1)
    # Each reduction of a hop reads its errors and writes them back. A micro-batch writes sums, and the next reads them.
    error_within, error_between = unit.error_bytes(config) if config.offloads("errors") else (0, 0)
    sums = unit.sum_bytes(config) * (micro_batches - 1) if config.offloads("sums") and stage > 1 else 0
    reductions = micro_batches if stage > 1 else 1
    if not config.quantized_gradients:
        yield Collective("gradients", Exchange(group, gradients.itemsize * numel, ring_passes), reductions)
    elif per_node > 1:
        # Each rank sends a piece of N shards to each rank of its node, and adds up those that it receives.
        nbytes = nodes * formats.gradients_within_node(part, gradients).nbytes
        encoded = gradients.itemsize * unit.gathered_numel + per_node * nbytes
        decoded, in_host = per_node * nbytes + 2 * FP32 * nodes * numel, 2 * error_within
        hop = Exchange(within_node, nbytes, is_straight=True, encoded=encoded, decoded=decoded, through_host=in_host)
        yield Collective("gradients", hop, reductions)
    if config.quantized_gradients and nodes > 1:
        nbytes = formats.gradients_between_nodes(part, gradients).nbytes
        encoded, decoded = FP32 * nodes * numel + nodes * nbytes, nodes * nbytes + 2 * FP32 * numel
        in_host = 2 * (error_between + sums)
        hop = Exchange(between_nodes, nbytes, is_straight=True, encoded=encoded, decoded=decoded, through_host=in_host)
        yield Collective("gradients", hop, behind="backward")
    if replicas.size > 1:
        piece = math.ceil(gradients.itemsize * numel / replicas.size)
        yield Collective("gradients", Exchange(replicas, piece, passes=2))


def effective_zero_stage(settings: ResolvedSettings) -> int:
    """Return the ZeRO stage that ``--zero-stage`` becomes under the pipeline's schedule."""
    return sharding_stage(settings.zero.zero_stage, settings.distributed.pipeline_schedule)


def wire_dtypes(settings: ResolvedSettings) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of weights, in computing and on the wire, and of unquantized gradients on the wire."""
    policy = mixed_precision(settings.precision)
    return policy.param_dtype or torch.float32, policy.reduce_dtype or torch.float32


def rank_collectives(
    architecture: Architecture,
    settings: ResolvedSettings,
    grid: RankGrid,
    planned: PlannedModel,
    pipeline_rank: int,
    micro_batches: int,
    ring_passes: int,
) -> Iterator[Collective]:
    """Yield all collectives of a rank of this stage."""
    units, model, replicas = planned.units_per_rank[pipeline_rank], planned.whole, grid.group("replicas")
    # Equal layers have equal units.
    found = {u: [*unit_collectives(settings, u, micro_batches, ring_passes, replicas)] for u in set(units)}
    yield from itertools.chain.from_iterable(found[unit] for unit in units)
    if settings.optimizer.optimizer == "muon":
        yield from _muon_collectives(settings, units)
    with_experts, num_layers = sum(unit.has_experts for unit in units), count_layers(units)
    for has_experts, layers in ((True, with_experts), (False, num_layers - with_experts)):
        each_layer = layer_exchanges(architecture, settings, grid, model, num_layers, has_experts) if layers else ()
        for what, exchange, runs in each_layer:
            yield Collective(what, exchange, micro_batches * layers * runs)
    placement = pipeline_placement(settings.distributed, model)
    if placement is not None:  # hidden states from and to the stages next to it, and their gradients
        crossings = [pair for pair in itertools.pairwise(placement.ranks) if pair[0] != pair[1]]
        two_ranks = RankGroup(2, 1) if grid.group("pipeline").nodes > 1 else RankGroup(1, 2)
        distributed, (weights_dtype, _) = settings.distributed, wire_dtypes(settings)
        tokens = settings.training.micro_batch_size * settings.training.seq_length // distributed.context_parallel_size
        tokens //= distributed.tensor_model_parallel_size if distributed.sequence_parallel else 1
        hidden = Exchange(two_ranks, weights_dtype.itemsize * tokens * model.config.hidden_size, is_straight=True)
        yield Collective("hidden states", hidden, micro_batches * sum(pipeline_rank in pair for pair in crossings))


def _muon_collectives(settings: ResolvedSettings, units: list[PlannedUnit]) -> Iterator[Collective]:
    optimizer, nodes, per_node = settings.optimizer, units[0].group.nodes, units[0].group.ranks_per_node
    wire = MomentumWire(optimizer.muon_momentum_bits).format(hidden_matrices(units))
    whole = 1 / optimizer.muon_period if optimizer.muon_period else 0.0  # share of the steps with whole matrices
    encoded = FP32 * wire.numel + wire.nbytes
    gather = Exchange(RankGroup(nodes, 1), wire.nbytes, encoded=encoded, decoded=nodes * encoded)
    yield Collective("momentum", gather, whole)
    # Rows go to the owners, from all nodes if matrices are whole, and a node's rows come back.
    from_others = 1.0 if optimizer.muon_stale_rows else whole
    rows = torch.bfloat16.itemsize * wire.numel // per_node
    within_node = RankGroup(1, per_node)
    yield Collective("momentum", Exchange(within_node, nodes * rows, is_straight=True), from_others)
    yield Collective("momentum", Exchange(within_node, rows, is_straight=True), 2 - from_others)


def layer_exchanges(
    architecture: Architecture,
    settings: ResolvedSettings,
    grid: RankGrid,
    model: Transformer,
    num_layers: int,
    has_experts: bool,
) -> Iterator[tuple[str, Exchange, float]]:
    """Yield a layer's collectives of tensor, context and expert parallelism: what, which, and runs per micro-batch."""
    training, distributed, activation = settings.training, settings.distributed, settings.activation
    weights, _ = wire_dtypes(settings)
    tensor, context = grid.group("tensor"), grid.group("context")
    tokens = training.micro_batch_size * training.seq_length // context.size
    row_bytes = 0  # rows that experts compute for a rank's samples
    if has_experts:
        row_bytes = round(weights.itemsize * model.config.hidden_size * (expert_rows(settings, grid) / tensor.size))
    if tensor.size > 1:
        both = 2 + recomputed_blocks(activation, num_layers) / num_layers  # passes
        # All-reduces after attention and the MLP; with sequence parallelism, gathers and reduce-scatters.
        piece = weights.itemsize * tokens * model.config.hidden_size // tensor.size
        has_mlp = not has_experts or settings.model.shared_expert_size is not None
        yield "", Exchange(tensor, piece, passes=2), both * (1 + has_mlp)
        if has_experts:
            # Every rank has all tokens and runs its own experts' tokens; results and gradients are gathered.
            yield "", Exchange(tensor, row_bytes, is_straight=True), both
            if distributed.sequence_parallel:
                yield "", Exchange(tensor, piece), both
    if context.size > 1:
        # Keys and values are gathered, and their gradients are reduce-scattered.
        width = block_activations(architecture, settings, model).keys_and_values
        again = resent_share(activation, num_layers, "core_attn")
        yield "", Exchange(context, tokens * width), 2 + again
    group = grid.group("experts")
    if has_experts and group.size > 1:  # to the experts and back
        row = token_format(model.config.hidden_size, distributed.moe_token_bits, weights)
        rows = expert_rows(settings, grid) / tensor.size / group.size  # each rank sends its own experts' rows
        exchange = Exchange(group, math.ceil(rows * row.nbytes), is_straight=True)
        if distributed.moe_token_bits is not None:
            quantized = row_bytes + group.size * exchange.nbytes
            exchange = replace(exchange, encoded=quantized, decoded=quantized)
        yield "tokens", exchange, 2 * (2 + resent_share(activation, num_layers, "moe"))


def step_traffic(world_size: int, ranks: list[list[Collective]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that all ranks send between and within nodes, by what it is. ranks: one of each stage."""
    between, within = {"weights": 0.0, "gradients": 0.0}, {"weights": 0.0, "gradients": 0.0}
    for each in itertools.chain(*ranks):
        exchange, runs = each.exchange, each.runs * world_size / len(ranks) / each.exchange.group.size
        for sent, nbytes in ((between, exchange.sent_between_nodes), (within, exchange.sent_within_nodes)):
            if each.what and nbytes:
                sent[each.what] = sent.get(each.what, 0) + runs * nbytes
    return {what: round(sent) for what, sent in between.items()}, {what: round(sent) for what, sent in within.items()}


def island_piece_bytes(settings: ResolvedSettings, planned: PlannedModel) -> list[int]:
    """Return the bytes of a piece of the whole model, as a rank of each stage sends it to another island."""
    config, islands = settings.island, settings.distributed.islands
    return [island_format(config, island_pieces(units, islands)).nbytes for units in planned.units_per_rank]


def expert_rows(settings: ResolvedSettings, grid: RankGrid) -> float:
    """Return the tokens of a micro-batch that one rank's samples send to experts, each counted once per expert.

    Assumes that routers spread them evenly; what ``parallel.experts`` counts depends on the data.
    """
    training, model = settings.training, settings.model
    tokens = training.micro_batch_size * training.seq_length / settings.distributed.context_parallel_size
    capacity = model.expert_capacity_factor or math.inf
    is_padded = capacity <= MOST_PADDING and grid.group("experts").nodes == 1
    return tokens * model.router_topk * (capacity if is_padded else min(1.0, capacity))


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


def block_activations(architecture: Architecture, settings: ResolvedSettings, model: Transformer) -> BlockActivations:
    """Return the bytes that a rank keeps of one block. Raises ValueError if the architecture does not say them."""
    if architecture.activations is None:
        raise ValueError(f"the architecture {architecture.name} does not say what memory its activations take")
    distributed, (weights, _) = settings.distributed, wire_dtypes(settings)
    block = architecture.activations(model.config, weights.itemsize).per_tensor_parallel_rank(
        distributed.tensor_model_parallel_size, distributed.sequence_parallel
    )
    return block.attending(settings.training.seq_length, distributed.context_parallel_size)
