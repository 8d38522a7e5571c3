"""Keeps index arrays on disk, so that a node builds them once and its ranks share them by memory mapping.

No file system needs to be shared: every rank loads or builds by itself, and gets the same arrays wherever it runs.
Ranks that see the same folder wait for the one that builds.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_zpp.data.indices import Advance, Arrays
from megatron_zpp.errors import describe_error
from megatron_zpp.files import cache_folder, is_url, open_lock, read_json_object, regular_file

# Shows a long build: takes a description and the number of rows, returns the function to call with rows done.
Progress = Callable[[str, int], AbstractContextManager[Advance]]


def no_progress(description: str, rows: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda done: None)


@dataclass(frozen=True)
class IndexCache:
    path: str | None = None  # folder of the entries; None: one beside the data
    progress: Progress = no_progress

    def arrays(
        self, prefix: str, name: str, key: dict[str, Any], build: Callable[[Advance], Arrays], rows: int
    ) -> Arrays:
        """Load the arrays of ``build(advance)`` for the data at ``prefix``, or build and save them.

        ``key`` must hold everything that the result depends on. A damaged entry is built again, and if the folder can't
        be written, the arrays stay in memory, after a warning. ``build`` calls ``advance`` with the number of ``rows``
        done.
        """
        digest = hashlib.sha256(json.dumps(key, indent=2, sort_keys=True).encode()).hexdigest()
        folder = cache_folder() if is_url(prefix) else Path(prefix).parent / "index_cache"
        folder = Path(self.path) if self.path else folder
        entry = folder / f"{name}-{digest[:16]}"
        arrays = _load(entry, key)
        if arrays is not None:
            return arrays
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open_lock(folder / ".lock") as lock:
                with contextlib.suppress(OSError):  # without locks, ranks build side by side with equal results
                    fcntl.flock(lock, fcntl.LOCK_EX)
                arrays = _load(entry, key)  # built by another rank while this one waited
                if arrays is not None:
                    return arrays
                if entry.exists():
                    warnings.warn(f"{entry} is damaged: it is built again", stacklevel=2)
                arrays = _build(name, build, self.progress, rows)
                _save(entry, key, arrays)
                return _load(entry, key) or arrays  # without locks, another node may be replacing the entry
        except OSError as error:
            warnings.warn(
                f"can't cache {name} in {folder} ({describe_error(error)}), so it is kept in memory; "
                f"--data-cache-path chooses another folder",
                stacklevel=2,
            )
            return _build(name, build, self.progress, rows) if arrays is None else arrays


def _build(name: str, build: Callable[[Advance], Arrays], progress: Progress, rows: int) -> Arrays:
    with progress(f"building the index {name}", rows) as advance:
        return build(advance)


def _load(entry: Path, key: dict[str, Any]) -> Arrays | None:
    """Load an entry whose files have the digests that were written: these also detect a disk that lost bits."""
    try:
        description = read_json_object(entry / "description.json")
        if description["key"] != json.loads(json.dumps(key)):
            return None
        for name, digest in description["sha256"].items():
            with open(regular_file(entry / f"{name}.npy"), "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return None
        return {name: _map(entry / f"{name}.npy") for name in description["sha256"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no entry, or a damaged description
        return None


class _Mapped(np.ndarray):
    """An array that a process maps, and another maps again. numpy's own memmap is slow to index and is copied."""

    path: Path  # slices and copies have none

    def __reduce__(self) -> Any:
        return (_map, (self.path,)) if hasattr(self, "path") else super().__reduce__()


def _map(path: Path) -> _Mapped:
    array = np.load(path, mmap_mode="r").view(_Mapped)
    array.path = path
    return array


def _save(entry: Path, key: dict[str, Any], arrays: Arrays) -> None:
    """Write a folder beside ``entry`` and rename it, so that an entry exists completely or not at all."""
    partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        partial.chmod(0o755)  # mkdtemp's 0700 would shut out other users of a common cache
        digests = {}
        for name, array in arrays.items():
            with open(partial / f"{name}.npy", "w+b") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        description = {"key": key, "sha256": digests}
        (partial / "description.json").write_text(json.dumps(description, indent=2, sort_keys=True))
        if entry.is_dir():  # damaged
            entry.rename(partial / "damaged")
        else:
            entry.unlink(missing_ok=True)
        try:
            partial.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
            # On a common file system without locks, another node was faster: the content is the same.
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(entry / "damaged", ignore_errors=True)
