"""Failing writes of logs, TensorBoard and profiles, on a full disk or a closed pipe, do not end a run."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron_zpp.errors import describe_error

RETRY_SECONDS = 60.0


class Attempts:
    """Attempts to write to one place: the first failure is a warning. retries: the next attempt is a minute later."""

    def __init__(self, place: str, retries: bool = True) -> None:
        self.place, self.retries = place, retries
        self._has_failed, self._next = False, 0.0

    def __call__(self, work: Callable[[], object], kinds: type[Exception] = Exception) -> bool:
        """Do ``work`` and return whether it succeeded. Other packages raise anything, so every Exception counts."""
        if time.monotonic() < self._next:
            return False
        try:
            work()
        except kinds as error:
            self._next = time.monotonic() + RETRY_SECONDS
            if not self._has_failed:
                self._has_failed = True
                text = " ".join(str(error).split())
                again = f", and tries again every {RETRY_SECONDS:g} s" if self.retries else ""
                warning = f"warning: {self.place} cannot be written ({text}): training goes on without it{again}"
                print(warning, file=sys.stderr, flush=True)
            return False
        return True


class LastingStream:
    """stdout or stderr, which loses what it cannot write. The first failure is a warning on the other one."""

    def __init__(self, stream: Any, descriptor: int) -> None:
        self._stream, self._descriptor, self._has_failed = stream, descriptor, False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (OSError, ValueError) as error:  # ValueError: closed
            if not self._has_failed:
                self._has_failed = True
                name, other = ("stdout", sys.stderr) if self._descriptor == 1 else ("stderr", sys.stdout)
                with suppress(OSError):  # not on Linux
                    name += f" ({os.readlink(f'/proc/self/fd/{self._descriptor}')})"
                warning = f"warning: {name} cannot be written ({describe_error(error)}): training goes on without it"
                print(warning, file=other, flush=True)


def keep_streams() -> None:
    """Let no failing write to stdout or stderr end this program, and report one of a background thread in a line."""
    threading.excepthook = _report_thread
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed at the start: the next file that is opened would take its place
            try:
                os.fstat(descriptor)
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        setattr(sys, name, LastingStream(getattr(sys, name), descriptor))


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Report what a background thread failed of, such as TensorBoard's on a full disk; other errors as Python does."""
    if isinstance(failed.exc_value, OSError):
        print(f"warning: a background thread ended: {describe_error(failed.exc_value)}", file=sys.stderr, flush=True)
    else:
        threading.__excepthook__(failed)
