"""How the tools end: with what they say, or with one line about a user's mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable


def report_errors(
    program: Callable[[], int | None],
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError),
    status: int = 1,
) -> int:
    """Run ``program`` and return its exit status; None is 0. One of ``kinds`` is printed, and is ``status``."""
    try:
        return program() or 0
    except kinds as error:
        for text in getattr(error, "messages", (error,)):  # a SettingsError may stand for several
            print(f"error: {text}", file=sys.stderr)
        return status
