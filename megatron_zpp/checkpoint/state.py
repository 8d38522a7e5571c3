"""Save the tensors of a run and load them again, on the same ranks or on others.

model.NAME                     parameters, fp32; with islands, the outer parameters
optimizer.NAME.KEY             the optimizer's state of a parameter; with islands, the first island's
rng.RANK.DEVICE                random states
zeropp.RANK.…/KEY              LoCo's errors, scales of elements, rows of moved codes, noise
                               counters
island1.model.NAME             an island's parameters; the first island is island0
island1.optimizer.NAME.KEY     the state of its optimizer, except the first island's
islands.momentum.NAME          the outer optimizer's momentum
islands.RANK.KEY               steps, LoCo's errors between islands, transfers between them
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_zpp.errors import describe_error
from megatron_zpp.islands import OuterSync
from megatron_zpp.models.lora import is_adapter
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.zeropp.own_rank import load_random_state_dict, random_state_dict

from .files import CheckpointError
from .index import Entry, Index, read_index
from .meta import REMEDY
from .storage import iterate_tensors, read_state
from .trained import Trained, plan_resume


def checkpoint_state(trained: Trained, save_rng: bool) -> dict[str, Tensor]:
    """Return this rank's tensors by name."""
    islands = trained.islands
    state = _prefixed({prefix: _model_tensors(model) for prefix, model in trained.named_models()})
    # For an optimizer without a step (fp16 skips the first ones) torch would make a step of zeros, which counts.
    for prefix, model, optimizer in trained.named_optimizers():
        if optimizer.state:
            state |= _prefixed({prefix: _optimizer_tensors(get_optimizer_state_dict(model, optimizer))})
    if save_rng:
        state |= _prefixed({"rng.": random_state_dict()})
    for zeropp in trained.zeropps:
        state |= _prefixed({"zeropp.": zeropp.state_dict()})
    if islands is not None:
        # What is not trained is the same in all.
        state |= _prefixed({"model.": _model_tensors(trained.models[0])})
        state |= _outer_tensors(islands) | _prefixed({"islands.": islands.state_dict()})
    return state


