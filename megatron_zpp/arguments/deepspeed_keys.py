"""Every known key of a DeepSpeed JSON file, and what becomes of it, from ``deepspeed_keys.toml``; others are errors."""

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
    """The key sets these settings. ``convert`` returns a value for each, or one for all; it may raise ValueError."""

    settings: tuple[str, ...]
    convert: Callable[[Any], Any]


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
class MustEqual:
    """The key has no setting here: these values are what happens anyway, all others are refused."""

    values: tuple[Any, ...]
    otherwise: str


@dataclass(frozen=True)
class Off:
    """A feature that we do not have: accepted while "enabled" is false in its section, or in all sections within."""

    otherwise: str
    anywhere: bool = False


@dataclass(frozen=True)
class NotNeeded:
    """Any value is accepted and changes nothing, for this reason."""

    because: str


Key = Sets | Section | ByType | MustEqual | Off | NotNeeded


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
    """Read a whole number, written as 5 or 1e6."""
    if number(value) != int(number(value)):
        raise ValueError("must be a whole number")
    return int(value)


def _power_of_two(value: Any) -> float:
    if not 0 <= whole_number(value) <= 127:  # beyond it fp32 overflows
        raise ValueError("must be a whole number from 0 to 127")
    return 2.0 ** int(value)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    return number(value[0]), number(value[1])


def _one_of(values: dict[str, Any], ignore_case: bool = False) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        for name, converted in values.items():
            if value == name or (ignore_case and str(value).lower() == name.lower()):
                return converted
        raise ValueError(f"must be one of {', '.join(values)}")

    return convert


KINDS: dict[str, Callable[[Any], Any]] = {
    "bool": boolean,
    "hpz": lambda value: whole_number(value) or 1,  # DeepSpeed's 0 is off, like 1
    "int": whole_number,
    "loss_scale": lambda value: number(value) or None,  # DeepSpeed's 0 means dynamic
    "number": number,
    # FSDP2 offloads parameters and optimizer state alike: two sections must agree.
    "offload_device": _one_of({"none": False, "cpu": True}),
    "optimizer": _one_of(
        {name: optimizer for optimizer, kind in OPTIMIZERS.items() for name in kind.deepspeed_names}, ignore_case=True
    ),
    "pair": _pair,
    "power_of_two": _power_of_two,
    "reduce_in": _one_of({"fp32": (True, False), "bf16": (False, True), "bfp16": (False, True)}),
    "text": str,
}
_TABLE = tomllib.loads(Path(__file__).with_name("deepspeed_keys.toml").read_text(encoding="utf-8"))


def _reason(text: str) -> str:
    return str(_TABLE["reasons"].get(text, text))


def _key(row: dict[str, Any]) -> Key:
    """Read one row of the table."""
    match row:
        case {"sets": settings, "as": kind}:
            return Sets(tuple(settings.split()), KINDS[kind])
        case {"only": values, "otherwise": otherwise}:
            return MustEqual(tuple(values), _reason(otherwise))
        case {"off": otherwise}:
            return Off(_reason(otherwise), anywhere=row.get("anywhere", False))
        case {"same_as": path}:
            found = _TABLE["top"]
            for name in path.split("."):
                found = found[name]
            return _section(found)
        case {"@by_type": setting, **types}:
            return ByType(setting, {kind: (params["@value"], _section(params)) for kind, params in types.items()})
        case _:
            return _section(row)


def _section(rows: dict[str, Any]) -> Section:
    keys: dict[str, Key] = {name: _key(row) for name, row in rows.items() if not name.startswith("@")}
    for reason, names in rows.get("@off", {}).items():
        keys |= dict.fromkeys(names, Off(_reason(reason)))
    for reason, names in rows.get("@not_needed", {}).items():
        keys |= dict.fromkeys(names, NotNeeded(_reason(reason)))
    return Section(
        keys,
        required=tuple(rows.get("@required", ())),
        switch=rows.get("@switch"),
        turns_on=rows.get("@turns_on"),
        defaults=rows.get("@defaults", {}),
    )


TOP = _section(_TABLE["top"])
