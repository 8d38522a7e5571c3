"""From the command line to checked, frozen settings: ``parse_settings``.

Every field of the dataclasses in ``settings.py`` is a flag. A value comes from, in this order: the flag, the DeepSpeed
file of ``--deepspeed_config`` (which may not contradict a flag), ``--preset``, the field's default. What is then still
open is derived from the other settings, and everything is checked, in ``resolve.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from megatron_zpp.architectures import ARCHITECTURES, Architecture
from megatron_zpp.arguments.deepspeed_config import DeepSpeedConfig, read_deepspeed_config
from megatron_zpp.arguments.foreign_flags import NOT_NEEDED, REFUSED
from megatron_zpp.arguments.resolve import resolve
from megatron_zpp.settings.checks import SettingsError
from megatron_zpp.settings.groups import Settings

__all__ = [
    "SettingsError",
    "all_flags",
    "build_parser",
    "flag_name",
    "iterate_flags",
    "iterate_groups",
    "parse_settings",
]


def note_on_first_rank(text: str) -> None:
    """Print a note for the user to stderr, once per run: on the rank that torchrun calls 0, or without torchrun."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr, flush=True)


def parse_settings(
    architecture: Architecture,
    argv: Sequence[str] | None = None,
    world_size: int = 1,
    note: Callable[[str], None] = note_on_first_rank,
) -> Settings:
    """All settings of a run, complete and checked.

    architecture: the kind of model that the program trains. argv: default ``sys.argv[1:]``. world_size: ranks of
    the run, all data-parallel. note: receives one line for each flag or key that was accepted but changes nothing.

    Raises SettingsError, with one line that says what to do. ``--help`` prints and raises SystemExit(0). Needs no
    process group, and reads no file but that of ``--deepspeed_config``.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    _check_flag_names(argv)
    given = vars(build_parser(architecture).parse_args(argv))
    foreign = {name: given.pop(name) for name in list(given) if name.startswith("--")}

    config = read_deepspeed_config(given["deepspeed_config"]) if "deepspeed_config" in given else DeepSpeedConfig()
    _check_agreement(given, config)
    preset = _preset(architecture, given["preset"]) if "preset" in given else {}
    settings = _into_groups(architecture.name, preset | config.values | given)

    try:
        settings, notes = resolve(
            architecture, settings, given.keys() | config.values.keys(), world_size, config.accumulation_steps
        )
    except SettingsError as error:
        raise SettingsError(f"{error}{_where_from(str(error), config)}") from error
    for text in [*config.notes, *notes, *_foreign_notes(foreign, settings)]:
        note(text)
    return settings


# Flags


def iterate_groups() -> Iterator[tuple[str, type[Any]]]:
    """Each group's attribute of Settings and its dataclass, in order."""
    for attribute, group in typing.get_type_hints(Settings).items():
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            yield attribute, group


def iterate_flags(group: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], type]]:
    """Each field of a group with the type of one value: int for "int | None" and "tuple[int, ...]"."""
    hints = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        yield field, _value_type(hints[field.name])


def all_flags() -> dict[str, str]:
    """{field name: flag} of all groups; field names are unique over them."""
    return {field.name: flag_name(field) for _, group in iterate_groups() for field in dataclasses.fields(group)}


def flag_name(field: dataclasses.Field[Any]) -> str:
    """The flag that sets ``field``: "--num-layers" for num_layers."""
    return field.metadata["name"] or "--" + field.name.replace("_", "-")


def _value_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors instead of printing the usage of some hundred flags and exiting."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message.removeprefix("argument "))


def build_parser(architecture: Architecture) -> argparse.ArgumentParser:
    """The parser of ``architecture.script``. Flags that are not given leave no trace in its namespace."""
    parser = _Parser(
        usage="%(prog)s [flags]   (torchrun --nproc-per-node N %(prog)s [flags] for N ranks)",
        description=f"Pretrain a {architecture.title} model with ZeRO++ on PyTorch FSDP2.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36),
    )
    for _, group in iterate_groups():
        section = parser.add_argument_group((group.__doc__ or "").partition(".")[0])
        for field, value_type in iterate_flags(group):
            section.add_argument(
                flag_name(field), dest=field.name, help=_help(field), **_value_options(field, value_type)
            )
    for name, flag in NOT_NEEDED.items():
        action = "store_true" if flag.accepted is None else "store"
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS, action=action)
    return parser


