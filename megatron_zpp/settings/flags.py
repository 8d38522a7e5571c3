"""A dataclass field is a command-line flag: how a field says so, and what a program reads off a class of such fields.

A setting's name is its flag's, ``zero_weight_bits`` for ``--zero-weight-bits``, whatever the field is called:
DeepSpeed's keys, checkpoints and logs know settings by that name, which is unique over all groups.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Group = TypeVar("Group")


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    choices: tuple[str, ...] | None = None,
    nargs: int | str | None = None,
    metavar: str | tuple[str, ...] | None = None,
    needs: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag. A ``bool`` field becomes a switch.

    name: default from the field's, "--num-layers" for num_layers. needs: the field without which giving this flag is
    an error.
    """
    metadata = dict(help=help, name=name, choices=choices, nargs=nargs, metavar=metavar, needs=needs)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Flag:
    """A field made by ``flag``, or by ``_flag`` in ``zeropp.config``."""

    setting: str
    name: str  # "--zero-weight-bits"
    value_type: type  # int for "int | None" and for each value of "tuple[int, ...]"; a bool is a switch
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    nargs: int | str | None = None
    metavar: str | tuple[str, ...] | None = None
    needs: str | None = None  # the setting without which giving this flag is an error
    zero_is_none: bool = False


def group_title(group: type[Any]) -> str:
    """What a group is called in --help and on the page of flags: its docstring's first sentence."""
    return (group.__doc__ or "").partition(".")[0]


def iterate_flags(group: type[Any]) -> Iterator[Flag]:
    """The flags of a group, in order.

    A field that holds another group or None, such as ZeroPPConfig.loco, is a switch, followed by that group's flags,
    which all need the switch.
    """
    for _, flag, inner in _flag_fields(group):
        yield flag
        if inner is not None:
            yield from (dataclasses.replace(part, needs=part.needs or flag.setting) for part in iterate_flags(inner))


def flat_values(group: Any) -> dict[str, Any]:
    """{setting: value} of a group. Of an inner group that is None, the switch is False and the rest its defaults."""
    values: dict[str, Any] = {}
    for name, flag, inner in _flag_fields(type(group)):
        value = getattr(group, name)
        if inner is None:
            values[flag.setting] = value
        else:
            values[flag.setting] = value is not None
            values |= flat_values(inner() if value is None else value)
    return values


def group_from(group: type[Group], values: Mapping[str, Any]) -> Group:
    """The inverse of ``flat_values``: takes the group's settings out of all of a run's; the rest are its defaults."""
    chosen: dict[str, Any] = {}
    for name, flag, inner in _flag_fields(group):
        if flag.setting not in values:
            continue
        value = values[flag.setting]
        if inner is not None:
            value = group_from(inner, values) if value else None
        elif flag.zero_is_none and value == 0:
            value = None
        elif isinstance(value, list):  # argparse makes lists; frozen settings hold tuples
            value = tuple(value)
        chosen[name] = value
    return group(**chosen)


def _flag_fields(group: type[Any]) -> Iterator[tuple[str, Flag, type[Any] | None]]:
    """The name of each field that is a flag, the flag, and the inner group that the field holds."""
    hints = typing.get_type_hints(group)
    fields = {field.name: field for field in dataclasses.fields(group) if field.metadata}
    names = {name: field.metadata["name"] or "--" + name.replace("_", "-") for name, field in fields.items()}
    settings = {name: flag_name.removeprefix("--").replace("-", "_") for name, flag_name in names.items()}
    for name, field in fields.items():
        value_type, default = _value_type(hints[name]), field.default
        inner = value_type if dataclasses.is_dataclass(value_type) else None
        if inner is not None:
            value_type, default = bool, default is not None
        needs = field.metadata["needs"]
        metadata = dict(field.metadata) | {"name": names[name], "needs": settings[needs] if needs else None}
        yield name, Flag(settings[name], value_type=value_type, default=default, **metadata), inner


def _value_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
