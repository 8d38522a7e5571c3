"""A user's mistakes: each is one line that says what to do."""

import argparse
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
REMEDIES = {  # errno: how a user can mend it
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
    text = str(error)
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        text = f"cannot access {error.filename}: {error.strerror}"  # without Python's number in front
    text = " ".join(text.split()) or type(error).__name__
    numbers = [each.errno for each in (error, error.__cause__) if isinstance(each, OSError)]
    remedy = next((REMEDIES[number] for number in numbers if number in REMEDIES), None)
    return f"{text} ({remedy})" if remedy and remedy not in text else text  # where it quotes an error, it says so


def messages_of(error: Exception) -> tuple[str, ...]:
    """Return the texts of an error, which may stand for several mistakes."""
    return getattr(error, "messages", (describe_error(error),))


@contextmanager
def attempt(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an OSError of this block say "cannot WHAT PATH: why", because errors of writes name no path.

    One of a block within says so already, and passes. What other packages raise in its place becomes one.
    """
    try:
        yield
    except Exception as error:
        cause = error.__context__ if type(error) is RuntimeError else error  # torch.save
        if number := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors, tokenizers
            cause = OSError(int(number[1]), os.strerror(int(number[1])))
        if not isinstance(cause, OSError) or cause.errno is None:
            raise
        of_other = cause.filename is not None and os.fspath(cause.filename) != os.fspath(path)
        where = f"{os.fspath(cause.filename)}: " if of_other else ""
        raise type(cause)(f"cannot {what} {os.fspath(path)}: {where}{cause.strerror}") from error


def output_folder(path: str) -> str:
    """Make the folder that a flag names, as its ``type``: a run that cannot write there ends at once."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(describe_error(error)) from None
    return path


def reports_errors(main: Callable[Arguments, int | None]) -> Callable[Arguments, int]:
    """Make a command's ``main`` return an exit status: after a user's mistake 2, with one line on stderr for each.

    After Ctrl-C it is 130, and 141 where nobody reads the output any more, as behind ``| head``.
    """

    @functools.wraps(main)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs) or 0
            finally:  # again, where ``main`` met an error of ``print``, which names no file
                with attempt("write to", "stdout"):
                    sys.stdout.flush()
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
