"""Files of settings: read ``--config run.toml`` as the words of a command line, and write a run's settings so."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_zpp.arguments.foreign_flags import NOT_NEEDED, REFUSED, TRANSLATED, describes_experts
from megatron_zpp.errors import describe_error
from megatron_zpp.families import find_architecture
from megatron_zpp.files import read_text, without_duplicates
from megatron_zpp.settings.checks import Mistakes, SettingsError
from megatron_zpp.settings.flags import Flag, flat_values
from megatron_zpp.settings.groups import Settings, all_flags, flags_by_name
from megatron_zpp.zeropp.config import ZeroPPConfig
from megatron_zpp.zeropp.recipes import RECIPES

_TYPED_ONLY = ("config", "print_config", "dry_run", "dry_run_world_size")  # they choose an action, not how to train


def words_of_files(paths: Iterable[str], mistakes: Mistakes) -> list[str]:
    """Return what the settings of the files are on a command line; the last file with a setting wins.

    A table or mapping inside a file is a section: its name means nothing. ``false`` leaves a switch off, and null a
    setting to its default. Errors go to ``mistakes``.
    """
    settings: dict[str, Any] = {}
    for path in paths:
        with mistakes.collected():
            settings |= _read(path, mistakes)
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list):
            words += [name, *map(str, value)]
        elif value is not None and value is not False:
            words += [name] if value is True else [f"{name}={value}"]
    return words


def _read(path: str, mistakes: Mistakes) -> dict[str, Any]:
    """Return {flag: value} of a file. Raises SettingsError if it cannot be read; wrong keys go to ``mistakes``."""
    try:
        text = read_text(path)
        content = tomllib.loads(text) if path.endswith(".toml") else _parse_yaml(path, text)
    except OSError as error:
        raise SettingsError(f"--config: {describe_error(error)}; give a .toml or .yaml file of settings") from error
    except (TypeError, ValueError, RecursionError) as error:  # invalid TOML, or bytes that are not text
        raise SettingsError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path} must hold settings, such as num-layers: 4")
    found: dict[str, Any] = {}
    for key, value in _flatten(content):
        with mistakes.collected():
            name = _flag_of_key(key, path)
            if name in found:
                raise SettingsError(f"{key} is in {path} twice; leave one out")
            known = flags_by_name().get(name)
            if value is False and known is not None and known.value_type is not bool:  # as YAML reads off and no
                raise SettingsError(f"{key} in {path} is false, but takes a value: give one, in quotes if it is a word")
            found[name] = value
    return found


def _parse_yaml(path: str, text: str) -> Any:
    if not path.endswith((".yaml", ".yml")):
        raise SettingsError(f"--config {path} is neither .toml nor .yaml: rename it")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError(f"--config {path} needs the package PyYAML: pip install pyyaml, or write TOML") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            return without_duplicates(
                [(self.construct_object(k), self.construct_object(v, True)) for k, v in node.value]
            )

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _flatten(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value)
        else:
            yield str(key), value


def _flag_of_key(key: str, path: str) -> str:
    """Return the flag of a key, which is its name without dashes in front, or the setting's. Raises SettingsError."""
    setting, flags = key.replace("-", "_"), all_flags()
    name = flags[setting].name if setting in flags else f"--{key.replace('_', '-')}"
    known = flags_by_name().get(name)
    if known is not None and known.setting in _TYPED_ONLY:
        raise SettingsError(f"{key} in {path} says what to do, not how to train: give {name} on the command line")
    if known is not None or name in (*NOT_NEEDED, *TRANSLATED, *REFUSED) or describes_experts(name):
        return name
    raise SettingsError(f"{key} in {path} is no setting; {nearest_flag(name).replace('mean --', 'mean ')}")


def nearest_flag(name: str) -> str:
    """Suggest a flag in place of one that does not exist: "did you mean --lr?"."""
    known = [*flags_by_name(), *NOT_NEEDED, *TRANSLATED]
    nearest = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.8)
    return (f"did you mean {nearest[0]}?" if nearest else "see --help") + " (CHANGELOG.md lists flags that went)"


def changed_settings(settings: Settings) -> Iterator[tuple[Flag, Any]]:
    """Yield each flag whose value is not its default, with the value, but for flags that say what to do.

    Left out too: what is derived for a flag whose switch is off, because it would be refused.
    """
    values, defaults = settings.as_flat_dict(), Settings(settings.architecture).as_flat_dict()
    # A preset and a recipe fill these in wherever they are read, so they are yielded at their defaults too.
    filled = set(find_architecture(settings.architecture).preset(values["preset"])) if values["preset"] else set()
    if values["zeropp"] in RECIPES:
        recipe, plain = flat_values(RECIPES[values["zeropp"]].config(2)), flat_values(ZeroPPConfig())
        filled |= {name for name in recipe if recipe[name] != plain[name]}
    for name, flag in all_flags().items():
        can_be_given = name not in _TYPED_ONLY and (flag.needs is None or values[flag.needs])
        is_told = values[name] != defaults[name] or (name in filled and values[name] not in (None, False))
        if is_told and can_be_given:
            yield flag, values[name]


def format_settings(settings: Settings) -> str:
    """Write settings as TOML that ``--config`` reads."""
    return "".join(f"{flag.name[2:]} = {_toml(value)}\n" for flag, value in changed_settings(settings))


def _toml(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(0 if value is None else value, ensure_ascii=False)  # None is a flag's 0
