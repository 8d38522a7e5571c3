"""A user's mistakes: each is one line that says what to do."""

import errno
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

Arguments = ParamSpec("Arguments")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of writes, in which Python names no file
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
    text = " ".join(str(error).split()) or type(error).__name__
    remedy = REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{text} ({remedy})" if remedy else text


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name ``path`` in the OSError of a full disk, a quota or a limit: Python names no file there.

    Errors of Rust, which safetensors and tokenizers raise, become an OSError: "No space left on device (os error 28)".
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError):
            if error.errno in NO_ROOM and error.filename is None:
                error.filename = os.fspath(path)
        elif number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), os.fspath(path)) from error
        raise


def reports_errors(main: Callable[Arguments, int | None]) -> Callable[Arguments, int]:
    """Make a command's ``main`` return an exit status: after a user's mistake 2, with one line on stderr for each.

    After Ctrl-C it is 130, and 141 where nobody reads the output any more, as behind ``| head``.
    """

    @functools.wraps(main)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            status = main(*args, **kwargs) or 0
            with writing("stdout"):
                sys.stdout.flush()
            return status
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        except BrokenPipeError:
            _discard_stdout()
            return 128 + signal.SIGPIPE
        except (ValueError, OSError, ImportError) as error:
            if getattr(error, "filename", None) == "stdout":
                _discard_stdout()
            for text in getattr(error, "messages", (describe_error(error),)):  # a SettingsError may have several
                print(f"error: {text}", file=sys.stderr)
            return 2

    return run


def _discard_stdout() -> None:
    """Let the interpreter end without a second report of what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
