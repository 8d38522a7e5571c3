"""Index arrays on disk, so that a node builds them once and its ranks share them by memory mapping.

No file system needs to be shared: every rank calls ``cached_arrays`` by itself, and gets the same arrays wherever it
runs. Ranks that see the same folder wait for the one that builds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from megatron_zpp.data.indices import Advance, Arrays
from megatron_zpp.files import open_lock, read_json_object, regular_file

# What shows a long build: takes a description and the rows to build, gives the function to call with rows done.
Progress = Callable[[str, int], AbstractContextManager[Advance]]


def no_progress(description: str, rows: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda done: None)


def cached_arrays(
    folder: Path,
    name: str,
    key: dict[str, Any],
    build: Callable[[Advance], Arrays],
    progress: Progress = no_progress,
    rows: int = 1,
) -> Arrays:
    """The arrays of ``build(advance)``, from ``folder/name-DIGEST/`` if they are there, else built and saved there.

    ``key`` must hold everything that the result depends on (JSON-serializable). A damaged entry is built again, after
    a warning. Where the folder can't be written the arrays stay in memory, after a warning. ``advance`` is to be
    called with the number of rows done, of ``rows`` in all.
    """
    digest = hashlib.sha256(json.dumps(key, indent=2, sort_keys=True).encode()).hexdigest()
    entry = folder / f"{name}-{digest[:16]}"
    found = _load(entry, key)
    if found is not None:
        return found
    arrays: Arrays | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / ".lock"):
            found = _load(entry, key)  # built by another rank while this one waited
            if found is not None:
                return found
            if entry.exists():
                warnings.warn(f"{entry} is damaged: it is built again", stacklevel=2)
            arrays = _build(name, build, progress, rows)
            _save(entry, key, arrays)
            found = _load(entry, key)
        return arrays if found is None else found  # None: without locks, another node may just be replacing it
    except OSError as error:
        warnings.warn(
            f"can't cache {name} in {folder} ({error}), so it is kept in memory; "
            f"--data-cache-path chooses another folder",
            stacklevel=2,
        )
        return _build(name, build, progress, rows) if arrays is None else arrays


def _build(name: str, build: Callable[[Advance], Arrays], progress: Progress, rows: int) -> Arrays:
    with progress(f"building the index {name}", rows) as advance:
        return build(advance)


def _load(entry: Path, key: dict[str, Any]) -> Arrays | None:
    """The arrays of an entry, if each file is what was written: the digest also shows a disk that lost some bits."""
    try:
        description = read_json_object(entry / "description.json")
        if description["key"] != json.loads(json.dumps(key)):
            return None
        for name, digest in description["sha256"].items():
            with open(regular_file(entry / f"{name}.npy"), "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return None
        # Plain arrays over the mapping: numpy's own class for it is slow to index.
        return {name: np.load(entry / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in description["sha256"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no such entry, or a damaged description
        return None


def _save(entry: Path, key: dict[str, Any], arrays: Arrays) -> None:
    """Writes a folder beside ``entry`` and renames it: an entry is there completely or not at all."""
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
        elif entry.exists():
            entry.unlink()
        try:
            partial.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
            # Another node was faster on a common file system without locks: same content.
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(entry / "damaged", ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open_lock(path) as file:
        with contextlib.suppress(OSError):  # a file system without locks: ranks build side by side, results are equal
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
