"""Save the tensors of a run and load them again, on the same ranks or on others.

model.NAME                     parameters, fp32
optimizer.NAME.KEY             the optimizer's state of a parameter
rng.RANK.DEVICE                random states
zeropp.RANK.…/KEY              LoCo's errors, scales of elements, rows of moved codes, noise
                               counters
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_zpp.models.lora import is_adapter
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.zeropp.fsdp.topology import process_rank

from .files import CheckpointError
from .index import Entry, Index, read_index
from .meta import REMEDY
from .storage import fill_rows, read_state, read_tensor
from .trained import ResumePlan, Trained, plan_resume


def checkpoint_state(trained: Trained, with_optimizer: bool = True) -> dict[str, Tensor]:
    """Return this rank's tensors by name."""
    model, optimizer, zeropp = trained.model, trained.optimizer, trained.zeropp
    named = {"model.": _model_tensors(model), "rng.": random_state_dict()}
    # For an optimizer without a step (fp16 skips the first ones) torch would make a step of zeros, which counts.
    if with_optimizer and optimizer.state:
        named["optimizer."] = _optimizer_tensors(get_optimizer_state_dict(model, optimizer))
    if zeropp is not None:
        named["zeropp."] = zeropp.state_dict()
    return trained.islands.checkpoint_state(_prefixed(named))


def load_checkpoint(
    checkpoint: Path,
    meta: Mapping[str, Any],
    trained: Trained,
    layout: Mapping[str, int | str],
    *,
    with_optimizer: bool = True,
    load_rng: bool = True,
    new_rows: tuple[int, str] | None = None,
) -> ResumePlan:
    """Load tensors in place; return what was loaded, with notes on the rest. Collective.

    Without the optimizer it loads parameters only. Ranks and their ``layout`` (``Trainer.layout``) may differ from
    those that saved: then random states and LoCo's errors start over. new_rows: the vocabulary has other rows from this
    one on, "mean" or "random" (``fill_rows``). Raises FailedTogether after printing the reason.
    """
    model, optimizer, zeropp = trained.model, trained.optimizer, trained.zeropp
    local_ranks = set() if zeropp is None else zeropp.ranks_with_state()
    plan = plan_resume(
        meta, trained, layout, trains=with_optimizer, load_rng=load_rng, has_zeropp_state=bool(local_ranks)
    )
    tensors = _model_tensors(model)
    optimizer_state = get_optimizer_state_dict(model, optimizer) if plan.optimizer else {}
    random_states = random_state_dict() if plan.random_states else {}
    own = {"model.": tensors, "optimizer.": _optimizer_tensors(optimizer_state), "rng.": random_states}
    with errors_on_all_ranks():
        if with_optimizer and not meta["has_optimizer"]:
            raise CheckpointError(f"{checkpoint} was saved without its optimizer: load it with --no-load-optim")
        index = read_index(checkpoint, meta, {str(process_rank())})
        zeropp_state = _tensors_to_fill(index.tensors, local_ranks) if plan.zeropp else {}
        state, finish = trained.islands.begin_load(_prefixed(own | {"zeropp.": zeropp_state}), index.tensors)
        names = [f"model.{name}" for name in Transformer.with_vocabulary if new_rows is not None]
        vocabulary = {name: state.pop(name) for name in names if name in state}
        _check_shapes(checkpoint, state, index.tensors)
    _read(index, state)
    with errors_on_all_ranks():
        for name, tensor in vocabulary.items():
            assert new_rows is not None
            fill_rows(tensor, read_tensor(index, name), *new_rows)

    _set_model_tensors(model, tensors)
    if plan.optimizer:
        set_optimizer_state_dict(model, optimizer, optimizer_state)
    if plan.random_states:
        load_random_state_dict(random_states)
    if zeropp is not None:
        zeropp.invalidate()
        if plan.zeropp:
            # Warns, and loads nothing, if an earlier version divided the model into other units.
            zeropp.load_state_dict({name: tensor.to(zeropp.device) for name, tensor in zeropp_state.items()})
    finish()
    return plan


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


def _prefixed(named: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {prefix + name: tensor for prefix, tensors in named.items() for name, tensor in tensors.items()}


def _optimizer_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of ``get_optimizer_state_dict``; the run sets the groups' settings at every step."""
    return {
        f"{name}.{key}": value
        for name, values in state.get("state", {}).items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def _tensors_to_fill(saved: Mapping[str, Entry], ranks: Collection[str]) -> dict[str, Tensor]:
    """Return empty tensors of the shapes in which these ranks' ZeRO++ state was saved."""
    names = [name for name in saved if name.startswith("zeropp.") and name.split(".")[1] in ranks]
    return {name.removeprefix("zeropp."): torch.empty(saved[name].size, dtype=saved[name].dtype) for name in names}


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


def random_state_dict() -> dict[str, Tensor]:
    """Return the states of torch's generators on this rank, uint8, by "RANK.cpu" and on a GPU "RANK.cuda"."""
    states = {f"{process_rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{process_rank()}.cuda"] = torch.cuda.get_rng_state()
    return states


def load_random_state_dict(states: Mapping[str, Tensor]) -> None:
    """Restore what ``random_state_dict`` returned on this rank."""
    torch.set_rng_state(states[f"{process_rank()}.cpu"])
    if f"{process_rank()}.cuda" in states:
        torch.cuda.set_rng_state(states[f"{process_rank()}.cuda"])
