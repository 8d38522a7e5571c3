"""The error of a user who asked for something that cannot be, and the checks that raise it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
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
    """Collects SettingsErrors, so that a user hears of all mistakes at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """What a SettingsError that is raised inside says is kept, and the program goes on behind."""
        try:
            yield
        except SettingsError as error:
            self.messages += error.messages

    @contextmanager
    def collected_unless_named(self) -> Iterator[None]:
        """The same, but for what names a flag that was wrong before: it may be no more than a consequence."""
        wrong, later = flags_in(" ".join(self.messages)), Mistakes()
        with later.collected():
            yield
        self.messages += [message for message in later.messages if not wrong & flags_in(message)]

    def report(self) -> None:
        """Raise one SettingsError with all that was collected, each once."""
        if self.messages:
            raise SettingsError(*dict.fromkeys(self.messages))


def require(condition: bool, message: str) -> None:
    """Raise SettingsError unless ``condition`` holds."""
    if not condition:
        raise SettingsError(message)


def flags_in(message: str) -> set[str]:
    """The flags that a message names."""
    return set(re.findall(r"--[\w-]+", message))


def flag_of(setting: str) -> str:
    """The flag that sets ``setting``: "--num-layers" for num_layers."""
    return all_flags()[setting].name


def divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