def _value_options(field: dataclasses.Field[Any], value_type: type) -> dict[str, Any]:
    """How argparse reads the flag's values."""
    if value_type is bool:
        return {"action": "store_true"}
    metadata = field.metadata
    options: dict[str, Any] = {"type": value_type, "choices": metadata["choices"], "nargs": metadata["nargs"]}
    if metadata["choices"] is None:
        options["metavar"] = metadata["metavar"] or {int: "N", float: "X", str: "NAME"}[value_type]
    return options


def _help(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["help"]
    if field.default not in (None, False):
        text += f" (default: {field.default})"
    return text.replace("%", "%%")


def _check_flag_names(argv: Iterable[str]) -> None:
    """Refuse, before anything else is looked at, the flags that do not exist here, and name those that do."""
    known = [*all_flags().values(), *NOT_NEEDED]
    for token in argv:
        name = token.partition("=")[0]
        if not name.startswith("--") or name in (*known, "--help", "--"):
            continue
        if name in REFUSED:
            raise SettingsError(f"{name} is not supported: {REFUSED[name]}")
        nearest = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "see --help"
        raise SettingsError(f"unknown flag {name}; {hint}")


def _foreign_notes(foreign: dict[str, Any], settings: Settings) -> Iterator[str]:
    """One line for each flag that needs no setting here; refused where what it asks for is not so."""
    for name, value in foreign.items():
        flag = NOT_NEEDED[name]
        if flag.accepted is not None and value not in flag.accepted:
            raise SettingsError(f"{name} {value} is not supported, only {' or '.join(flag.accepted)}: {flag.because}")
        if flag.holds is not None and not flag.holds(settings):
            raise SettingsError(f"{name} does not hold for this run: {flag.because}")
        yield f"{name} is accepted but needs no setting: {flag.because}"


# Values


def _check_agreement(given: dict[str, Any], config: DeepSpeedConfig) -> None:
    """A value stated both by a flag and in the DeepSpeed file must be the same one."""
    flags = all_flags()
    for name in given.keys() & config.values.keys():
        if given[name] != config.values[name]:
            raise SettingsError(
                f"{_as_typed(flags[name], given[name])} contradicts {config.origins[name]} of {config.path}; "
                "make them equal or leave one out"
            )


def _where_from(message: str, config: DeepSpeedConfig) -> str:
    """For an error that names flags: which of them were not typed, but stand in the DeepSpeed file."""
    words = message.replace(",", " ").replace(";", " ").split()
    keys = [config.origins[name] for name, flag in all_flags().items() if name in config.origins and flag in words]
    return f" ({', '.join(keys)} in {config.path})" if keys else ""


def _as_typed(flag: str, value: Any) -> str:
    return flag if value is True else f"{flag} {value}"


def _preset(architecture: Architecture, name: str) -> dict[str, Any]:
    """The settings of a published model, by field name."""
    other = next((other for other in ARCHITECTURES if name in other.presets), architecture)
    if name not in architecture.presets and other is not architecture:
        raise SettingsError(f"--preset {name} is for {other.script}")
    return architecture.preset(name)


def _into_groups(architecture: str, values: dict[str, Any]) -> Settings:
    """Settings from a flat {field name: value}; field names are unique over all groups."""
    groups: dict[str, Any] = {}
    for attribute, group in iterate_groups():
        names = [field.name for field in dataclasses.fields(group)]
        chosen = {name: values.pop(name) for name in names if name in values}
        # argparse makes lists; frozen settings hold tuples
        groups[attribute] = group(**{name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()})
    assert not values, f"no setting is called {', '.join(values)}"
    return Settings(architecture=architecture, **groups)
