"""Helpers for commands. Imports torch only for a command that needs a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_zpp.families import Architecture


def report_errors(
    program: Callable[[], int | None],
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError),
    status: int = 1,
) -> int:
    """Run ``program`` and return its exit status. Print an error of ``kinds`` in one line and return ``status``."""
    try:
        return program() or 0
    except kinds as error:
        for text in getattr(error, "messages", (error,)):  # a SettingsError may have several
            print(f"error: {text}", file=sys.stderr)
        return status


def given_architecture(args: argparse.Namespace) -> Architecture | None:
    """Load the architecture that ``--architecture`` names; None without the flag. Raises ValueError."""
    from megatron_zpp.families import load_architecture

    return load_architecture(args.architecture) if args.architecture else None
