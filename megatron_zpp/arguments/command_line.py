"""Read the words of the trainer's command line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.arguments import foreign_flags
from megatron_zpp.arguments.foreign_flags import EXPERTS, NOT_NEEDED, REFUSED, NotNeeded
from megatron_zpp.arguments.settings_file import nearest_flag, words_of_files
from megatron_zpp.settings.checks import Mistakes, SettingsError
from megatron_zpp.settings.flags import Flag
from megatron_zpp.settings.groups import flags_by_name


@dataclass
class CommandLine:
    """A command line's settings and foreign flags.

    given: {setting: value}. not_needed: the flags of ``foreign_flags`` that change nothing. translated: flags of
    ``TRANSLATED`` as typed, and what they are here.
    """

    given: dict[str, Any] = field(default_factory=dict)
    not_needed: dict[str, NotNeeded] = field(default_factory=dict)
    translated: dict[str, str] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Return a line for each flag with another name here, and for each reason why flags need no setting."""
        notes = [f"{typed} is {meaning or 'the only kind'} here" for typed, meaning in self.translated.items()]
        flags: dict[str, list[str]] = {}
        for name, flag in self.not_needed.items():
            flags.setdefault(flag.because, []).append(name)
        for because, names in flags.items():
            verbs = ("is", "needs") if len(names) == 1 else ("are", "need")
            notes.append(f"{', '.join(names)} {verbs[0]} accepted but {verbs[1]} no setting: {because}")
        return notes


def read_command_line(
    argv: Iterable[str], mistakes: Mistakes, presets: Mapping[str, Mapping[str, Any]] = {}
) -> CommandLine:
    """Read the files of --config, then the command line; the last of equal flags counts. Errors go to ``mistakes``."""
    line, typed, flags, refused = CommandLine(), _split(argv), flags_by_name(), dict[str, str]()
    files = [word for name, words in typed if flags.get(name) is flags["--config"] for word in words]
    in_files = _split(words_of_files(files, mistakes))
    has_experts = any(
        (name == EXPERTS and set(words) != {"1"})
        or (name == "--preset" and any("num_experts" in presets.get(word, {}) for word in words))
        for name, words in in_files + typed
    )
    for words_of in in_files, typed:
        _read_words(words_of, has_experts, line, refused, mistakes)
    for instead in dict.fromkeys(refused.values()):
        names = [name for name in refused if refused[name] == instead]
        mistakes.messages.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not supported: {instead}")
    names = [name for name, _ in in_files + typed]
    if has_experts and (unsaid := foreign_flags.deepspeed_expert_defaults(names, line.given)):
        line.translated["what Megatron-DeepSpeed's experts leave unsaid"] = unsaid
        _take_translated(line.given, "", unsaid, mistakes)
    return line


def _read_words(
    words_of: list[tuple[str, list[str]]],
    has_experts: bool,
    line: CommandLine,
    refused: dict[str, str],
    mistakes: Mistakes,
) -> None:
    """Read the words of all files, or of the command line, which override those that ``line`` has."""
    flags, given = flags_by_name(), dict[str, Any]()
    translated: dict[str, tuple[str, str]] = {}  # flag -> as typed, and what it is here
    for name, words in words_of:
        with mistakes.collected():
            if foreign_flags.describes_experts(name) and not has_experts:
                line.not_needed[name] = foreign_flags.WITHOUT_EXPERTS
            elif name == EXPERTS and len(words) > 1:  # Megatron-DeepSpeed's, of each block with experts
                numbers = [_value(flags[name], [word]) for word in words]
                given |= {"num_experts": max(numbers), "moe_experts_per_layer": ",".join(map(str, numbers))}
            elif (asked := " ".join([name, *words])) in REFUSED:  # this value alone
                refused[asked] = REFUSED[asked]
            elif name in flags:
                given[flags[name].setting] = _value(flags[name], words)
            elif name in foreign_flags.TRANSLATED:
                translated[name] = asked, foreign_flags.translate(name, words)
            elif name in NOT_NEEDED:
                _check_not_needed(name, words)
                line.not_needed[name] = NOT_NEEDED[name]
            elif name in REFUSED:
                refused[name] = REFUSED[name]
            elif foreign_flags.describes_experts(name):
                refused[name] = foreign_flags.NO_SUCH_EXPERTS
            elif name:
                raise SettingsError(f"unknown flag {name}; {nearest_flag(name)}")
            else:
                raise SettingsError(f"{' '.join(words)} belongs to no flag; see --help")
    for typed, meaning in translated.values():
        _take_translated(given, typed, meaning, mistakes)
    line.given |= given
    line.translated |= dict(translated.values())


def _take_translated(given: dict[str, Any], typed: str, meaning: str, mistakes: Mistakes) -> None:
    """Set what the words ``typed`` mean here."""
    flags = flags_by_name()
    for name, words in _split(meaning.split()):
        with mistakes.collected():
            value = _value(flags[name], words)
            if given.setdefault(flags[name].setting, value) != value:
                raise SettingsError(f"{typed} is {meaning} here, and {name} says otherwise; give one of them")


def _split(argv: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Pair each flag with the words after it or its "=word"; "" stands for words before any flag."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found.append((name, [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found if found[0][1] else found[1:]


def _value(flag: Flag, words: list[str]) -> Any:
    if flag.nargs is not None and words and words[0].startswith("[") and words[-1].endswith("]"):
        words = " ".join(words)[1:-1].replace(",", " ").split()  # a list, as in the YAML of Megatron's tests
    try:
        return flag.read(words)
    except ValueError as error:
        raise SettingsError(f"{flag.name} {error}") from None


def _check_not_needed(name: str, words: list[str]) -> None:
    flag, value = NOT_NEEDED[name], " ".join(words)
    if flag.accepted is None and words:
        raise SettingsError(f"{name} takes no value, got {value}")
    if flag.accepted and value not in flag.accepted:
        raise SettingsError(f"{name} {value} is not supported, only {' or '.join(flag.accepted)}: {flag.because}")
