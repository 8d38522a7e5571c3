"""The FSDP2 units of a planned run, as one of its ranks has them."""

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
    group: RankGroup  # the ranks that share it
    layer: int | None  # number of the layer, or of its experts' layer
    has_experts: bool = False

    @cached_property
    def part(self) -> UnitPart:
        """All parameters, as ``zeropp`` knows them."""
        return _whole(self.shards)

    @property
    def numel(self) -> int:
        """Elements of a rank's shard."""
        return self.part.numel

    @property
    def gathered_numel(self) -> int:
        """Elements of the whole unit, as a rank gathers it."""
        return self.group.size * self.numel

    def formats(self, config: ZeroPPConfig) -> Formats:
        return Formats(config, self.group.nodes)

    def is_hidden_matrix(self, shard: ParameterShard) -> bool:
        """Return whether Muon takes this parameter of the unit."""
        return shard.quantizable and self.layer is not None


def hidden_matrices(units: list[PlannedUnit]) -> list[ParameterShard]:
    """Return the shards of the parameters that Muon takes."""
    return [shard for unit in units for shard in unit.shards if unit.is_hidden_matrix(shard)]


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A model on the meta device, and what a rank of each pipeline stage has of it."""

    whole: Transformer
    units_per_rank: list[list[PlannedUnit]]  # as ``units_of`` orders them, one stage of a rank after the other

    @cached_property  # shared by all settings of a plan
    def parameters(self) -> int:
        return sum(p.numel() for p in self.whole.parameters())

    @cached_property
    def active_parameters(self) -> int:
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
    modules, units_per_rank = architecture.stages(model.config), []
    for rank in range(distributed.pipeline_model_parallel_size):
        units: list[PlannedUnit] = []
        for stage in placement.stages_of(rank):
            more = plan(has=partial(stage_has, modules=modules, placement=placement, stage=stage))
            before = count_layers(units)
            units += [unit if unit.layer is None else replace(unit, layer=before + unit.layer) for unit in more]
        units_per_rank.append(units)
    return PlannedModel(model, units_per_rank)


def pipeline_placement(distributed: DistributedSettings, model: Transformer) -> Placement | None:
    """Return which rank has which stage; None without a pipeline."""
    if distributed.pipeline_model_parallel_size == 1:
        return None
    return placement_of(distributed, model.config.num_layers)


def count_layers(units: list[PlannedUnit]) -> int:
    return len({unit.layer for unit in units} - {None})


def units_of(model: Transformer, has: Callable[[str], bool] = lambda _: True) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the parameters of each FSDP2 unit as the trainer makes them: each layer, then the others, the root last.

    Names are relative to the unit, so that equal layers make equal shards. has: whether the stage has this module.
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
    """Plan the units of ``units_of``; with expert parallelism a layer's experts are another unit, of fewer ranks.

    split: the dimension of each parameter that tensor-parallel ranks divide; they divide experts, too.
    """
    tensor_parallel, expert_parallel = grid.group("tensor").size, grid.group("experts").size
    num_layers, group = sum(has(f"layers.{i}") for i in range(len(model.layers))), grid.group("sharding")

    def part(name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return the first rank's part, which is the largest."""
        dimension, ranks = split.get(parameter, 0), tensor_parallel if parameter in split else 1
        if ".experts." in name:
            dimension, ranks = 0, tensor_parallel * expert_parallel
        return nn.Parameter(parameter.chunk(ranks, dimension)[0], requires_grad=parameter.requires_grad)

    planned = []
    for i, parameters in enumerate(units_of(model, has)):
        layer = i if i < num_layers else None
        unit = [(name, part(name, p)) for name, p in parameters]
        experts = [(name, p) for name, p in unit if ".experts." in name]
        if experts and expert_parallel > 1:
            rest = [(name, p) for name, p in unit if ".experts." not in name]
            planned.append(PlannedUnit(shards_of(rest, group.size), group, layer))
            shards = shards_of(experts, grid.group("expert sharding").size)
            planned.append(PlannedUnit(shards, grid.group("expert sharding"), layer, has_experts=True))
        else:
            planned.append(PlannedUnit(shards_of(unit, group.size), group, layer, has_experts=bool(experts)))
    return planned


def island_pieces(units: list[PlannedUnit], islands: int) -> Shards:
    """Return one of the ``islands`` pieces of a rank's shards; a little too large if rows do not divide evenly."""
    return tuple(replace(shard, numel=rows_per_rank(shard.numel, islands)) for unit in units for shard in unit.shards)


def shards_of(parameters: list[tuple[str, nn.Parameter]], world_size: int) -> Shards:
    """Return one rank's shards as FSDP2 splits them: rows, padded to the same number on every rank."""
    return tuple(
        ParameterShard(name, rows_per_rank(p.shape[0], world_size) * math.prod(p.shape[1:]), quantizable=p.dim() >= 2)
        for name, p in parameters
    )
