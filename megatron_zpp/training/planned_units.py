"""The FSDP2 units of a run that is not started, as one of its ranks has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from megatron_zpp.architectures import Architecture
from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.plans import split_dimensions
from megatron_zpp.parallel.stages import Placement, stage_has
from megatron_zpp.settings.groups import DistributedSettings
from megatron_zpp.training.rank_groups import RankGrid, RankGroup
from megatron_zpp.zeropp.wire_layout import ParameterShard, rows_per_rank

Shards = tuple[ParameterShard, ...]


@dataclass(frozen=True)
class PlannedUnit:
    """One FSDP2 unit as each of its ranks has it."""

    shards: Shards
    group: RankGroup  # that shares it
    layer: int | None  # which one it is of, or its experts

    @property
    def numel(self) -> int:
        """Of a rank's shard."""
        return sum(shard.numel for shard in self.shards)

    def is_hidden_matrix(self, part: ParameterShard) -> bool:
        """Whether a parameter of the unit is one that Muon takes."""
        return part.quantizable and self.layer is not None

    @property
    def gathered(self) -> int:
        """Elements of the whole, as a rank gathers it."""
        return self.group.size * self.numel


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A model on the meta device, and what a rank of each pipeline stage has of it."""

    whole: Transformer
    units_of_ranks: list[list[PlannedUnit]]  # in the order of ``units_of``, one stage of a rank after the other


def plan_model(architecture: Architecture, model: Transformer, grid: RankGrid) -> PlannedModel:
    """Divide ``model`` as the trainer would."""
    distributed, split = grid.distributed, dict[nn.Parameter, int]()
    if distributed.tensor_model_parallel_size > 1:
        assert architecture.tensor_parallel_plan is not None  # by parse_settings
        split = split_dimensions(model, architecture.tensor_parallel_plan(model.config, distributed.sequence_parallel))
    plan = partial(
        plan_units,
        model,
        grid.sharding,
        distributed.expert_model_parallel_size,
        distributed.tensor_model_parallel_size,
        split,
    )
    placement = pipeline_placement(distributed, model)
    if placement is None:
        return PlannedModel(model, [plan()])
    assert architecture.stages is not None  # by parse_settings
    modules, units_of_ranks = architecture.stages(model.config), []
    for rank in range(distributed.pipeline_model_parallel_size):
        units: list[PlannedUnit] = []
        for stage in placement.stages_of(rank):
            more = plan(has=partial(stage_has, modules=modules, placement=placement, stage=stage))
            before = num_layers_of(units)
            units += [unit if unit.layer is None else replace(unit, layer=before + unit.layer) for unit in more]
        units_of_ranks.append(units)
    return PlannedModel(model, units_of_ranks)


def pipeline_placement(distributed: DistributedSettings, model: Transformer) -> Placement | None:
    """None: there is no pipeline."""
    if distributed.pipeline_model_parallel_size == 1:
        return None
    return placement_of(distributed, model.config.num_layers)


def num_layers_of(units: list[PlannedUnit]) -> int:
    return len({unit.layer for unit in units} - {None})


def units_of(model: Transformer, has: Callable[[str], bool] = lambda _: True) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of each FSDP2 unit as the trainer makes them: each layer, then the others, the root last.

    Names are those within the unit, so that equal layers make equal shards.

    has: of a pipeline's stage, whether it has the module or parameter of this name.
    """
    modules = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    modules |= {name: model.get_submodule(name) for name in model.ends if hasattr(model, name)}
    elsewhere = {id(p) for module in modules.values() for p in module.parameters()}
    units = [list(module.named_parameters()) for name, module in modules.items() if has(name)]
    return [*units, [(name, p) for name, p in model.named_parameters() if id(p) not in elsewhere and has(name)]]


def plan_units(
    model: Transformer,
    group: RankGroup,
    expert_parallel: int = 1,
    tensor_parallel: int = 1,
    split: Mapping[nn.Parameter, int] | None = None,
    has: Callable[[str], bool] = lambda _: True,
) -> list[PlannedUnit]:
    """As ``units_of``; with expert parallelism a layer's experts are a unit of fewer ranks, each with some of them.

    group: the ranks that share one model. split: the dimension of each parameter that tensor-parallel ranks divide.
    """
    num_layers, split = sum(has(f"layers.{i}") for i in range(len(model.layers))), split or {}
    planned = []
    for i, whole in enumerate(units_of(model, has)):
        layer = i if i < num_layers else None
        unit = [(name, _part(p, split[p], tensor_parallel) if p in split else p) for name, p in whole]
        experts = [(name, p) for name, p in unit if ".experts." in name] if expert_parallel > 1 else []
        of_experts = {id(p) for _, p in experts}
        rest = [(name, p) for name, p in unit if id(p) not in of_experts]
        planned.append(PlannedUnit(shards_of(rest, group.size), group, layer))
        if experts:
            mine = [(name, _part(p, 0, expert_parallel)) for name, p in experts]
            same = group.every(expert_parallel)
            planned.append(PlannedUnit(shards_of(mine, same.size), same, layer))
    return planned


def _part(parameter: nn.Parameter, dimension: int, ranks: int) -> nn.Parameter:
    """The first rank's, which is the largest."""
    return nn.Parameter(parameter.chunk(ranks, dimension)[0], requires_grad=parameter.requires_grad)


def shards_of(parameters: list[tuple[str, nn.Parameter]], world_size: int) -> Shards:
    """One rank's shards as FSDP2 splits them: rows, padded to the same number on every rank."""
    return tuple(
        ParameterShard(
            name,
            numel=rows_per_rank(p.shape[0], world_size) * math.prod(p.shape[1:]),
            quantizable=p.dim() >= 2,
        )
        for name, p in parameters
    )
