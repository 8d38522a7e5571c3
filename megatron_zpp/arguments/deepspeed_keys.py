"""Every key of a DeepSpeed JSON file that we know, and what becomes of it, from ``deepspeed_keys.toml``.

A key sets settings, holds a section, must have a value that changes nothing here, or is not needed. Whatever else a
file holds is an error, since a misspelt key would otherwise train something other than what was asked for.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_zpp.optim.optimizer import OPTIMIZERS


@dataclass(frozen=True)
class Sets:
    """The key sets these settings; ``convert`` raises ValueError on what it cannot read."""

    settings: tuple[str, ...]
    convert: Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Section:
    """An object of further keys. With ``switch``, a false one turns the section off and its other keys are unused.

    turns_on: the setting that is on where the section is there and not off. defaults: DeepSpeed's values of keys that
    the section may lack.
    """

    keys: dict[str, Key]
    required: tuple[str, ...] = ()
    switch: str | None = None
    turns_on: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ByType:
    """An object of "type" and "params": the type sets ``setting`` to its value here and says which params there are."""

    setting: str
    types: dict[str, tuple[str, Section]]


@dataclass(frozen=True)
class Only:
    """The key has no setting here: these values are what happens anyway, all others are refused."""

    values: tuple[Any, ...]
    otherwise: str


@dataclass(frozen=True)
class Off:
    """A section of a feature that we do not have: accepted while its ``switch`` is off, or all that are in it."""

    otherwise: str
    switch: str = "enabled"
    anywhere: bool = False


@dataclass(frozen=True)
class NotNeeded:
    """Any value is accepted and changes nothing, for this reason."""

    because: str


Key = Sets | Section | ByType | Only | Off | NotNeeded


# Values


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not abs(value) <= sys.float_info.max:  # Python reads 1e999, Infinity, NaN and 400 digits, too
        raise ValueError("must be a finite number")
    return float(value)


def whole_number(value: Any) -> int:
    """5, and 1e6 too: JSON files write large sizes so."""
    if number(value) != int(number(value)):
        raise ValueError("must be a whole number")
    return int(value)


def _loss_scale(value: Any) -> float | None:
    return number(value) or None  # DeepSpeed's 0 means dynamic


def _power_of_two(value: Any) -> float:
    if not 0 <= whole_number(value) <= 127:  # beyond it fp32 overflows
        raise ValueError("must be a whole number from 0 to 127")
    return 2.0 ** int(value)


def _warmup_style(value: Any) -> str:
    if value not in ("linear", "log"):
        raise ValueError("must be linear or log")
    return str(value)


def _offload_device(value: Any) -> bool:
    if value not in ("none", "cpu"):
        raise ValueError("must be none or cpu")
    return bool(value == "cpu")


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    return number(value[0]), number(value[1])


def _optimizer(value: Any) -> str:
    names = {name: optimizer for optimizer, kind in OPTIMIZERS.items() for name in kind.deepspeed_names}
    for name, optimizer in names.items():
        if str(value).lower() == name.lower():
            return optimizer
    raise ValueError(f"must be one of {', '.join(names)}")


def _reduce_in(value: Any) -> tuple[bool, bool]:
    if value not in ("fp32", "bf16", "bfp16"):
        raise ValueError("must be fp32 or bf16")
    return value == "fp32", value != "fp32"


KINDS: dict[str, Callable[[Any], Any]] = {
    "bool": boolean,
    "hpz": lambda value: whole_number(value) or 1,  # DeepSpeed's 0 is off, like 1
    "int": whole_number,
    "loss_scale": _loss_scale,
    "number": number,
    "number_twice": lambda value: (number(value), number(value)),
    "offload_device": _offload_device,  # FSDP2 offloads parameters and optimizer state alike: two sections must agree
    "optimizer": _optimizer,
    "pair": _pair,
    "power_of_two": _power_of_two,
    "reduce_in": _reduce_in,
    "text": str,
    "warmup_style": _warmup_style,
}
_TABLE = tomllib.loads(Path(__file__).with_name("deepspeed_keys.toml").read_text(encoding="utf-8"))


def _key(row: Any) -> Key:
    """One row of the table."""
    reasons = _TABLE["reasons"]
    match row:
        case str():
            return NotNeeded(reasons.get(row, row))
        case {"sets": settings, "as": kind}:
            names = tuple(settings.split())
            return Sets(names, KINDS[kind] if len(names) > 1 else lambda value: (KINDS[kind](value),))
        case {"only": values, "otherwise": otherwise}:
            return Only(tuple(values), reasons.get(otherwise, otherwise))
        case {"off": otherwise}:
            return Off(reasons.get(otherwise, otherwise), anywhere=row.get("anywhere", False))
        case {"same_as": path}:
            found = _TABLE["top"]
            for name in path.split("."):
                found = found[name]
            return _section(found)
        case {"@by_type": setting}:
            types = {kind: params for kind, params in row.items() if kind != "@by_type"}
            return ByType(setting, {kind: (params["@value"], _section(params)) for kind, params in types.items()})
        case _:
            return _section(row)


def _section(rows: dict[str, Any]) -> Section:
    return Section(
        {name: _key(row) for name, row in rows.items() if not name.startswith("@")},
        required=tuple(rows.get("@required", ())),
        switch=rows.get("@switch"),
        turns_on=rows.get("@turns_on"),
        defaults=rows.get("@defaults", {}),
    )


TOP = _section(_TABLE["top"])
