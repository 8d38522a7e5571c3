"""Decide which parts of a checkpoint a run loads: some fit only the ranks and settings that saved them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from megatron_zpp.parallel.mesh import AXES
from megatron_zpp.zeropp import ZeroPPConfig, ZeroPPInterface

from .trained import Trained


@dataclasses.dataclass(frozen=True)
class ResumePlan:
    """What a run loads beside parameters. ``notes`` names whatever the run could have used and does not load."""

    notes: tuple[str, ...]
    optimizers: tuple[bool, ...]  # of each island that saved; False also where it had made no step
    random_states: bool
    zeropp: bool
    islands: bool  # each its own parameters and optimizer; or all begin with the first model that is loaded
    island_wires: bool  # LoCo's errors between islands, and what is on its way


def plan_resume(
    meta: Mapping[str, Any], trained: Trained, layout: Mapping[str, int | str], load_rng: bool, has_zeropp_state: bool
) -> ResumePlan:
    """Plan the load of a checkpoint with this ``meta`` by a run on the ranks of ``layout``."""
    notes: list[str] = []
    there = dict.fromkeys(AXES, 1) | meta.get("layout", {})  # newer axes: one rank
    same_layout, trains = "layout" in meta and there == layout, bool(trained.optimizers)
    stepped = meta.get("optimizers_have_stepped", [True] * there["island"])
    optimizers = tuple(trains and has_stepped for has_stepped in stepped)

    random_states = load_rng and meta["has_rng"]
    if random_states and not same_layout:
        others = f"{meta['world_size']} ranks saved, {trained.world_size} load"
        otherwise = ", divided otherwise" if meta["world_size"] == trained.world_size else ""
        notes.append(f"random states start over: {others}{otherwise}")
        random_states = False

    zeropp = trains and has_zeropp_state
    if zeropp and (not same_layout or _comparable(meta["zeropp"]) != _comparable(zeropp_layout(trained.zeropps))):
        kept = "LoCo's errors, scales of elements and weight copies"
        notes.append(f"{kept} start over: saved with other ranks, nodes or ZeRO++ settings")
        zeropp = False

    islands = trained.islands
    could_leave = meta["settings"].get("islands_may_leave", False)
    may_leave = islands is not None and islands.is_elastic
    same_islands = could_leave if may_leave else islands is not None and there["island"] == islands.num_islands
    islands_go_on = same_islands and trains
    if islands is not None and not islands_go_on and trains:
        notes.append(f"islands start over from the checkpoint's parameters: {there['island']} islands saved")
    if there["island"] > 1 and not islands_go_on and trains:
        notes.append("the optimizer's state is that of the first island that saved")
    # Errors, and what is on its way, belong to ranks and to a wire.
    same_wire = islands is not None and _wire_settings(meta.get("islands")) == _wire_settings(
        dataclasses.asdict(islands.config)
    )
    island_wires = islands_go_on and (may_leave or (same_layout and same_wire))
    if islands_go_on and not island_wires:
        notes.append(
            "LoCo's errors between islands start over, and what was on its way is dropped: saved with other ranks or "
            "settings"
        )
    return ResumePlan(tuple(notes), optimizers, random_states, zeropp, islands_go_on, island_wires)


def zeropp_layout(zeropps: Sequence[ZeroPPInterface]) -> dict[str, Any] | None:
    """Return what must be the same for ranks to load their ZeRO++ state. It is the same in all islands."""
    if not zeropps:
        return None
    zeropp = zeropps[0]
    # Nodes and ranks per node, of each division that units have.
    topology = list(chain.from_iterable(dict.fromkeys((t.num_nodes, t.ranks_per_node) for t in zeropp.topologies)))
    return {"topology": topology, "config": dataclasses.asdict(zeropp.config)}


def _comparable(zeropp_layout: dict[str, Any] | None) -> Any:
    """Return a layout as JSON saves it; settings that are newer than the checkpoint get their defaults."""
    config = (zeropp_layout or {}).get("config")
    if zeropp_layout is None or not isinstance(config, dict):
        return zeropp_layout
    config = dataclasses.asdict(ZeroPPConfig()) | config
    # None of these changes what the saved state means.
    stateless = {"seed", "gradient_bits_warmup"}
    # Settings that are gone, where they were left out.
    stateless |= {
        name
        for name, value in config.items()
        if name.startswith("weight_difference") and not config["weight_difference_bits"]
    }
    config = {name: value for name, value in config.items() if name not in stateless}
    if isinstance(loco := config["loco"], dict):
        config["loco"] = {name: value for name, value in loco.items() if name != "exact_undo"}
    return json.loads(json.dumps(zeropp_layout | {"config": config}))


def _wire_settings(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of islands on which their saved errors and transfers depend."""
    free = {"outer_optimizer", "outer_lr", "outer_momentum", "loco_beta", "merge_alpha", "offload"}
    return {name: value for name, value in (config or {}).items() if name not in free}