def iterate_parameters(checkpoint: Path, meta: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole fp32 tensor of each parameter, one at a time; a tied one once. Raises CheckpointError."""
    return iterate_tensors(checkpoint, meta, "model.")


def load_checkpoint(
    checkpoint: Path, meta: Mapping[str, Any], trained: Trained, layout: Mapping[str, int | str], load_rng: bool = True
) -> list[str]:
    """Load tensors in place; return notes on what was not loaded, and why. Collective.

    Without optimizers it loads parameters only. Ranks and their ``layout`` (``Run.layout``) may differ from those that
    saved: then random states and LoCo's errors start over. Raises FailedTogether after printing the reason.
    """
    islands = trained.islands
    local_ranks = {rank for zeropp in trained.zeropps for rank in zeropp.ranks_with_state()}
    plan = plan_resume(meta, trained, layout, load_rng, has_zeropp_state=bool(local_ranks))
    loaded = trained if plan.islands else trained.first()
    models = {prefix: _model_tensors(model) for prefix, model in loaded.named_models()}
    optimizers = {
        prefix: get_optimizer_state_dict(model, optimizer)
        for island, (prefix, model, optimizer) in enumerate(loaded.named_optimizers(), loaded.first_island)
        if plan.optimizers[island]
    }
    random_states = random_state_dict() if plan.random_states else {}
    state = _prefixed(models) | _prefixed({prefix: _optimizer_tensors(local) for prefix, local in optimizers.items()})
    state |= _prefixed({"rng.": random_states})

    zeropp_state, islands_state = dict[str, Tensor](), dict[str, Tensor]()
    island_ranks = _ranks_in(islands.state_dict()) if islands is not None and plan.island_wires else set()
    with errors_on_all_ranks():
        if trained.optimizers and not meta["has_optimizer"]:
            raise CheckpointError(f"{checkpoint} was saved without its optimizer: load it with --no-load-optim")
        index = read_index(checkpoint, meta, {*local_ranks, *island_ranks, *_ranks_in(random_states)})
        saved = index.tensors
        if plan.zeropp:
            zeropp_state = _tensors_to_fill(saved, "zeropp", local_ranks)
        if plan.islands and islands is not None:
            for name, tensor in _outer_tensors(islands).items():
                if name in saved or name.startswith("model."):  # momentum may not have existed yet
                    state[name] = tensor
        if plan.island_wires:
            islands_state = _tensors_to_fill(saved, "islands", island_ranks)
        state |= _prefixed({"zeropp.": zeropp_state, "islands.": islands_state})
        _check_shapes(checkpoint, state, saved)
    _read(index, state)

    for prefix, model in loaded.named_models():
        _set_model_tensors(model, models[prefix])
    for prefix, model, optimizer in loaded.named_optimizers():
        if prefix in optimizers:
            set_optimizer_state_dict(model, optimizer, optimizers[prefix])
    if random_states:
        load_random_state_dict(random_states)
    for zeropp in trained.zeropps:
        zeropp.invalidate()
        if plan.zeropp:
            # Warns, and loads nothing, if an earlier version divided the model into other units.
            zeropp.load_state_dict({name: tensor.to(zeropp.device) for name, tensor in zeropp_state.items()})
    if islands is not None:
        if plan.islands:
            islands.load_state_dict(islands_state)
        else:
            islands.restart()
    return list(plan.notes)


def load_base(checkpoint: Path, meta: Mapping[str, Any], model: nn.Module) -> None:
    """Load the frozen weights below adapters. Collective. Raises FailedTogether after printing the reason."""
    tensors = {name: tensor for name, tensor in get_model_state_dict(model).items() if not is_adapter(name)}
    with errors_on_all_ranks():
        index = read_index(checkpoint, meta, ())
        _check_shapes(checkpoint, _prefixed({"model.": tensors}), index.tensors)
    _read(index, _prefixed({"model.": tensors}))
    _set_model_tensors(model, tensors)


def _model_tensors(model: nn.Module) -> dict[str, Any]:
    """Return what is saved of a model: all, or its adapters alone."""
    tensors = get_model_state_dict(model)
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name)} or tensors


def _set_model_tensors(model: nn.Module, tensors: dict[str, Any]) -> None:
    """Load a model's tensors: all, or where it has adapters these or the others alone."""
    has_adapters = any(is_adapter(name) for name, _ in model.named_parameters())
    set_model_state_dict(model, tensors, options=StateDictOptions(strict=not has_adapters))


def _read(index: Index, state: dict[str, Any]) -> None:
    """Fill the tensors of ``state``. Raises FailedTogether. Collective."""
    with errors_on_all_ranks():
        try:
            read_state(index, state)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{index.checkpoint} cannot be loaded ({error}): {REMEDY}") from error


def root_cause(error: dcp.api.CheckpointException) -> str:
    """Describe the first rank's error, which DCP wraps with all ranks' tracebacks."""
    rank = min(error.failures)
    cause, _ = error.failures[rank]
    kind = "" if isinstance(cause, OSError) else f"{type(cause).__name__}: "
    return f"rank {rank}: {kind}{describe_error(cause)}"


def _outer_tensors(islands: OuterSync) -> dict[str, Tensor]:
    """Return the outer parameters, by the model's names, and the outer optimizer's momentum."""
    prefixes = {"agreed": "model.", "momentum": "islands.momentum."}
    state = {tuple(key.split(".", 1)): tensor for key, tensor in islands.outer_state().items()}
    return {prefixes[kind] + name: tensor for (kind, name), tensor in state.items()}


def _prefixed(named: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {prefix + name: tensor for prefix, tensors in named.items() for name, tensor in tensors.items()}


def _optimizer_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of ``get_optimizer_state_dict``; the run sets the groups' settings at every step."""
    return {
        f"{name}.{key}": value
        for name, values in state["state"].items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def _ranks_in(state: Mapping[str, Tensor]) -> set[str]:
    """Return the ranks that tensor names begin with."""
    return {name.partition(".")[0] for name in state}


def _tensors_to_fill(saved: Mapping[str, Entry], kind: str, ranks: Collection[str]) -> dict[str, Tensor]:
    """Return empty tensors of the shapes in which these ranks' state was saved."""
    return {
        name.removeprefix(f"{kind}."): torch.empty(entry.size, dtype=entry.dtype)
        for name, entry in saved.items()
        if name.startswith(f"{kind}.") and name.split(".")[1] in ranks
    }


def _check_shapes(checkpoint: Path, state: Mapping[str, Tensor], saved: Mapping[str, Entry]) -> None:
    """Raise CheckpointError if a tensor of the run was saved with another shape or dtype, or not at all."""
    wrong = []
    for name, tensor in state.items():
        entry = saved.get(name)
        if entry is None:
            wrong.append(f"{name} is not in it")
        elif entry.size != tensor.size() or entry.dtype != tensor.dtype:
            there, here = f"{entry.dtype} {list(entry.size)}", f"{tensor.dtype} {list(tensor.shape)}"
            wrong.append(f"{name} is {there} there, {here} here")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        unfit = f"{checkpoint} does not fit this run: {'; '.join(wrong[:3])}{more}"
        raise CheckpointError(f"{unfit}. Give the settings that saved it, or --no-load-optim, or another --load")
