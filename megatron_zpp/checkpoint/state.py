"""What of a run is saved as tensors, and how it is taken back, on the same ranks or on others.

model.NAME             parameters, fp32
optimizer.NAME.KEY     the optimizer's state of a parameter
rng.RANK.DEVICE        random states
zeropp.RANK.…/KEY      LoCo's errors, scales of elements, copies of weights that travel as differences, noise counters
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
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

from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.parallel.mesh import AXES
from megatron_zpp.zeropp import ZeroPPConfig, ZeroPPInterface, ranks_of

from .files import CheckpointError
from .storage import CheckpointReader, iterate_tensors, read_index


def checkpoint_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, zeropp: ZeroPPInterface | None, save_rng: bool
) -> dict[str, Tensor]:
    """This rank's part of a checkpoint, by name; with emulated ranks all of them."""
    state: dict[str, Tensor] = {f"model.{name}": value for name, value in _model_state(model).items()}
    # Asked for the state of one that has made no step (fp16 skips its first ones), torch makes a step of zeros first,
    # and every later step would count as one more.
    if optimizer is not None and optimizer.state:
        state |= _optimizer_tensors(get_optimizer_state_dict(model, optimizer))
    ranks = ranks_of(zeropp)
    if save_rng:
        state |= {f"rng.{name}": tensor for name, tensor in ranks.random_states.state_dict().items()}
    if zeropp is not None:
        state |= {f"zeropp.{name}": tensor for name, tensor in zeropp.state_dict().items()}
    return state


def describe_state(
    optimizer: torch.optim.Optimizer | None, zeropp: ZeroPPInterface | None, save_rng: bool
) -> dict[str, Any]:
    """What meta.json says about the tensors."""
    return {
        "world_size": ranks_of(zeropp).world_size,
        "has_optimizer": optimizer is not None,
        "optimizer_has_stepped": optimizer is not None and bool(optimizer.state),
        "has_rng": save_rng,
        "zeropp": _zeropp_layout(zeropp),
    }


def iterate_parameters(checkpoint: Path, meta: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and whole fp32 tensor of each parameter of the saved model, one at a time; a tied one comes once.

    meta: of ``read_meta``. Needs no process group and no model. Raises CheckpointError.
    """
    return iterate_tensors(checkpoint, meta, "model.")


def load_checkpoint(
    checkpoint: Path,
    meta: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    zeropp: ZeroPPInterface | None,
    layout: Mapping[str, int | str],
    load_rng: bool = True,
) -> list[str]:
    """Load tensors in place; collective. Returns notes about what was not taken over and why.

    optimizer None: the parameters alone. The ranks, and their ``layout`` (of ``Run.layout``), may be others than those
    that saved; random states and LoCo's errors belong to a layout and start anew on another. Raises FailedTogether when
    it has said why.
    """
    optimizer_state, zeropp_state = dict[str, Any](), dict[str, Tensor]()
    notes: list[str] = []
    ranks = ranks_of(zeropp)
    model_state, rng = _model_state(model), ranks.random_states.state_dict()
    load_optimizer = optimizer is not None and meta.get("optimizer_has_stepped", True)
    state: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in model_state.items()}
    if optimizer is not None and load_optimizer:
        optimizer_state = get_optimizer_state_dict(model, optimizer)
        state |= _optimizer_tensors(optimizer_state)
    load_rng = load_rng and meta["has_rng"]
    # An axis that is newer than the checkpoint had one rank.
    same_layout = "layout" in meta and dict.fromkeys(AXES, 1) | meta["layout"] == layout
    if load_rng and not same_layout:
        others = f"{meta['world_size']} ranks saved, {ranks.world_size} load"
        otherwise = ", divided otherwise" if meta["world_size"] == ranks.world_size else ""
        notes.append(f"random states start anew: {others}{otherwise}")
        load_rng = False
    if load_rng:
        state |= {f"rng.{name}": tensor for name, tensor in rng.items()}
    own_ranks = {name.partition(".")[0] for name in zeropp.state_dict()} if zeropp is not None else set()
    load_zeropp = optimizer is not None and bool(own_ranks)
    kept = "LoCo's errors, scales of elements and weight copies"
    if load_zeropp and (not same_layout or _comparable(meta["zeropp"]) != _comparable(_zeropp_layout(zeropp))):
        notes.append(f"{kept} start anew: saved with other ranks, nodes or ZeRO++ settings")
        load_zeropp = False

    with errors_on_all_ranks():
        if optimizer is not None and not meta["has_optimizer"]:
            raise CheckpointError(f"{checkpoint} was saved without its optimizer: load it with --no-load-optim")
        metadata, places = read_index(checkpoint, meta)
        if load_zeropp:
            zeropp_state = _zeropp_tensors_to_fill(metadata.state_dict_metadata, own_ranks)
            state |= {f"zeropp.{name}": tensor for name, tensor in zeropp_state.items()}
        _check_shapes(checkpoint, state, metadata.state_dict_metadata)
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
    set_model_state_dict(model, model_state)
    if optimizer is not None and load_optimizer:
        set_optimizer_state_dict(model, optimizer, optimizer_state)
    if load_rng:
        ranks.random_states.load_state_dict(rng)
    if zeropp is not None:
        zeropp.invalidate()
        if load_zeropp:
            # Which leaves it out with a warning where an earlier version divided the model into other units.
            zeropp.load_state_dict({name: tensor.to(zeropp.device) for name, tensor in zeropp_state.items()})
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


def _optimizer_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of ``get_optimizer_state_dict``; the groups' settings are the run's, set anew at every step."""
    return {
        f"optimizer.{name}.{key}": value
        for name, of_parameter in state["state"].items()
        for key, value in of_parameter.items()
        if isinstance(value, Tensor)
    }


def _zeropp_layout(zeropp: ZeroPPInterface | None) -> dict[str, Any] | None:
    """What must be the same for ZeRO++ state to be taken over, rank by rank."""
    if zeropp is None:
        return None
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


def _zeropp_tensors_to_fill(saved: Mapping[str, Any], ranks: Collection[str]) -> dict[str, Tensor]:
    """Empty tensors of the shapes in which the ZeRO++ state of these ranks was saved, by whatever version."""
    return {
        name.removeprefix("zeropp."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith("zeropp.") and name.split(".")[1] in ranks
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
