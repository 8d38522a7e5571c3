"""What travels because a layer's experts are divided among ranks, in a run that is not started.

Routers are taken to spread tokens evenly over experts; what ``parallel.experts`` counts depends on the data.
"""

from __future__ import annotations

import math

from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.experts import token_format
from megatron_zpp.planning.needs.exchanges import Exchange, travelling_dtypes
from megatron_zpp.planning.needs.planned_units import PlannedModel, num_layers_of
from megatron_zpp.planning.needs.rank_groups import RankGrid
from megatron_zpp.planning.needs.rank_memory import recomputed_blocks
from megatron_zpp.settings.groups import ActivationSettings
from megatron_zpp.settings.resolved import ResolvedSettings


def rows_of_experts(settings: ResolvedSettings) -> float:
    """Tokens of a micro-batch that one rank's samples send to experts, each as often as it has experts."""
    training, model = settings.training, settings.model
    tokens = training.micro_batch_size * training.seq_length / settings.distributed.context_parallel_size
    return tokens * model.moe_router_topk * min(1.0, model.moe_expert_capacity_factor or math.inf)


def tokens_to_experts(settings: ResolvedSettings, grid: RankGrid, model: Transformer) -> Exchange | None:
    """One all-to-all of a layer and micro-batch, to the experts or back; None: a rank's tokens stay with it.

    Of tensor-parallel ranks, which have the same tokens, each sends those of its experts.
    """
    group = grid.expert_parallel
    if settings.model.num_experts is None or group.size == 1:
        return None
    weights, _ = travelling_dtypes(settings)
    row = token_format(model.config.hidden_size, settings.distributed.moe_token_bits, weights)
    rows = rows_of_experts(settings) / grid.tensor_parallel.size / group.size
    return Exchange(group, math.ceil(rows * row.nbytes), is_straight=True)


def passes_again(activation: ActivationSettings, num_layers: int) -> float:
    """How often a backward pass sends a layer's tokens as the forward pass did, which it computes again."""
    if activation.recompute_granularity == "selective":
        return 1.0  # it keeps the results of linear layers, but not of experts
    return recomputed_blocks(activation, num_layers) / num_layers


def sent_of_tokens(
    settings: ResolvedSettings, grid: RankGrid, planned: PlannedModel, micro_batches: int
) -> tuple[int, int]:
    """Bytes that all ranks send between and within nodes in one step: to experts and back, in both passes."""
    exchange = tokens_to_experts(settings, grid, planned.whole)
    if exchange is None:
        return 0, 0
    stages = planned.units_of_ranks
    times = sum(
        2 * (2 + passes_again(settings.activation, num_layers_of(units))) * sum(unit.has_experts for unit in units)
        for units in stages
    )
    times *= micro_batches * grid.world_size / len(stages) / exchange.group.size  # groups of ranks of a stage
    return round(times * exchange.sent_between_nodes), round(times * exchange.sent_within_nodes)
