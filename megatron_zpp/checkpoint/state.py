"""What of a run is saved as tensors, and how it is taken back, on the same ranks or on others.

model.NAME                     parameters, fp32; of islands what they last agreed on
optimizer.NAME.KEY             the optimizer's state of a parameter; of islands the first one's
rng.RANK.DEVICE                random states
zeropp.RANK.…/KEY              LoCo's errors, scales of elements, copies of weights that travel as differences, noise
                               counters
island1.model.NAME             the own parameters of an island, the first of which is island0
island1.optimizer.NAME.KEY     the state of its optimizer, but for the first
islands.momentum.NAME          of the outer optimizer
islands.RANK.KEY               steps, LoCo's errors between islands, what is on its way between them
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_zpp.islands import IslandsInterface
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.parallel.mesh import AXES
from megatron_zpp.zeropp import ZeroPPConfig, ZeroPPInterface

from .files import CheckpointError
from .storage import CheckpointReader, iterate_tensors, read_index
from .trained import Trained


def checkpoint_state(trained: Trained, save_rng: bool) -> dict[str, Tensor]:
    """This rank's part of a checkpoint, by name; with emulated ranks all of them."""
    islands = trained.islands
    state = _joined({prefix: _model_state(model) for prefix, model in trained.named_models()})
    # Asked for the state of one that has made no step (fp16 skips its first ones), torch makes a step of zeros first,
    # and every later step would count as one more.
    for prefix, model, optimizer in trained.named_optimizers():
        if optimizer.state:
            state |= _joined({prefix: _optimizer_tensors(get_optimizer_state_dict(model, optimizer))})
    for ranks in trained.ranks if save_rng else ():
        state |= _joined({"rng.": ranks.random_states.state_dict()})
    for zeropp in trained.zeropps:
        state |= _joined({"zeropp.": zeropp.state_dict()})
    if islands is not None:
        state |= _joined({"model.": _model_state(trained.models[0])})  # what is not trained, they have alike
        state |= _agreed_tensors(islands) | _joined({"islands.": islands.state_dict()})
    return state


def describe_state(trained: Trained, save_rng: bool) -> dict[str, Any]:
    """What meta.json says about the tensors."""
    return {
        "world_size": trained.world_size,
        "has_optimizer": bool(trained.optimizers),
        "optimizer_has_stepped": any(bool(optimizer.state) for optimizer in trained.optimizers),
        "has_rng": save_rng,
        "zeropp": _zeropp_layout(trained.zeropps),
        "islands": None if trained.islands is None else dataclasses.asdict(trained.islands.config),
    }


