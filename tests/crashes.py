"""Crashes at every change of files: a process that is killed there, and a machine that loses its power there."""

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


Tree = dict[str, bytes | None]  # by path: a file's content, None of a folder


class Disk:
    """What may be left of a folder when the power fails while work is done in it.

    On the disk for sure is what was brought there by ``fsync``: the content of a file, the names in a folder. What else
    has changed is there or not, each change of a folder's names by itself (a rename is one), in any order; a file that
    was not brought there may be empty. ``states`` collects every tree of files that could be found, and ``final`` the
    numbers of those that could still be when the work is done.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.states: list[Tree] = []
        self.final: set[int] = set()
        self._numbers: dict[tuple[tuple[str, bytes | None], ...], int] = {}  # numbers of the states
        self._durable: dict[int, dict[str, int]] = {}  # {folder: {name: file}}
        self._pending: dict[int, list[dict[str, int | None]]] = {}  # changes of them since then, None: removed
        self._content: dict[int, bytes] = {}  # {file: its bytes}
        self._held: dict[int, int] = {}  # a descriptor of each, so that no number is used again
        for folder, _, files in os.walk(root):
            for path in (Path(folder), *(Path(folder) / name for name in files)):
                self._sync(path)

    def record(self, work: Callable[[], Any]) -> None:
        with before_each_change(self._before):
            work()
        self._observe()
        self.final = self._crash()

    def _before(self, change: str, *arguments: Any, dir_fd: int | None = None, **more: Any) -> None:
        paths = [_path_of(argument, dir_fd) for argument in arguments[: 2 if change in ("rename", "replace") else 1]]
        if not paths[0].is_relative_to(self.root):
            return
        self._observe()
        self._crash()
        path = paths[0]
        if change == "fsync":
            self._sync(path)
        elif change in ("rename", "replace"):
            assert path.parent == paths[1].parent, "a rename from one folder to another is two changes"
            changed = {path.name: None, paths[1].name: os.lstat(path).st_ino}
            self._pending[os.stat(path.parent).st_ino].append(changed)
        elif change in ("unlink", "rmdir"):
            self._pending[os.stat(path.parent).st_ino].append({path.name: None})

    def _sync(self, path: Path) -> None:
        number = self._hold(path)
        if path.is_dir():
            self._durable[number] = {name: self._hold(path / name) for name in os.listdir(path)}
            self._pending[number] = []
        else:
            self._content[number] = path.read_bytes()

    def _hold(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        number = os.fstat(descriptor).st_ino
        if self._held.setdefault(number, descriptor) != descriptor:
            os.close(descriptor)
        return number

    def _observe(self) -> None:
        """Take in the names that are new: files and folders that were made since the last change."""
        for folder, folders, files in os.walk(self.root):
            number = os.stat(folder).st_ino
            self._durable.setdefault(number, {})
            names = self._names(number, self._pending.setdefault(number, []))
            for name in (*folders, *files):
                made = self._hold(Path(folder) / name)
                if names.get(name) != made:
                    self._pending[number].append({name: made})

    def _names(self, number: int, changes: list[dict[str, int | None]]) -> dict[str, int]:
        names: dict[str, int | None] = dict(self._durable[number])
        for change in changes:
            names |= change
        return {name: inode for name, inode in names.items() if inode is not None}

    def _crash(self) -> set[int]:
        """Collect what may be found if the power fails now; the numbers of these states."""
        found = set()
        folders = [number for number in self._reachable() if self._pending[number]]
        for kept in itertools.product(*(_subsets(self._pending[number]) for number in folders)):
            chosen = dict(zip(folders, kept, strict=True))
            for lost in (False, True):
                tree: Tree = {}
                self._collect(os.stat(self.root).st_ino, "", chosen, lost, tree)
                number = self._numbers.setdefault(tuple(sorted(tree.items())), len(self.states))
                if number == len(self.states):
                    self.states.append(tree)
                found.add(number)
        return found

    def _reachable(self) -> set[int]:
        """Folders that a name may still stand for."""
        found: set[int] = set()
        inodes: list[int | None] = [os.stat(self.root).st_ino]
        while inodes:
            inode = inodes.pop()
            if inode in self._durable and inode not in found:
                found.add(inode)
                inodes += self._durable[inode].values()
                inodes += itertools.chain.from_iterable(change.values() for change in self._pending[inode])
        return found

    def _collect(self, number: int, path: str, kept: dict[int, Any], lost: bool, tree: Tree) -> None:
        for name, inode in self._names(number, kept.get(number, [])).items():
            if inode in self._durable:
                tree[f"{path}{name}"] = None
                self._collect(inode, f"{path}{name}/", kept, lost, tree)
            elif lost:
                tree[f"{path}{name}"] = self._content.get(inode, b"")
            else:
                tree[f"{path}{name}"] = self._current(inode)

    def _current(self, inode: int) -> bytes:
        descriptor = self._held[inode]
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)


def _subsets(changes: list[dict[str, int | None]]) -> list[list[dict[str, int | None]]]:
    """None, all, each alone, all but one, and the first so many: enough to see any two in the wrong order."""
    count = range(len(changes))
    kept = [[], changes, *([changes[i]] for i in count), *(changes[:i] + changes[i + 1 :] for i in count)]
    kept += [changes[:i] for i in count]
    return [subset for i, subset in enumerate(kept) if subset not in kept[:i]]


def _path_of(argument: Any, dir_fd: int | None) -> Path:
    if isinstance(argument, int):
        return Path(os.readlink(f"/proc/self/fd/{argument}"))
    return Path(os.fsdecode(argument)) if dir_fd is None else _path_of(dir_fd, None) / os.fsdecode(argument)


def write_tree(tree: Tree, folder: Path) -> None:
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
