"""The model and optimizer that one process saves and loads, and which parts of a checkpoint a run can load."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.islands import OuterSync
from megatron_zpp.parallel.mesh import AXES
from megatron_zpp.zeropp import ZeroPP
from megatron_zpp.zeropp.description import settings_of_state


@dataclass(kw_only=True)
class Trained:
    """The parts of a training program that checkpoints keep as tensors."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    zeropp: ZeroPP | None = None  # None at ZeRO stage 0
    islands: OuterSync = field(default_factory=OuterSync)


@dataclass(frozen=True)
class ResumePlan:
    """Which parts of a checkpoint to load besides parameters. ``notes`` explains what is left out."""

    notes: tuple[str, ...]
    optimizer: bool
    random_states: bool
    zeropp: bool
    copy_number: int  # the copy of the model to go on from, where several trained apart


def plan_resume(
    meta: Mapping[str, Any],
    trained: Trained,
    layout: Mapping[str, int | str],
    *,
    trains: bool,
    load_rng: bool,
    has_zeropp_state: bool,
) -> ResumePlan:
    """Decide what a run on the ranks of ``layout`` loads from a checkpoint with this ``meta``.

    trains: go on with the optimizer's and ZeRO++'s state, not with parameters alone.
    """
    notes: list[str] = []
    saved_layout = dict.fromkeys(AXES, 1) | meta.get("layout", {})  # newer axes: one rank
    same_layout = "layout" in meta and saved_layout == layout

    random_states = load_rng and meta["has_rng"]
    if load_rng and not random_states:
        notes.append("random states start over: the checkpoint has none")
    if random_states and not same_layout:
        world_size = dist.get_world_size()
        others = f"{meta['world_size']} ranks saved, {world_size} load"
        otherwise = ", divided otherwise" if meta["world_size"] == world_size else ""
        notes.append(f"random states start over: {others}{otherwise}")
        random_states = False

    zeropp = trains and has_zeropp_state
    if zeropp and (not same_layout or meta["zeropp"] != zeropp_layout(trained.zeropp)):
        kept = "LoCo's errors, scales of elements and weight copies"
        notes.append(f"{kept} start over: saved with other ranks, nodes or ZeRO++ settings")
        zeropp = False

    more_notes, copy_number = trained.islands.plan_resume(meta, same_layout, trains)
    # An optimizer that had made no step has no state.
    optimizer = trains and meta.get("optimizers_have_stepped", [True])[copy_number]
    return ResumePlan((*notes, *more_notes), optimizer, random_states, zeropp, copy_number)


def zeropp_layout(zeropp: ZeroPP | None) -> dict[str, Any] | None:
    """Return what must be the same for ranks to load their ZeRO++ state."""
    if zeropp is None:
        return None
    # Nodes and ranks per node, for each division that units have.
    topology = list(chain.from_iterable(dict.fromkeys((t.num_nodes, t.ranks_per_node) for t in zeropp.topologies)))
    layout: dict[str, Any] = {"topology": topology, "config": settings_of_state(zeropp.config)}
    return cast(dict[str, Any], json.loads(json.dumps(layout)))  # as a checkpoint gives it back
