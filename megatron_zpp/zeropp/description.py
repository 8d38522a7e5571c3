"""What is said of a configuration on some ranks, to people and to checkpoints."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import kernels
from .config import ZeroPPConfig
from .quantization import mix_seed
from .topology import RankLayout
from .unit import Unit

logger = logging.getLogger(__name__)


def describe(config: ZeroPPConfig, layouts: Sequence[RankLayout]) -> str:
    """One line: the nodes and ranks, and how weights and gradients travel. A line for each group that units live on.

    layouts: of each unit.
    """
    num_units = Counter((layout.num_nodes, layout.ranks_per_node) for layout in layouts)
    lines = [_describe_group(config, *shape) for shape in num_units]
    if len(lines) > 1:
        lines = [f"{line} ({n} units)" for line, n in zip(lines, num_units.values(), strict=True)]
    return "\n".join(lines)


def _describe_group(config: ZeroPPConfig, num_nodes: int, ranks_per_node: int) -> str:
    hpz = config.hpz_partition_size > 1 and num_nodes > 1
    weights = f"int{config.weight_bits}" if config.quantized_weights else "unquantized"
    if hpz and config.weight_difference_bits is not None:
        weights = f"as int{config.weight_difference_bits} differences"
    weights += ", between nodes once per step" if hpz else ", at every gather"
    if config.quantized_gradients:
        hops = [f"int{bits}" if bits else "unquantized" for bits in (config.gradient_intra_bits, config.gradient_bits)]
        gradients = f"{hops[0]} within a node, {hops[1]} between nodes once per step"
        gradients += f" with LoCo (beta {config.loco.beta})" if config.loco is not None else ""
    else:
        gradients = "unquantized, at every micro-batch"
    stochastic = [name for name in ("weight", "gradient") if getattr(config, f"{name}_rounding") == "stochastic"]
    rounding = f"; {' and '.join(stochastic)} rounding stochastic, seed {config.seed}" if stochastic else ""
    return (
        f"{num_nodes} node{'s' if num_nodes > 1 else ''} of {ranks_per_node} ranks; "
        f"weights travel {weights}; gradients {gradients}{rounding}"
    )


def fingerprint(config: ZeroPPConfig, layouts: Sequence[RankLayout], units: Sequence[Unit]) -> int:
    """A number that tells one layout of a rank's state from another; ``layouts`` are those of the units."""
    shapes = [(layout.num_nodes, layout.ranks_per_node, layout.rank) for layout in layouts]
    shape = shapes[0] if len(set(shapes)) == 1 else shapes
    shards = [(unit.name, [(p.numel, p.quantizable) for p in unit.parameter_shards()]) for unit in units]
    # The seed of stochastic rounding changes what comes, not what is kept.
    return mix_seed(repr(replace(config, seed=0)), repr(shape), repr(shards))


def check_fingerprint(
    state: Mapping[str, Tensor], config: ZeroPPConfig, layouts: Sequence[RankLayout], units: Sequence[Unit]
) -> None:
    """Raise ValueError if a rank's saved ``state`` is of another layout."""
    if state and int(state["fingerprint"]) != fingerprint(config, layouts, units):
        raise ValueError(
            "this ZeRO++ state was saved with another model, other ranks and nodes, or another ZeroPPConfig: start "
            "without it, then LoCo's errors begin at zero and weights are sent in full"
        )


def warn(config: ZeroPPConfig, layouts: Sequence[RankLayout], device: torch.device) -> None:
    """Of settings without effect, and of slow quantization; on one rank, with the layouts of all units."""
    if config.quantized_weights or config.quantized_gradients:
        kernels.warn_if_missing(device)
    for world_size, num_nodes in sorted({(layout.world_size, layout.num_nodes) for layout in layouts}):
        where = f"{world_size} data-parallel ranks on one node"
        if world_size == 1:
            if config.enabled:
                logger.warning("ZeRO++ has no effect on one rank: there is nothing to gather or reduce")
        elif num_nodes == 1:
            if config.hpz_partition_size > 1:
                logger.warning("hpZ has no effect on %s: all gathers stay within it", where)
            if config.loco is not None and config.loco.hops == "inter":
                logger.warning("LoCo has no effect on %s: it corrects the hop between nodes", where)
