"""Files that a user names or that somebody may have changed: opened with care, and named in errors."""

import errno
import fcntl
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

PATIENCE_SECONDS = 10.0  # for a lock of a job that is just ending
_LOCKED: list[BinaryIO] = []  # never closed: closing any file of one that is locked would give up the lock
LARGEST_TEXT = 64 * 2**20  # bytes
_MODES = {"rb": os.O_RDONLY, "wb": os.O_WRONLY | os.O_CREAT, "r+b": os.O_RDWR | os.O_CREAT}
_MODES["a+b"] = _MODES["r+b"] | os.O_APPEND
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def open_regular(
    path: Path, mode: Literal["rb", "wb", "r+b", "a+b"] = "rb", refusal: type[ValueError] = ValueError
) -> BinaryIO:
    """Open a regular file; all modes but "rb" create a missing one.

    Refuses links, which lead out of the folder, and pipes and devices, which may never end. Raises ``refusal`` for
    these, and OSError as ``open`` does.
    """
    with suppress(FileNotFoundError):
        _check_regular(path, os.lstat(path), mode, refusal)
    # Also refuses what became a link or a pipe since then, without blocking.
    descriptor = os.open(path, _MODES[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _check_regular(path, os.fstat(descriptor), mode, refusal)
        if mode == "wb":
            os.ftruncate(descriptor, 0)
        return os.fdopen(descriptor, mode)  # type: ignore[return-value]
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(path: Path, status: os.stat_result, mode: str, refusal: type[ValueError]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise refusal(f"{path} is {kind}, not a regular file, and is not opened")
    if mode != "rb" and status.st_nlink > 1:
        raise refusal(f"{path} is a file that has another name too (a hard link): remove it here")


def regular_file(path: str | os.PathLike[str]) -> Path:
    """``path`` if it is a file that can be read twice, and that no reader waits for as for a pipe.

    Raises FileNotFoundError, or ValueError where it is something else.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")
    return path


def open_lock(path: str | os.PathLike[str]) -> BinaryIO:
    """An empty file to lock, made where it is missing. Neither follows a link nor waits for a pipe's other end."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "rb")


def lock_for_process(file: BinaryIO, folder: str | os.PathLike[str], others: str, patience: float = 0.0) -> bool:
    """Lock a file of ``folder`` until this process ends; return False after a note if the file system has no locks.

    POSIX locks: unlike flock's they are not inherited by loader processes, which may outlive a killed rank. others:
    what nobody else may do there, for the note. Raises BlockingIOError if another process still has the lock after
    ``patience`` seconds, in which a job that is just ending gives it up.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _LOCKED.append(file)
            return True
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                place = os.fspath(folder)
                print(f"note: {place} knows no locks ({error.strerror}): let no other {others} there", flush=True)
                return False
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() >= deadline:
                raise BlockingIOError(error.errno, error.strerror) from None
        time.sleep(0.2)


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 text that somebody names. Raises OSError, or ValueError for no regular file, no UTF-8, too large."""
    file = regular_file(path)
    if (size := file.stat().st_size) > LARGEST_TEXT:
        raise ValueError(f"{file} has {size:,} bytes; the limit is {LARGEST_TEXT:,}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises OSError, or ValueError where it is none."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is not JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{os.fspath(path)} is JSON that is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"{os.fspath(path)} holds no JSON object but a {type(value).__name__}")
    return value


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object, as its ``object_pairs_hook``. Raises ValueError for a key that is there twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)} is there twice")
    return result
