"""Crashes at every change of files: a process that is killed there, and the order that survives a power failure."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHANGES = ("replace", "rename", "fsync", "truncate", "unlink", "rmdir", "mkdir")


@contextlib.contextmanager
def before_each_change(call: Callable[..., None]) -> Iterator[None]:
    """Call ``call(name, *arguments, **more)`` before each change that os makes to files."""
    originals = {name: getattr(os, name) for name in CHANGES}

    def wrapped(name: str) -> Callable[..., Any]:
        def change(*arguments: Any, **more: Any) -> Any:
            call(name, *arguments, **more)
            return originals[name](*arguments, **more)

        return change

    try:
        for name in CHANGES:
            setattr(os, name, wrapped(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def run_killed(work: Callable[[], Any], fatal: int) -> int | None:
    """Do ``work`` in a process that is killed before its ``fatal``-th change of files; None if it came to its end."""
    pid = os.fork()
    if pid == 0:
        calls = itertools.count(1)

        def count(*arguments: Any, **more: Any) -> None:
            if next(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with before_each_change(count):
                work()
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if status else None


def state_of(path: Path) -> set[object]:
    """Return the names in a folder, or a file as it was last written: an fsync of the path brings these to the disk."""
    if path.is_dir():
        return {(child.name, child.stat().st_ino) for child in path.iterdir()}
    return {path.stat().st_mtime_ns}


def check_order_of_changes(root: Path, work: Callable[[], Any]) -> None:
    """Do ``work``, and assert that a power failure at any time leaves the old files below ``root`` or the new ones.

    A power failure may undo what no fsync brought to the disk. So nothing is renamed before all of it is there, nothing
    is replaced or deleted while an earlier rename may be undone, and when the work is done nothing may be.
    """
    on_disk = {path.stat().st_ino: state_of(path) for path in (root, *root.rglob("*"))}
    unsure: set[Path] = set()  # folders with renames that may be undone

    def is_on_disk(path: Path) -> bool:
        return all(state_of(each) <= on_disk.get(each.stat().st_ino, set()) for each in (path, *path.rglob("*")))

    def check(change: str, *arguments: Any, dir_fd: int | None = None, **more: Any) -> None:
        path = _path_of(arguments[0], dir_fd)
        if not path.is_relative_to(root):
            return
        if change in ("replace", "unlink", "rmdir"):
            assert not unsure, f"{change} of {path}: before it, renames in {unsure} may be undone"
        if change == "fsync":
            on_disk[path.stat().st_ino] = state_of(path)
            unsure.discard(path)
        elif change in ("rename", "replace"):
            assert is_on_disk(path), f"{path} is renamed before all of it is on the disk"
            unsure.add(path.parent)

    with before_each_change(check):
        work()
    assert is_on_disk(root) and not unsure


def _path_of(argument: Any, dir_fd: int | None) -> Path:
    if isinstance(argument, int):
        return Path(os.readlink(f"/proc/self/fd/{argument}"))
    return Path(os.fsdecode(argument)) if dir_fd is None else _path_of(dir_fd, None) / os.fsdecode(argument)
