"""``--zeropp NAME``: the settings that a recipe of ``megatron_zpp.zeropp.recipes`` stands for in a run."""

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from typing import Any

from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.optim.schedule import Schedule
from megatron_zpp.settings.checks import flag_of, require
from megatron_zpp.settings.flags import flat_values, iterate_flags
from megatron_zpp.settings.groups import Settings, all_flags
from megatron_zpp.zeropp.config import ZeroPPConfig
from megatron_zpp.zeropp.recipes import AUTO, RECIPES

_BESIDE_AUTO = ("zeropp_ranks_per_node", "zeropp_gradient_rounding")


def recipe_values(values: Mapping[str, Any], world_size: int, ranks_per_node: int | None) -> dict[str, Any]:
    """Return {setting: value} of the recipe that ``values`` name, but for what follows from the schedule.

    ranks_per_node: of all kinds of parallelism; None: as the launcher says. Raises SettingsError.
    """
    name = values.get("zeropp")
    if name == AUTO:
        chosen = [flag.name for flag in iterate_flags(ZeroPPConfig) if values.get(flag.setting) not in (None, False)]
        chosen = [flag for flag in chosen if flag not in map(flag_of, _BESIDE_AUTO)]
        require(not chosen, f"--zeropp auto chooses {', '.join(chosen)}: leave them out, or name a recipe")
    if name not in RECIPES:
        return {}
    needs_nodes = RECIPES[name].fields and values.get("zero_stage", 3) >= 1
    per_node = _data_parallel_ranks_of_node(values, world_size, ranks_per_node) if needs_nodes else 1
    return _changes(RECIPES[name].config(per_node, copies=values.get("zeropp_weight_copies", "node")))


def choice_of(values: Mapping[str, Any]) -> str:
    """Return what follows ``--zeropp`` in a command that repeats what auto chose for a run with these settings."""
    stage, copies = values.get("zero_stage", 3), values.get("zeropp_weight_copies", "node")
    offload = values.get("zeropp_offload", "none")
    return f"{values['zeropp']} --zero-stage={stage} --zeropp-weight-copies={copies} --zeropp-offload={offload}"


def _data_parallel_ranks_of_node(values: Mapping[str, Any], world_size: int, ranks_per_node: int | None) -> int:
    """Return how many ranks of a node share parameters. Raises SettingsError if nothing says it."""

    def size(name: str) -> int:
        return int(values.get(name) or 1)

    stated = values.get("zeropp_ranks_per_node") or values.get("zero_hpz_partition_size")
    if stated:
        return int(stated)
    launcher = os.environ.get("LOCAL_WORLD_SIZE")
    if "local_ranks" in values:
        ranks_per_node = size("local_ranks") // size("local_nodes")
    if ranks_per_node is None:
        ranks_per_node = int(launcher) if launcher is not None else 1
        unknown = "how many ranks has a node? The launcher does not set LOCAL_WORLD_SIZE: give --zeropp-ranks-per-node"
        require(launcher is not None or world_size == 1, f"--zeropp {values['zeropp']}: {unknown}")
    tensor, stages = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    sharing = world_size // (tensor * stages * size("islands"))
    return max(1, min(ranks_per_node // tensor, sharing))


def _changes(config: ZeroPPConfig) -> dict[str, Any]:
    defaults = flat_values(ZeroPPConfig())
    return {setting: value for setting, value in flat_values(config).items() if value != defaults[setting]}


def with_warmup(settings: Settings, given: Collection[str], dp_size: int) -> Settings:
    """Add the recipe's bits at first: as long as the learning rate warms up, or for a tenth of the run if it does not.

    settings: with their batches and length. A flag about it wins.
    """
    recipe = RECIPES.get(settings.zero.recipe or "")
    bits, config = recipe.warmup_bits if recipe is not None else None, settings.zeropp
    fewer = config.gradient_bits is not None and bits is not None and config.gradient_bits < bits
    if not fewer or "zeropp_gradient_bits_warmup" in given or settings.training.skip_train:
        return settings
    training: Any = settings.training
    batches = BatchSchedule.from_settings(training, dp_size)
    schedule = Schedule.from_settings(settings.optimizer, settings.schedule, training, batches)
    length = training.train_iters or batches.total_iterations(training.train_samples or 0)
    steps = batches.iterations_to_reach(math.ceil(schedule.warmup_samples)) or max(1, length // 10)
    return dataclasses.replace(settings, zeropp=dataclasses.replace(config, gradient_bits_warmup=f"{steps}:{bits}"))


def stands_for(settings: Settings) -> str | None:
    """Say which flags the recipe of a run stands for; None without one."""
    name = settings.zero.recipe
    if name is None or name == AUTO:
        return None
    flags = all_flags()
    typed = [flags[setting].typed(value) for setting, value in _changes(settings.zeropp).items()]
    return f"--zeropp {name} stands for {' '.join(typed) or 'no other flag'}"
