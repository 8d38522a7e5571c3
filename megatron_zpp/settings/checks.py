"""SettingsError, which lists a user's mistakes, and the checks that raise it."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron_zpp.settings.groups import all_flags


class SettingsError(ValueError):
    """Flags, or keys of the DeepSpeed file, are wrong. Each of ``messages`` is one line that says what to do."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages)
        self.messages = messages

    def __str__(self) -> str:
        return "\n".join(self.messages)


class Mistakes:
    """Collects SettingsErrors, so that one start reports all mistakes."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep the messages of a SettingsError raised inside, and go on after the block."""
        try:
            yield
        except SettingsError as error:
            self.messages += error.messages

    @contextmanager
    def collected_unless_named(self) -> Iterator[None]:
        """Do the same, but drop messages that name a flag of an earlier one: they may be consequences."""
        wrong, later = flags_in(" ".join(self.messages)), Mistakes()
        with later.collected():
            yield
        self.messages += [message for message in later.messages if not wrong & flags_in(message)]

    def report(self) -> None:
        """Raise one SettingsError with all messages, each once."""
        if self.messages:
            raise SettingsError(*dict.fromkeys(self.messages))


def require(condition: object, message: str) -> None:
    if not condition:
        raise SettingsError(message)


def require_divides(flag: str, size: int, number: int, what: str) -> None:
    """Raise SettingsError that lists the divisors unless ``size`` divides ``number``, the count of ``what``."""
    uneven = f"{flag} {size} does not divide the {number} {what}; choose one of {list_divisors(number)}"
    require(number % size == 0, uneven)


def flags_in(message: str) -> set[str]:
    return set(re.findall(r"--[\w-]+", message))


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """Write flags in place of the names of fields in a config's message. flags: by field."""
    return re.sub(r"\w+", lambda word: flags.get(word[0], word[0]), message)


def flag_of(setting: str) -> str:
    """Return the flag that sets ``setting``: "--num-layers" for num_layers."""
    return all_flags()[setting].name


def divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def list_divisors(number: int) -> str:
    """Format the divisors for a message: "1, 2, 4"."""
    return ", ".join(map(str, divisors(number)))
