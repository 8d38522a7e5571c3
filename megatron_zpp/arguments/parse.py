"""From the command line to checked, frozen settings: ``parse_settings``.

Every field of the dataclasses in ``settings/groups.py`` is a flag. A value comes from, in this order: the flag, the
DeepSpeed file of ``--deepspeed_config`` (which may not contradict a flag), ``--preset``, the field's default. What is
then still open is derived from the other settings, and everything is checked, in ``resolve.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from megatron_zpp.architectures import ARCHITECTURES, Architecture
from megatron_zpp.arguments.deepspeed_config import DeepSpeedConfig, read_deepspeed_config
from megatron_zpp.arguments.foreign_flags import NOT_NEEDED, REFUSED
from megatron_zpp.arguments.resolve import check_needed, resolve
from megatron_zpp.settings.checks import SettingsError, flag_of
from megatron_zpp.settings.flags import Flag, group_from, group_title, iterate_flags
from megatron_zpp.settings.groups import Settings, all_flags, iterate_groups
from megatron_zpp.zeropp.config import ZeroPPConfig

__all__ = ["SettingsError", "build_parser", "parse_settings"]


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
    values, chosen = preset | config.values | given, given.keys() | config.values.keys()

    try:
        check_needed(values, chosen)
        settings = _into_groups(architecture.name, values)
        settings, notes = resolve(architecture, settings, chosen, world_size, config.accumulation_steps)
    except SettingsError as error:
        raise SettingsError(f"{error}{_where_from(str(error), config)}") from error
    for text in [*config.notes, *notes, *_foreign_notes(foreign, settings)]:
        note(text)
    return settings


# Flags


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises its errors instead of printing the usage of some hundred flags and exiting."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message.removeprefix("argument "))


def build_parser(architecture: Architecture) -> argparse.ArgumentParser:
    """The trainer's parser for one architecture. Flags that are not given leave no trace in its namespace."""
    # A trainer from outside of this package is no command of ours.
    trainer = f"-m megatron_zpp pretrain-{architecture.name}" if architecture in ARCHITECTURES else "%(prog)s"
    parser = _Parser(
        usage=f"%(prog)s [flags]\n       torchrun --nproc-per-node N {trainer} [flags]   for N ranks",
        description=f"Pretrain a {architecture.title} model with ZeRO++ on PyTorch FSDP2.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36),
    )
    for _, group in iterate_groups():
        section = parser.add_argument_group(group_title(group))
        for flag in iterate_flags(group):
            section.add_argument(flag.name, dest=flag.setting, help=_help(flag), **_value_options(flag))
    for name, foreign in NOT_NEEDED.items():
        action = "store_true" if foreign.accepted is None else "store"
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS, action=action)
    return parser


def _value_options(flag: Flag) -> dict[str, Any]:
    """How argparse reads the flag's values."""
    if flag.value_type is bool:
        return {"action": "store_true"}
    options: dict[str, Any] = {"type": flag.value_type, "choices": flag.choices, "nargs": flag.nargs}
    if flag.choices is None:
        options["metavar"] = flag.metavar or {int: "N", float: "X", str: "NAME"}[flag.value_type]
    return options


def _help(flag: Flag) -> str:
    text = flag.help
    if flag.default not in (None, False):
        text += f" (default: {flag.default})"
    return text.replace("%", "%%")


def _check_flag_names(argv: Iterable[str]) -> None:
    """Refuse, before anything else is looked at, the flags that do not exist here, and name those that do."""
    known = [*(flag.name for flag in all_flags().values()), *NOT_NEEDED]
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
    for name in given.keys() & config.values.keys():
        if given[name] != config.values[name]:
            raise SettingsError(
                f"{_as_typed(flag_of(name), given[name])} contradicts {config.origins[name]} of {config.path}; "
                "make them equal or leave one out"
            )


def _where_from(message: str, config: DeepSpeedConfig) -> str:
    """For an error that names flags: which of them were not typed, but stand in the DeepSpeed file."""
    named = re.findall(r"--[\w-]+", message)
    keys = [config.origins[name] for name, flag in all_flags().items() if name in config.origins and flag.name in named]
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
    """Settings from a flat {setting: value}. Raises SettingsError where those of ZeRO++ do not fit together."""
    unknown = values.keys() - all_flags().keys()
    assert not unknown, f"no setting is called {', '.join(unknown)}"
    try:
        groups = {attribute: group_from(group, values) for attribute, group in iterate_groups()}
    except ValueError as error:  # only ZeRO++'s checks itself when it is made
        raise SettingsError(f"ZeRO++ settings: {_with_flags(str(error))}") from error
    return Settings(architecture=architecture, **groups)


def _with_flags(message: str) -> str:
    """A message of ZeroPPConfig with its flags in place of its fields' names."""
    flags = {field.name: field.metadata["name"] for field in dataclasses.fields(ZeroPPConfig) if field.metadata}
    return re.sub(r"\w+_\w+", lambda word: flags.get(word[0], word[0]), message)
