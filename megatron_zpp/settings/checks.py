"""The error of a user who asked for something that cannot be, and the checks that raise it."""

from __future__ import annotations

from typing import Any

from megatron_zpp.settings.groups import all_flags


class SettingsError(ValueError):
    """A flag, or a key of the DeepSpeed file, is wrong. The message is one line that says what to do."""


def require(condition: bool, message: str) -> None:
    """Raise SettingsError unless ``condition`` holds."""
    if not condition:
        raise SettingsError(message)


def check_at_least(group: Any, minimum: float, *names: str) -> None:
    """Raise SettingsError for a field of ``group`` that is set and below ``minimum``."""
    for name in names:
        value = getattr(group, name)
        require(value is None or value >= minimum, f"{flag_of(name)} must be at least {minimum}, got {value}")


def flag_of(setting: str) -> str:
    """The flag that sets ``setting``: "--num-layers" for num_layers."""
    return all_flags()[setting].name


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
