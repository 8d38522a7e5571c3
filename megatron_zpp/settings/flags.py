"""Dataclass fields that are command-line flags: how to declare them, and how to read groups of them.

A setting is named after its flag, ``zeropp_weight_bits`` for ``--zeropp-weight-bits``, whatever its field is called.
DeepSpeed's keys, checkpoints and logs use these names, which are unique over all groups.
"""

import argparse
import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_zpp.fields import Bounds
from megatron_zpp.files import as_path, is_url

# Default upper bounds: what 32-bit integers and fp32 hold.
_LARGEST: dict[type, float] = {int: 2**31 - 1, float: 3.4e38}

# Metavars of flags that name files or folders, on this machine or in a bucket too.
PATHS = ("DIR", "FILE", "PATH", "PREFIX", "DIR|URL", "PREFIX|URL")

Group = TypeVar("Group")


@dataclass(frozen=True)
class Flag:
    """A field made by ``flag``. Its dataclass may give ``prefix``, and any of these, for all of its flags in FLAGS."""

    setting: str
    name: str  # "--zeropp-weight-bits"; None makes no flag, but a field of the library with choices and bounds
    value_type: type  # int for "int | None" and for each value of "tuple[int, ...]"; a bool is a switch
    default: Any
    help: str
    aliases: tuple[str, ...] = ()  # Megatron's names, where they say too little among ours
    choices: tuple[str, ...] | None = None
    nargs: int | str | None = None
    metavar: str | tuple[str, ...] | None = None
    needs: str | None = None  # the setting without which giving this flag is an error
    # Settings, or "setting=value", one of which a run must have for this flag to have an effect; a note says so.
    effective_with: str = ""
    # "stable"; "experimental"; "advanced", which tunes what works without it, as a flag does that another one enables.
    tier: str = "stable"
    # Words that the trainer requires but no plan depends on, if no flag with the same ones is given.
    in_plans: str = ""
    settles: str = ""  # the choice that a plan then takes as given: "wire", "layout", "recompute" or "micro-batch"
    # How a resume treats a value that differs from the checkpoint's. A flag's name: refuse, unless that flag is given.
    # "model", "compared": the model's config, or what follows from the value, is compared instead. "noted": it goes on
    # with a note, because the value changes what is learned. "free": it goes on.
    resume: str = "noted"
    first: str = ""  # the group of --help that shows this flag; others are in --help-all
    deepspeed: str = ""  # its keys in a DeepSpeed file, as "optimizer.params.lr"; deepspeed_keys.toml has the others
    zero_is_none: bool = False
    bounds: Bounds = dataclasses.field(default_factory=Bounds)

    def read(self, words: Sequence[str]) -> Any:
        """Convert the words after the flag to its value. Raises ValueError with what it must be and what it is."""
        if self.value_type is bool:
            expected = 0
        elif isinstance(self.nargs, int):
            expected = self.nargs
        else:
            expected = max(1, len(words)) if self.nargs == "+" else 1
        if len(words) != expected:
            takes = {0: "takes no value", 1: "takes one value"}.get(expected, f"takes {expected} values")
            raise ValueError(f"{takes}, got {' '.join(words) or 'none'}")
        values = [self.read_one(word) for word in words]
        return self.value_type is bool or (values[0] if self.nargs is None else values)

    def check(self, value: Any) -> None:
        """Raise ValueError, as "must be at least 1", unless the flag may have this value."""
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        if self.value_type is str and not value:
            raise ValueError("must not be empty")
        if self.metavar in PATHS and re.match(r"[a-z][a-z\d+.-]*:/", str(value), re.IGNORECASE):  # Path makes // a /
            if "URL" not in self.metavar:
                raise ValueError("must be a path on this machine (docs/how-to/buckets.md says how to mount a bucket)")
            if not is_url(str(value)):
                raise ValueError("must be a path or a URL, and a URL has two slashes, as s3://bucket/run")
            as_path(value)
        if self.value_type in _LARGEST and not (self.zero_is_none and value == 0):
            self.bounds.check(value)
            if self.bounds.at_most is None:
                Bounds(at_most=_LARGEST[self.value_type]).check(value)

    def typed(self, value: Any) -> str:
        """Return the flag with its value, as a user types it."""
        if isinstance(value, tuple):
            return " ".join([self.name, *map(str, value)])
        return self.name if value is True else f"{self.name} {0 if value is None else value}"

    def add_to(self, section: Any, required: bool = False) -> None:
        """Add the flag to a parser or group of argparse. A switch that is not given is None, as any other flag."""
        text = self.help + (f" ({self.bounds})" if str(self.bounds) else "")
        if self.default not in (None, False):
            text += f" (default: {self.default})"
        if self.tier == "experimental":
            text += " [experimental]"
        options: dict[str, Any] = {"action": "store_true"}
        if self.value_type is not bool:
            metavar = self.metavar or {int: "N", float: "X", str: "NAME"}[self.value_type]
            if self.choices is not None and len(self.choices) <= 6:
                metavar = f"{{{','.join(self.choices)}}}"
            elif self.choices is not None:
                text += f"; one of {', '.join(self.choices)}"
            options = {"type": _argparse_type(self), "nargs": self.nargs, "metavar": metavar}
        section.add_argument(self.name, help=text.replace("%", "%%"), default=None, required=required, **options)

    def read_one(self, word: str) -> Any:
        """Convert one word. Raises ValueError with what it must be and what it is."""
        try:
            try:
                value = self.value_type(word)
            except ValueError:
                raise ValueError(f"must be a {'whole ' if self.value_type is int else ''}number") from None
            self.check(value)
        except ValueError as error:
            raise ValueError(f"{error}, got {word or 'nothing'}") from None
        return value


