"""Helpers of the commands. Imports torch only for a command that needs a model."""

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
    """Run ``program`` and return its exit status. An error of ``kinds`` is printed in one line and gives ``status``."""
    try:
        return program() or 0
    except kinds as error:
        for text in getattr(error, "messages", (error,)):  # a SettingsError may stand for several
            print(f"error: {text}", file=sys.stderr)
        return status


def given_architecture(args: argparse.Namespace) -> Architecture | None:
    """Load what ``--architecture`` names; None without it. Raises ValueError."""
    from megatron_zpp.families import load_architecture

    return load_architecture(args.architecture) if args.architecture else None
