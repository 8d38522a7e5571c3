"""Declare a setting once, as a dataclass field with a flag's help and bounds in its metadata."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """An interval of finite numbers. An end that is None is open."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        """Such as "at least 0, below 1"; "" where every finite number is inside."""
        return ", ".join(text for text, _ in self._ends(0))

    def check(self, number: float) -> None:
        """Raise ValueError("must be at least 1") and the like, unless ``number`` is inside."""
        if not abs(number) < math.inf:  # NaN too; math.isfinite fails on large integers
            raise ValueError("must be a finite number")
        for text, is_inside in self._ends(number):
            if not is_inside:
                raise ValueError(f"must be {text}")

    def _ends(self, number: float) -> list[tuple[str, bool]]:
        ends = [
            ("at least", self.at_least, lambda end: number >= end),
            ("above", self.above, lambda end: number > end),
            ("at most", self.at_most, lambda end: number <= end),
            ("below", self.below, lambda end: number < end),
        ]
        return [(f"{name} {end}", is_inside(end)) for name, end, is_inside in ends if end is not None]


def flag(default: Any, help: str, **options: Any) -> Any:
    """Make a dataclass field that is also a command-line flag. A ``bool`` field becomes a switch.

    options: fields of ``settings.flags.Flag``, and of ``Bounds`` for a number, or for each of several. name: default
    "--num-layers" for the field num_layers. needs: the field without which giving this flag is an error. zero_is_none:
    0 on the command line is None here.
    """
    names = ("name", "aliases", "choices", "nargs", "metavar", "needs", "zero_is_none")
    metadata = {name: options.pop(name) for name in names if name in options}
    return dataclasses.field(default=default, metadata={**metadata, "help": help, "bounds": Bounds(**options)})


def config_flag(name: str, default: Any, help: str, **options: Any) -> Any:
    """Make a ``flag`` whose ``name`` is not its field's, as in configurations that programs without flags use too."""
    return flag(default, help, name=name, **options)


def check_fields(config: Any, owner: str = "", group: type[Any] | None = None) -> None:
    """Raise ValueError for a value outside its field's choices or bounds. group: the declared fields, if a base's."""
    for field in dataclasses.fields(group or config):
        choices, value = field.metadata.get("choices"), getattr(config, field.name)
        if choices is not None and value not in (*choices, field.default):
            raise ValueError(f"{owner}{field.name} must be one of {', '.join(choices)}, got {value!r}")
        if field.metadata and isinstance(value, int | float):
            try:
                field.metadata["bounds"].check(value)
            except ValueError as error:
                raise ValueError(f"{owner}{field.name} {error}, got {value}") from None
