"""Split a model into pipeline stages: consecutive layers, embeddings with the first, the loss with the last."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_zpp.models.transformer import Transformer


@dataclass(frozen=True)
class StageModules:
    """Which modules of a model, beside its layers, belong to the first and the last stage. All by name."""

    first: tuple[str, ...]
    last: tuple[str, ...]
    tied: str | None = None  # a module of the first stage whose ``weight`` the last one uses too, as a copy


@dataclass(frozen=True)
class Placement:
    """Which layers a stage has, and which pipeline rank has the stage."""

    layers: tuple[range, ...]  # one range per stage, in order
    ranks: tuple[int, ...]  # one rank per stage

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]


def place_stages(
    num_layers: int,
    num_ranks: int,
    layers_per_stage: int | None = None,
    first_rank_layers: int | None = None,
    last_rank_layers: int | None = None,
    v_shaped: bool = False,
    fewer_at_ends: tuple[bool, bool] = (False, False),
) -> Placement:
    """Divide ``num_layers`` among ``num_ranks`` pipeline ranks, evenly except for the given first and last ranks.

    ``layers_per_stage`` makes virtual stages, several on a rank: stage s is on rank s modulo ranks, or with
    ``v_shaped`` two on a rank, in order and in reverse. ``fewer_at_ends``: the first stage, and the last one, has one
    layer less than its share. Raises ValueError for what does not divide.
    """
    num_layers += sum(fewer_at_ends)
    if layers_per_stage is None:
        sizes = _layers_of_ranks(num_layers, num_ranks, first_rank_layers, last_rank_layers)
    elif num_layers % (layers_per_stage * num_ranks):
        product = f"{layers_per_stage} layers per stage * {num_ranks} pipeline ranks"
        raise ValueError(f"{num_layers} layers are not divisible by {product}")
    else:
        sizes = [layers_per_stage] * (num_layers // layers_per_stage)
    for end, has_fewer in zip((0, -1), fewer_at_ends, strict=True):
        sizes[end] -= has_fewer
    if min(sizes) < 1:
        raise ValueError(f"a stage has no layer: {num_layers} layers, with what counts as one, in {len(sizes)} stages")
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    ranks = [stage % num_ranks for stage in range(len(sizes))]
    if v_shaped:
        ranks = [*range(num_ranks), *reversed(range(num_ranks))]
        assert len(ranks) == len(sizes)
    return Placement(tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True)), tuple(ranks))


def _layers_of_ranks(num_layers: int, num_ranks: int, first: int | None, last: int | None) -> list[int]:
    rest = num_layers - (first or 0) - (last or 0)
    others = num_ranks - (first is not None) - (last is not None)
    if rest < others or (rest % others if others else rest):
        raise ValueError(
            f"{rest} layers are not divisible by {others} pipeline ranks"
            if others
            else f"{num_layers} layers are not the sum of the layers on the first and the last pipeline rank"
        )
    middle = [rest // others] * others if others else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def stage_has(name: str, modules: StageModules, placement: Placement, stage: int) -> bool:
    """Return whether a stage has the module, or parameter, of this name in the whole model."""
    top, _, rest = name.partition(".")
    is_last = stage == placement.num_stages - 1
    if top == "layers" and rest:
        return int(rest.partition(".")[0]) in placement.layers[stage]
    if top in modules.first:
        return stage == 0 or (is_last and top == modules.tied)
    return is_last or top not in modules.last


def keep_stage(model: Transformer, modules: StageModules, placement: Placement, stage: int) -> None:
    """Remove from ``model``, still on the meta device, what belongs to other stages; what stays keeps its name."""
    for layer in range(model.config.num_layers):
        if not stage_has(f"layers.{layer}", modules, placement, stage):
            delattr(model.layers, str(layer))
    for name in [name for name, _ in model.named_children()]:
        if not stage_has(name, modules, placement, stage):
            delattr(model, name)


def join_stages(model: Transformer, stages: Mapping[int, Transformer]) -> Transformer:
    """Turn ``model``, another of the kind, into a view of a rank's stages, with their parameters; it cannot run."""
    for layer in [*model.layers._modules]:
        delattr(model.layers, layer)
    for name in [name for name in model._modules if name != "layers"]:
        delattr(model, name)
    for stage in stages.values():
        for layer in stage.layers._modules:
            model.layers.add_module(layer, stage.layers.get_submodule(layer))
        for name, child in stage.named_children():
            if name != "layers":
                model.add_module(name, child)
    return model


# The cost of a pipeline's schedule, by formula: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
# Clusters Using Megatron-LM", 2021, section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.


def micro_batches_kept(schedule: str, placement: Placement, rank: int, micro_batches: int) -> float:
    """Return the most micro-batches whose activations a pipeline rank keeps at once, for all its layers."""
    ranks = max(placement.ranks) + 1
    stages = placement.num_stages // ranks
    if schedule == "gpipe":
        return micro_batches
    if schedule == "zbv":
        return min(micro_batches, ranks)
    if schedule == "1f1b":
        return min(micro_batches, ranks - rank)
    # Forward passes of stages before the first backward pass, as Interleaved1F1B has them.
    return min(micro_batches, (2 * (ranks - rank - 1) + (stages - 1) * ranks + 1) / stages)


def idle_micro_batches(schedule: str, placement: Placement) -> float:
    """Return how long each rank is idle in a step, in units of one micro-batch's time on its stages."""
    ranks = max(placement.ranks) + 1
    stages = placement.num_stages // ranks
    if schedule in ("gpipe", "1f1b"):
        return ranks - 1
    if schedule == "interleaved":
        return (ranks - 1) / stages
    # Backward passes in two parts of about a forward pass each fill two thirds of it.
    return (ranks - 1) / (3 * stages)