def iterate_parameters(checkpoint: Path, meta: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and whole fp32 tensor of each parameter of the saved model, one at a time; a tied one comes once.

    meta: of ``read_meta``. Needs no process group and no model. Raises CheckpointError.
    """
    return iterate_tensors(checkpoint, meta, "model.")


def load_checkpoint(
    checkpoint: Path,
    meta: Mapping[str, Any],
    trained: Trained,
    layout: Mapping[str, int | str],
    load_rng: bool = True,
) -> list[str]:
    """Load tensors in place; collective. Returns notes about what was not taken over and why.

    Without optimizers: the parameters alone. The ranks, and their ``layout`` (of ``Run.layout``), may be others than
    those that saved; random states and LoCo's errors belong to a layout and start anew on another. Raises
    FailedTogether when it has said why.
    """
    notes: list[str] = []
    islands, layout_there = trained.islands, dict.fromkeys(AXES, 1) | meta.get("layout", {})  # newer axes: one rank
    same_layout = "layout" in meta and layout_there == layout
    # Or they begin anew: then the first model here is loaded, and all become equal.
    islands_go_on = islands is not None and bool(trained.optimizers) and layout_there["island"] == islands.num_islands
    loaded = trained if islands_go_on else trained.first()
    models = {prefix: _model_state(model) for prefix, model in loaded.named_models()}
    state = _joined(models)
    optimizers: dict[str, dict[str, Any]] = {}
    if meta.get("optimizer_has_stepped", True):
        optimizers = {prefix: get_optimizer_state_dict(m, o) for prefix, m, o in loaded.named_optimizers()}
        state |= _joined({prefix: _optimizer_tensors(own) for prefix, own in optimizers.items()})
    load_rng = load_rng and meta["has_rng"]
    if load_rng and not same_layout:
        others = f"{meta['world_size']} ranks saved, {trained.world_size} load"
        otherwise = ", divided otherwise" if meta["world_size"] == trained.world_size else ""
        notes.append(f"random states start anew: {others}{otherwise}")
        load_rng = False
    random_states = [ranks.random_states.state_dict() for ranks in trained.ranks]
    if load_rng:
        state |= {f"rng.{name}": tensor for own in random_states for name, tensor in own.items()}
    own_ranks = {name.partition(".")[0] for zeropp in trained.zeropps for name in zeropp.state_dict()}
    load_zeropp = bool(trained.optimizers) and bool(own_ranks)
    kept = "LoCo's errors, scales of elements and weight copies"
    if load_zeropp and (not same_layout or _comparable(meta["zeropp"]) != _comparable(_zeropp_layout(trained.zeropps))):
        notes.append(f"{kept} start anew: saved with other ranks, nodes or ZeRO++ settings")
        load_zeropp = False
    if islands is not None and not islands_go_on and trained.optimizers:
        notes.append(f"islands start anew from the checkpoint's parameters: {layout_there['island']} islands saved")
    if layout_there["island"] > 1 and not islands_go_on and optimizers:
        notes.append("the optimizer's state is that of the first island that saved")
    # Errors, and what is on its way, belong to ranks and to a wire.
    same_wire = islands is not None and _wire_of(meta.get("islands")) == _wire_of(dataclasses.asdict(islands.config))
    load_wires = islands_go_on and same_layout and same_wire
    if islands_go_on and not load_wires:
        notes.append(
            "LoCo's errors between islands start anew, and what was on its way is dropped: saved with other ranks or "
            "settings"
        )

    zeropp_state, islands_state = dict[str, Tensor](), dict[str, Tensor]()
    with errors_on_all_ranks():
        if trained.optimizers and not meta["has_optimizer"]:
            raise CheckpointError(f"{checkpoint} was saved without its optimizer: load it with --no-load-optim")
        metadata, places = read_index(checkpoint, meta)
        saved = metadata.state_dict_metadata
        if load_zeropp:
            zeropp_state = _tensors_to_fill(saved, "zeropp", own_ranks)
            state |= {f"zeropp.{name}": tensor for name, tensor in zeropp_state.items()}
        if islands_go_on and islands is not None:
            for name, tensor in _agreed_tensors(islands).items():
                if name in saved or name.startswith("model."):  # or there was no momentum when it was saved
                    state[name] = tensor
        if load_wires and islands is not None:
            ranks_here = {name.partition(".")[0] for name in islands.state_dict()}
            islands_state = _tensors_to_fill(saved, "islands", ranks_here)
            state |= {f"islands.{name}": tensor for name, tensor in islands_state.items()}
        _check_shapes(checkpoint, state, saved)
    failure = None
    try:
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(state, storage_reader=CheckpointReader(checkpoint, metadata, places), planner=planner)
    except dcp.api.CheckpointException as error:  # on all ranks
        failure = root_cause(error)
    with errors_on_all_ranks():
        if failure is not None:
            raise CheckpointError(
                f"{checkpoint} cannot be loaded ({failure}): load another checkpoint with --ckpt-step, or the newest "
                "good one with --load-latest-good"
            )
    for prefix, model in loaded.named_models():
        set_model_state_dict(model, models[prefix])
    for prefix, model, optimizer in loaded.named_optimizers() if optimizers else ():
        set_optimizer_state_dict(model, optimizer, optimizers[prefix])
    for model, optimizer in list(zip(trained.models, trained.optimizers, strict=False))[len(loaded.models) :]:
        if optimizers:  # of emulated islands that begin anew
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(optimizers["optimizer."]))
    if load_rng:
        for ranks, own in zip(trained.ranks, random_states, strict=True):
            ranks.random_states.load_state_dict(own)
    for zeropp in trained.zeropps:
        zeropp.invalidate()
        if load_zeropp:
            # Which leaves it out with a warning where an earlier version divided the model into other units.
            zeropp.load_state_dict({name: tensor.to(zeropp.device) for name, tensor in zeropp_state.items()})
    if islands is not None:
        if islands_go_on:
            islands.load_state_dict(islands_state)
        else:
            islands.begin_anew()
    return notes


def root_cause(error: BaseException) -> str:
    """The error itself, and whose: DCP wraps the ranks' errors, with their tracebacks, in one that all ranks raise."""
    if isinstance(error, dcp.api.CheckpointException):
        rank = min(error.failures)
        cause, _ = error.failures[rank]
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _model_state(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model)


def _agreed_tensors(islands: IslandsInterface) -> dict[str, Tensor]:
    """What islands agreed on under the names of a model, and the outer optimizer's momentum."""
    names = {"agreed": "model", "momentum": "islands.momentum"}
    found = {}
    for key, tensor in islands.agreed_state().items():
        kind, _, name = key.partition(".")
        found[f"{names[kind]}.{name}"] = tensor
    return found


def _wire_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of islands that say what their ranks keep, and what is on its way."""
    free = {"outer_optimizer", "outer_lr", "outer_momentum", "loco_beta", "merge_alpha", "offload"}
    return {name: value for name, value in (config or {}).items() if name not in free}


def _joined(named: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors under their prefix and name."""
    return {prefix + name: tensor for prefix, tensors in named.items() for name, tensor in tensors.items()}


def _optimizer_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of ``get_optimizer_state_dict``; the groups' settings are the run's, set anew at every step."""
    return {
        f"{name}.{key}": value
        for name, of_parameter in state["state"].items()
        for key, value in of_parameter.items()
        if isinstance(value, Tensor)
    }


def _zeropp_layout(zeropps: Sequence[ZeroPPInterface]) -> dict[str, Any] | None:
    """What must be the same for ZeRO++ state to be taken over, rank by rank; alike in all islands."""
    if not zeropps:
        return None
    zeropp = zeropps[0]
    # Nodes and ranks per node, of each division that units have.
    topology = list(chain.from_iterable(dict.fromkeys((t.num_nodes, t.ranks_per_node) for t in zeropp.topologies)))
    return {"topology": topology, "config": dataclasses.asdict(zeropp.config)}


def _comparable(zeropp_layout: dict[str, Any] | None) -> Any:
    """This run's layout or a checkpoint's, as JSON; settings that are newer than the checkpoint have their defaults."""
    config = (zeropp_layout or {}).get("config")
    if zeropp_layout is None or not isinstance(config, dict):
        return zeropp_layout
    config = dataclasses.asdict(ZeroPPConfig()) | config
    # Nothing is kept in the bits of first steps, what is kept is not random, and no error is of a step to be undone.
    of_no_state = {"seed", "gradient_bits_warmup", "weight_difference_bits_warmup"}
    config = {name: value for name, value in config.items() if name not in of_no_state}
    if isinstance(loco := config["loco"], dict):
        config["loco"] = {name: value for name, value in loco.items() if name != "exact_undo"}
    return json.loads(json.dumps(zeropp_layout | {"config": config}))


def _tensors_to_fill(saved: Mapping[str, Any], kind: str, ranks: Collection[str]) -> dict[str, Tensor]:
    """Empty tensors of the shapes in which the state of these ranks was saved, by whatever version."""
    return {
        name.removeprefix(f"{kind}."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(f"{kind}.") and name.split(".")[1] in ranks
    }


def _check_shapes(checkpoint: Path, state: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError where the run has a tensor that was saved otherwise, or not at all."""
    wrong = []
    for name, tensor in state.items():
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            wrong.append(f"{name} is not in it")
        elif entry.size != tensor.size() or entry.properties.dtype != tensor.dtype:
            there, here = (f"{t} {list(s)}" for t, s in (
                (entry.properties.dtype, entry.size), (tensor.dtype, tensor.size())))  # fmt: skip
            wrong.append(f"{name} is {there} there, {here} here")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{checkpoint} does not fit this run: {'; '.join(wrong[:3])}{more}")
