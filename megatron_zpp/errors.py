"""A user's mistakes: each is one line that says what to do."""

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

from megatron_zpp.files import attempt, explain

Arguments = ParamSpec("Arguments")
REMEDIES = {  # what a user may do about an error of the operating system
    errno.ENOENT: "check the path",
    errno.EACCES: "check who may read and write it",
    errno.EPERM: "check who may read and write it",
    errno.EEXIST: "something else is there: move it, or give another path",
    errno.ENOTDIR: "a part of the path is a file: give another path",
    errno.EISDIR: "give a file, not a folder",
    errno.ELOOP: "a link of the path leads to itself: remove it",
    errno.EROFS: "give a path on a disk that can be written",
    errno.ENOSPC: "free some space, or give a path on another disk",
    errno.EDQUOT: "free some space, or give a path on another disk",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EADDRINUSE: "another program listens there: end it, or give another port",
    errno.EADDRNOTAVAIL: "give an address of this machine",
}


def describe_error(error: BaseException) -> str:
    """Format an error as one line, with what to do about one of the operating system."""
    text = " ".join(explain(error).split()) or type(error).__name__
    numbers = [each.errno for each in (error, error.__cause__) if isinstance(each, OSError)]
    remedy = next((REMEDIES[number] for number in numbers if number in REMEDIES), None)
    return f"{text} ({remedy})" if remedy else text


def messages_of(error: Exception) -> tuple[str, ...]:
    """Return the texts of an error, which may stand for several mistakes, as a SettingsError does."""
    return getattr(error, "messages", (describe_error(error),))


def reports_errors(main: Callable[Arguments, int | None]) -> Callable[Arguments, int]:
    """Make a command's ``main`` return an exit status: after a user's mistake 2, with one line on stderr for each.

    After Ctrl-C it is 130, and 141 where nobody reads the output any more, as behind ``| head``.
    """

    @functools.wraps(main)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            status = main(*args, **kwargs) or 0
            with attempt("write to", "stdout"):
                sys.stdout.flush()
            return status
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        except BrokenPipeError:
            _discard_stdout()
            return 128 + signal.SIGPIPE
        except (ValueError, OSError, ImportError) as error:
            if "stdout" in str(error):
                _discard_stdout()
            for text in messages_of(error):
                print(f"error: {text}", file=sys.stderr)
            return 2

    return run


def _discard_stdout() -> None:
    """Let the interpreter end without a second report of what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
