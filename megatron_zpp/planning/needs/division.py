"""How a planned run divides its ranks into groups, and its model into FSDP2 units."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Literal

import torch
from torch import nn

from megatron_zpp.arguments.resolve_parallel import placement_of
from megatron_zpp.families import Architecture
from megatron_zpp.models.moe import active_parameters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.mesh import ranks_per_model_copy
from megatron_zpp.parallel.plans import split_dimensions
from megatron_zpp.parallel.stages import Placement, stage_has
from megatron_zpp.settings.groups import DistributedSettings
from megatron_zpp.zeropp.config import ZeroPPConfig
from megatron_zpp.zeropp.fsdp.formats import Formats, UnitPart
from megatron_zpp.zeropp.reduce.loco import error_format
from megatron_zpp.zeropp.wire.layout import ParameterShard, rows_per_rank

Kind = Literal["tensor", "context", "pipeline", "averaging", "sharding", "replicas", "experts", "expert sharding"]
Shards = tuple[ParameterShard, ...]
_whole = lru_cache(maxsize=4096)(UnitPart.whole)  # equal layers share their formats


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share something: ``ranks_per_node`` on each of ``nodes``."""

    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class RankGrid:
    """How a run divides the ranks of its nodes, ordered as ``parallel.mesh.AXES``."""

    nodes: int
    ranks_per_node: int
    distributed: DistributedSettings

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def group(self, kind: Kind) -> RankGroup:
        """Return the shape of groups of this kind. Raises ValueError if nodes would have different parts of them."""
        distributed, ranks = self.distributed, self.world_size // self.distributed.islands
        tensor, context = distributed.tensor_model_parallel_size, distributed.context_parallel_size
        pipeline, experts = distributed.pipeline_model_parallel_size, distributed.expert_model_parallel_size
        replicas = distributed.num_distributed_optimizer_instances
        averaging = context * (ranks // ranks_per_model_copy(distributed))
        sharding = averaging // replicas
        size, stride = {
            "tensor": (tensor, 1),
            "context": (context, tensor),
            "pipeline": (pipeline, ranks // pipeline),  # one rank of each stage
            "averaging": (averaging, tensor),  # average gradients: have other samples, or other parts of samples
            "sharding": (sharding, tensor),  # share one model's shards; HSDP makes several such groups
            "replicas": (replicas, sharding * tensor),  # have the same shard, one of each HSDP replica
            "experts": (experts, tensor),  # divide a layer's experts
            "expert sharding": (sharding // experts, experts * tensor),  # "sharding" ranks with the same experts
        }[kind]
        span, per_node = size * stride, self.ranks_per_node
        if size == 1:
            return RankGroup(1, 1)
        if per_node % span == 0:
            return RankGroup(1, size)
        if stride % per_node == 0:
            return RankGroup(size, 1)
        if span % per_node == 0 and per_node % stride == 0:
            return RankGroup(span // per_node, per_node // stride)
        apart = f"groups of {size} ranks, each {stride} after the one before, do not lie evenly on nodes of {per_node}"
        raise ValueError(f"{apart}: choose parallel sizes that divide a node's ranks, or are multiples of them")


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

    def copy_bytes(self, config: ZeroPPConfig, dtype: torch.dtype) -> int:
        """Return the bytes of the copies that a rank keeps of what other nodes sent: N shards, or all W."""
        shards = self.group.size if config.weight_copies == "card" else self.group.nodes
        return shards * self.formats(config).secondary_bytes(self.part, dtype)

    def sum_bytes(self, config: ZeroPPConfig) -> int:
        """Return the bytes of a node's sums of gradients, as a rank keeps them."""
        if config.gradient_sum_dtype == "int8":
            return self.group.nodes * self.formats(config).node_sum(self.part).nbytes
        return self.group.nodes * {"fp32": 4, "bf16": 2}[config.gradient_sum_dtype] * self.numel

    def error_bytes(self, config: ZeroPPConfig) -> tuple[int, int]:
        """Return the bytes of LoCo's errors of the hops within and between nodes: of all pieces, also the kept one."""
        if (loco := config.loco) is None:
            return 0, 0
        piece = error_format(loco, self.part.parameters, config.gradient_block_size).nbytes
        is_corrected = loco.hops == "both" and self.group.ranks_per_node > 1
        return self.group.size * piece * is_corrected, self.group.nodes * piece * (self.group.nodes > 1)

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
    model: Transformer, grid: RankGrid, split: Mapping[nn.Parameter, int], has: Callable[[str], bool] = lambda _: True
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
        parts = [(unit, group, bool(experts))]
        if experts and expert_parallel > 1:
            rest = [(name, p) for name, p in unit if ".experts." not in name]
            parts = [(rest, group, False), (experts, grid.group("expert sharding"), True)]
        planned += [
            PlannedUnit(shards_of(some, ranks.size), ranks, layer, is_expert) for some, ranks, is_expert in parts
        ]
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