def number(value_type: type, **bounds: float) -> Callable[[str], Any]:
    """Make the ``type`` of a tool's argparse flag: a number within ``Bounds``."""
    return _argparse_type(Flag("", "", value_type, None, "", bounds=Bounds(**bounds)))


def local_path(value_type: type) -> Callable[[str], Any]:
    """Make the ``type`` of a tool's argparse flag: a path on this machine, as a str or a Path."""
    return _argparse_type(Flag("", "", value_type, None, "", metavar="PATH"))


def path_or_url(word: str) -> str:
    """Check a tool's argument that may be in a bucket, as its ``type``."""
    return str(_argparse_type(Flag("", "", str, None, "", metavar="DIR|URL"))(word))


def _argparse_type(flag: Flag) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            return flag.read_one(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def setting_of(flag_name: str) -> str:
    """Return the setting's name: zeropp_weight_bits for --zeropp-weight-bits."""
    return flag_name.removeprefix("--").replace("-", "_")


def group_title(group: type[Any]) -> str:
    """Return a group's title in --help and on the page of flags: its docstring's first sentence."""
    return (group.__doc__ or "").partition(".")[0]


def iterate_flags(group: type[Any]) -> Iterator[Flag]:
    """Yield the flags of a group, in order.

    A field that holds another group or None, such as ZeroPPConfig.loco, is a switch, followed by that group's flags,
    which all need the switch.
    """
    for _, flag, inner in _flag_fields(group):
        yield flag
        if inner is not None:
            yield from (dataclasses.replace(part, needs=part.needs or flag.setting) for part in iterate_flags(inner))


def flags_of_fields(group: type[Any]) -> dict[str, str]:
    """Return {field: flag} of a group, but not of one inside it."""
    return {name: flag.name for name, flag, _ in _flag_fields(group)}


def flat_values(group: Any) -> dict[str, Any]:
    """Return {setting: value} of a group. If an inner group is None, its switch is False and the rest its defaults."""
    values: dict[str, Any] = {}
    for name, flag, inner in _flag_fields(type(group)):
        value = getattr(group, name)
        values[flag.setting] = value if inner is None else value is not None
        if inner is not None:
            values |= flat_values(inner() if value is None else value)
    return values


def group_from(group: type[Group], values: Mapping[str, Any]) -> Group:
    """Build a group from a run's settings, the inverse of ``flat_values``; missing ones get their defaults."""
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


def _read_fields(group: type[Any]) -> list[tuple[str, Flag, type[Any] | None]]:
    """Return name, flag and inner group, if it holds one, of each field that is a flag."""
    found = []
    hints = typing.get_type_hints(group)
    all_fields = [field for field in dataclasses.fields(group) if field.metadata]
    fields = {field.name: field for field in all_fields if field.metadata.get("name", "") is not None}
    of_all = dict(getattr(group, "FLAGS", {}))
    prefix = of_all.pop("prefix", "--")
    names = {name: field.metadata.get("name", prefix + name.replace("_", "-")) for name, field in fields.items()}
    for name, field in fields.items():
        value_type, default = _value_type(hints[name]), field.default
        inner = value_type if dataclasses.is_dataclass(value_type) else None
        if inner is not None:
            value_type, default = bool, default is not None
        needs = field.metadata.get("needs")
        tier = "advanced" if needs or "effective_with" in field.metadata else "stable"
        options = {"tier": tier, **of_all, **field.metadata, "name": names[name]}
        options["needs"] = setting_of(names[needs]) if needs else None
        found.append((name, Flag(setting_of(names[name]), value_type=value_type, default=default, **options), inner))
    return found


_flag_fields: Callable[[Any], list[tuple[str, Flag, type[Any] | None]]] = functools.cache(_read_fields)


def _value_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
