"""A model's counterpart in Hugging Face transformers. Weights are moved: a round trip gives the same bits."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """Parameters of ours, and the tensors with their numbers in the files of transformers' model."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    split: Callable[..., tuple[Tensor, ...]]  # ours -> theirs; views where it can be
    join: Callable[..., tuple[Tensor, ...]]  # theirs -> ours


def same(ours: str, theirs: str) -> Weight:
    """Pair a parameter that both models lay out in the same way."""
    return moved(ours, theirs, lambda x: x, lambda x: x)


def moved(ours: str, theirs: str, to_theirs: Callable[[Tensor], Tensor], to_ours: Callable[[Tensor], Tensor]) -> Weight:
    """Pair a parameter with the one tensor that has its numbers in other places."""
    return Weight((ours,), (theirs,), lambda x: (to_theirs(x),), lambda x: (to_ours(x),))


def same_weight_and_bias(ours: str, theirs: str) -> Iterator[Weight]:
    for kind in ("weight", "bias"):
        yield same(f"{ours}.{kind}", f"{theirs}.{kind}")


@dataclass(frozen=True)
class InMemory:
    """A parameter of transformers' model that is several tensors of its files, or has another name there."""

    name: str
    tensors: tuple[str, ...]
    join: Callable[..., Tensor]  # tensors -> parameter


@dataclass(frozen=True)
class HuggingFaceMapping:
    """A model as one of transformers. ``Any`` is the record's config class."""

    model_type: str  # transformers' name of it
    # (config, positions) -> config.json without tokens and dtype. Raises ValueError for models unknown there.
    to_config: Callable[[Any, int], dict[str, Any]]
    # config.json with all its defaults -> our config, every width filled in, and the number of positions. Raises
    # ValueError that names each key whose value our model cannot express.
    from_config: Callable[[Mapping[str, Any]], tuple[Any, int]]
    weights: Callable[[Any], Iterator[Weight]]  # every parameter, each side's tensors once
    in_memory: Callable[[Any], Iterator[InMemory]] = lambda config: iter(())


def require_fields(config: Any, title: str, supported: Mapping[str, tuple[Any, ...]], written: Collection[str]) -> None:
    """Raise ValueError that names each field of our config whose value the model ``title`` does not have.

    supported: the values that fields may have. written: fields that its configuration says, or that only training
    needs. All others must have their default, so that a new part of the decoder is never left out in silence.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    allowed = {field.name: supported.get(field.name, (field.default,)) for field in dataclasses.fields(config)}
    wrong = [f"{name} {value}" for name, value in values.items() if name not in written and value not in allowed[name]]
    if wrong:
        raise ValueError(f"{title} does not have {', '.join(wrong)}")


def require_sizes(hf: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless each key of config.json is a number from 1 on."""
    for name in names:
        if type(hf.get(name)) is not int or hf[name] < 1:
            raise ValueError(f"{name} is {hf.get(name)!r}, not a size")


def require_values(hf: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError that names each key of config.json whose value is not one of ``supported``."""
    wrong = [
        f"{key} is {hf.get(key)}, supported: {' or '.join(map(str, values))}"
        for key, values in supported.items()
        if hf.get(key) not in values
    ]
    if wrong:
        raise ValueError("our models cannot express this configuration: " + "; ".join(wrong))
