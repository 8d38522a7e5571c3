"""The FSDP2 units of a run that is not started, as one of its ranks has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from torch import nn

from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.families import Architecture
from megatron_zpp.models.moe import active_parameters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.plans import split_dimensions
from megatron_zpp.parallel.stages import Placement, stage_has
from megatron_zpp.planning.needs.rank_groups import RankGrid, RankGroup
from megatron_zpp.settings.groups import DistributedSettings
from megatron_zpp.zeropp.config import ZeroPPConfig
from megatron_zpp.zeropp.fsdp.formats import Formats
from megatron_zpp.zeropp.fsdp.unit import UnitPart
from megatron_zpp.zeropp.wire.layout import ParameterShard, rows_per_rank

Shards = tuple[ParameterShard, ...]
_whole = lru_cache(maxsize=4096)(UnitPart.whole)  # equal layers share their formats


@dataclass(frozen=True)
class PlannedUnit:
    """One FSDP2 unit as each of its ranks has it."""

    shards: Shards
    group: RankGroup  # that shares it
    layer: int | None  # which one it is of, or its experts
    has_experts: bool = False

    @cached_property
    def part(self) -> UnitPart:
        """All parameters, as ``zeropp`` knows them."""
        return _whole(self.shards)

    @property
    def numel(self) -> int:
        """Elements of a rank's shard."""
        return self.part.numel

    def formats(self, config: ZeroPPConfig) -> Formats:
        """Return the wire formats of the unit's hops."""
        return Formats(config, self.group.nodes)

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

    @cached_property  # which a planner asks for every setting
    def parameters(self) -> int:
        return sum(p.numel() for p in self.whole.parameters())

    @cached_property
    def active_parameters(self) -> int:
        """That a token meets."""
        return active_parameters(self.whole)


def plan_model(architecture: Architecture, model: Transformer, grid: RankGrid) -> PlannedModel:
    """Divide ``model`` as the trainer would."""
    distributed, split = grid.distributed, dict[nn.Parameter, int]()
    if distributed.tensor_model_parallel_size > 1:
        assert architecture.tensor_parallel_plan is not None  # by parse_settings
        split = split_dimensions(model, architecture.tensor_parallel_plan(model.config, distributed.sequence_parallel))
    plan = partial(plan_units, model, grid, split)
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
    grid: RankGrid,
    split: Mapping[nn.Parameter, int],
    has: Callable[[str], bool] = lambda _: True,
) -> list[PlannedUnit]:
    """As ``units_of``; with expert parallelism a layer's experts are a unit of fewer ranks, each with some of them.

    split: the dimension of each parameter that tensor-parallel ranks divide; they divide experts, too.
    """
    tensor_parallel, expert_parallel = grid.tensor_parallel.size, grid.expert_parallel.size
    num_layers, group = sum(has(f"layers.{i}") for i in range(len(model.layers))), grid.sharding

    def part(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if _is_of_experts(name):
            return _part(parameter, 0, tensor_parallel * expert_parallel)
        return _part(parameter, split[parameter], tensor_parallel) if parameter in split else parameter

    planned = []
    for i, whole in enumerate(units_of(model, has)):
        layer = i if i < num_layers else None
        unit = [(name, part(name, p)) for name, p in whole]
        experts = [(name, p) for name, p in unit if _is_of_experts(name)]
        if experts and expert_parallel > 1:
            rest, same = [(name, p) for name, p in unit if not _is_of_experts(name)], grid.expert_sharding
            planned.append(PlannedUnit(shards_of(rest, group.size), group, layer))
            planned.append(PlannedUnit(shards_of(experts, same.size), same, layer, has_experts=True))
        else:
            planned.append(PlannedUnit(shards_of(unit, group.size), group, layer, has_experts=bool(experts)))
    return planned


def _is_of_experts(name: str) -> bool:
    return ".experts." in name


def _part(parameter: nn.Parameter, dimension: int, ranks: int) -> nn.Parameter:
    """The first rank's, which is the largest."""
    return nn.Parameter(parameter.chunk(ranks, dimension)[0], requires_grad=parameter.requires_grad)


def pieces_of(units: list[PlannedUnit], islands: int) -> Shards:
    """A rank's part of the model as a piece for each island; where rows do not divide, a little more than it is."""
    return tuple(replace(shard, numel=rows_per_rank(shard.numel, islands)) for unit in units for shard in unit.shards)


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
