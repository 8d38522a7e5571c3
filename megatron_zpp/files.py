"""Files that a user names or that somebody may have changed: opened with care, and named in errors.

``as_path`` turns what a user gave into a Path, or for a URL into a ``BucketPath``, which has the same methods.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO, Literal, cast

PATIENCE_SECONDS = 10.0  # for a lock of a job that is just ending
_LOCKED: list[BinaryIO] = []  # never closed: closing any file of one that is locked would give up the lock
LARGEST_TEXT = 64 * 2**20  # bytes
_MODES = {"rb": os.O_RDONLY, "wb": os.O_WRONLY | os.O_CREAT, "r+b": os.O_RDWR | os.O_CREAT}
_MODES["a+b"] = _MODES["r+b"] | os.O_APPEND
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class RequestError(OSError):
    """A request to an object store failed, which says nothing about the object. The message is one line."""


def is_url(text: object) -> bool:
    return isinstance(text, str) and re.match(r"[a-z][a-z\d+.-]*://", text, re.IGNORECASE) is not None


def is_bucket(path: Path) -> bool:
    return isinstance(path, BucketPath)


def lexists(path: Path) -> bool:
    """Return whether something has this name, be it a link that leads nowhere."""
    return path.exists() if is_bucket(path) else os.path.lexists(path)


def as_path(text: str | os.PathLike[str]) -> Path:
    """Return the Path of a local name, and the ``BucketPath`` of a URL. Raises ValueError for one that is unknown."""
    if not is_url(name := os.fspath(text)):
        return Path(text)
    if re.match("(file|local):", name, re.IGNORECASE):
        raise ValueError("must be a path on this machine without file://, or a bucket's URL")
    import fsspec  # takes 50 ms

    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(name))
    except (ImportError, ValueError) as error:
        hint = "pip install s3fs for s3://, gcsfs for gs://, huggingface_hub for hf://"
        raise ValueError(f"must be a URL that fsspec can open ({error}; {hint})") from error
    return cast(Path, BucketPath(name))


class BucketPath(PurePosixPath):
    """A path in an object store, as ``s3://bucket/run``: the methods of Path that this package uses, by fsspec.

    A request that fails raises RequestError. Nothing is renamed or locked, and a folder exists while an object
    is in it. An object appears whole, when the block of its ``open`` ends without an error.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)  # PurePosixPath makes // a /

    @contextmanager
    def _requests(self, what: str) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's file system and the name in it. Raises FileNotFoundError, RequestError."""
        import fsspec

        try:
            # S3 may refuse pieces of different sizes. The Hub's file system would not see what another rank wrote.
            options = {"s3": {"fixed_upload_size": True}, "hf": {"skip_instance_cache": True}}.get(str(self)[:2], {})
            yield fsspec.url_to_fs(str(self), use_listings_cache=False, **options)
        except ValueError:
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), error.filename or str(self)) from error
        except Exception as error:  # botocore's and others' errors are no OSErrors
            fsspec.get_filesystem_class(fsspec.utils.get_protocol(str(self))).clear_instance_cache()
            cause = " ".join(str(error).split()) or type(error).__name__
            hint = "check its name, the network and your credentials, which the next try reads again"
            raise RequestError(f"cannot {what} {self}: {cause} ({hint})") from error

    def _info(self) -> dict[str, Any]:
        with self._requests("look for") as (system, name), suppress(FileNotFoundError):
            return cast(dict[str, Any], system.info(name))
        return {"type": "nothing"}

    def exists(self) -> bool:
        return bool(self._info()["type"] != "nothing")

    def is_file(self) -> bool:
        return bool(self._info()["type"] == "file")

    def is_dir(self) -> bool:
        return bool(self._info()["type"] == "directory")

    def stat(self) -> SimpleNamespace:
        """Return the size, and as the time the object's version. Raises FileNotFoundError."""
        with self._requests("look for") as (system, name):
            info = system.info(name)
        return SimpleNamespace(st_size=info["size"], st_mtime_ns=hashlib.sha256(str(info).encode()).hexdigest())

    def iterdir(self) -> Iterator[BucketPath]:
        with self._requests("list") as (system, name):
            names = [PurePosixPath(child).name for child in system.ls(name, detail=False) if child != name]
        yield from (self / child for child in names)

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Yield what matches. fsspec's own, like its ``exists``, finds nothing where a request fails."""
        first, _, rest = pattern.partition("/")
        with suppress(FileNotFoundError):
            for child in self.iterdir():
                if fnmatchcase(child.name, first):
                    yield from child.glob(rest) if rest else [child]

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[BinaryIO]:
        """Open for reading, or for writing in pieces of 64 MiB; a write that ends a piece waits for its upload."""
        with self._requests("read" if mode == "rb" else "write") as (system, name):
            file = system.open(name, mode, block_size=2**23 if mode == "rb" else 2**26)
            try:
                yield file
            except BaseException:
                with suppress(Exception):
                    file.discard()
                with suppress(Exception):
                    file.closed = True  # or its destructor would upload what there is
                raise
            file.close()

    def unlink(self, missing_ok: bool = True) -> None:
        with self._requests("delete") as (system, name), suppress(FileNotFoundError):
            system.rm_file(name)

    def remove_tree(self) -> None:
        """Delete all objects below this name; there may be none."""
        with self._requests("delete") as (system, name), suppress(FileNotFoundError):
            system.rm(name, recursive=True)


def read_range(path: Path, start: int, end: int) -> bytes:
    """Read bytes ``start`` to ``end`` of a file or an object, fewer at its end."""
    if isinstance(path, BucketPath):
        with path._requests("read") as (system, name):
            return cast(bytes, system.cat_file(name, start=start, end=end)) if end > start else b""
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), end - start, start)


def local_copy(path: Path) -> Path:
    """Return this machine's copy of an object, which other processes find again; ``path`` itself if it is local."""
    if not is_bucket(path):
        return path
    version = hashlib.sha256(f"{path} {path.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    copy = cache_folder() / f"{path.stem}-{version}{path.suffix}"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=copy.parent, delete=False) as new, path.open("rb") as file:
            shutil.copyfileobj(file, new)
        os.replace(new.name, copy)
    return copy


def cache_folder() -> Path:
    """Return this user's folder for what can be made again from a bucket."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "megatron_zpp"


def open_regular(
    path: Path, mode: Literal["rb", "wb", "r+b", "a+b"] = "rb", refusal: type[ValueError] = ValueError
) -> BinaryIO:
    """Open a regular file; all modes but "rb" create a missing one.

    Refuses links, which lead out of the folder, and pipes and devices, which may never end. Raises ``refusal`` for
    these, and OSError as ``open`` does. An object of a bucket must be closed by a ``with``.
    """
    if is_bucket(path):
        return cast(BinaryIO, path.open(mode))
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
