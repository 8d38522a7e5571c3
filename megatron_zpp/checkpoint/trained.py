"""The models and optimizers that one process saves and loads, and which parts of a checkpoint a run can load."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import nn

from megatron_zpp.islands import OuterSync
from megatron_zpp.parallel.mesh import AXES
from megatron_zpp.zeropp import Ranks, ZeroPPInterface, ranks_of
from megatron_zpp.zeropp.description import settings_of_state


@dataclass(frozen=True)
class Trained:
    """What this process trains: one model, or with emulated islands one for each."""

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]  # one per model; empty: neither saved nor loaded
    zeropps: Sequence[ZeroPPInterface]  # one per model; empty at ZeRO stage 0
    islands: OuterSync | None = None
    first_island: int = 0  # number of the first model's island

    @property
    def has_shared_checkpoint(self) -> bool:
        """Whether all islands save into one checkpoint. Elastic islands have folders of their own."""
        return self.islands is not None and not self.islands.is_elastic

    @property
    def ranks(self) -> list[Ranks]:
        """Return the ranks that this process computes for, of each model."""
        return [ranks_of(zeropp) for zeropp in self.zeropps] or [ranks_of(None)]

    @property
    def world_size(self) -> int:
        return sum(ranks.world_size for ranks in self.ranks)

    def named_models(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each model with the prefix of its tensors' names."""
        for island, model in enumerate(self.models, self.first_island):
            # An elastic island saves the outer parameters alone: it starts again with the others.
            yield f"island{island}.model." if self.has_shared_checkpoint else "model.", model

    def named_optimizers(self) -> Iterator[tuple[str, nn.Module, torch.optim.Optimizer]]:
        """Yield prefix, model and optimizer. The first has the plain prefix, so that a run without islands finds it."""
        pairs = zip(self.models, self.optimizers, strict=False)
        for island, (model, optimizer) in enumerate(pairs, self.first_island):
            prefix = f"island{island}.optimizer." if self.has_shared_checkpoint and island > 0 else "optimizer."
            yield prefix, model, optimizer

    def first(self) -> Trained:
        """Return the first model alone, as if there were no islands."""
        models, optimizers = self.models[:1], self.optimizers[:1]
        return dataclasses.replace(self, models=models, optimizers=optimizers, islands=None, first_island=0)


@dataclass(frozen=True)
class ResumePlan:
    """Which parts of a checkpoint to load besides parameters. ``notes`` explains what is left out."""

    notes: tuple[str, ...]
    optimizers: tuple[bool, ...]  # for each island that saved; False if it had made no step
    random_states: bool
    zeropp: bool
    islands: bool  # each its parameters and optimizer; else all start from the first model
    island_wires: bool  # LoCo's errors between islands, and transfers on their way


def plan_resume(
    meta: Mapping[str, Any], trained: Trained, layout: Mapping[str, int | str], load_rng: bool, has_zeropp_state: bool
) -> ResumePlan:
    """Decide what a run on the ranks of ``layout`` loads from a checkpoint with this ``meta``."""
    notes: list[str] = []
    saved_layout = dict.fromkeys(AXES, 1) | meta.get("layout", {})  # newer axes: one rank
    same_layout, trains = "layout" in meta and saved_layout == layout, bool(trained.optimizers)
    stepped = meta.get("optimizers_have_stepped", [True] * saved_layout["island"])
    optimizers = tuple(trains and has_stepped for has_stepped in stepped)

    random_states = load_rng and meta["has_rng"]
    if load_rng and not random_states:
        notes.append("random states start over: the checkpoint has none")
    if random_states and not same_layout:
        others = f"{meta['world_size']} ranks saved, {trained.world_size} load"
        otherwise = ", divided otherwise" if meta["world_size"] == trained.world_size else ""
        notes.append(f"random states start over: {others}{otherwise}")
        random_states = False

    zeropp = trains and has_zeropp_state
    if zeropp and (not same_layout or meta["zeropp"] != zeropp_layout(trained.zeropps)):
        kept = "LoCo's errors, scales of elements and weight copies"
        notes.append(f"{kept} start over: saved with other ranks, nodes or ZeRO++ settings")
        zeropp = False

    islands = trained.islands
    is_elastic = islands is not None and islands.is_elastic
    if is_elastic:
        same_islands = meta["settings"].get("islands_may_leave", False)
    else:
        same_islands = islands is not None and saved_layout["island"] == islands.num_islands
    islands_go_on = same_islands and trains
    if islands is not None and not islands_go_on and trains:
        notes.append(f"islands start over from the checkpoint's parameters: {saved_layout['island']} islands saved")
    if saved_layout["island"] > 1 and not islands_go_on and trains:
        notes.append("the optimizer's state is that of the first island that saved")
    # Errors and transfers belong to ranks and to a wire format.
    same_wire = islands is not None and _wire_settings(meta.get("islands")) == _wire_settings(
        dataclasses.asdict(islands.config)
    )
    island_wires = islands_go_on and (is_elastic or (same_layout and same_wire))
    if islands_go_on and not island_wires:
        what = "LoCo's errors between islands start over, and what was on its way is dropped"
        notes.append(f"{what}: saved with other ranks or settings")
    return ResumePlan(tuple(notes), optimizers, random_states, zeropp, islands_go_on, island_wires)


def zeropp_layout(zeropps: Sequence[ZeroPPInterface]) -> dict[str, Any] | None:
    """Return what must be the same for ranks to load their ZeRO++ state. It is the same in all islands."""
    if not zeropps:
        return None
    zeropp = zeropps[0]
    # Nodes and ranks per node, for each division that units have.
    topology = list(chain.from_iterable(dict.fromkeys((t.num_nodes, t.ranks_per_node) for t in zeropp.topologies)))
    layout: dict[str, Any] = {"topology": topology, "config": settings_of_state(zeropp.config)}
    return cast(dict[str, Any], json.loads(json.dumps(layout)))  # as a checkpoint gives it back


def _wire_settings(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of islands on which their saved errors and transfers depend."""
    free = {"outer_optimizer", "outer_lr", "outer_momentum", "loco_beta", "merge_alpha", "offload"}
    return {name: value for name, value in (config or {}).items() if name not in free}
