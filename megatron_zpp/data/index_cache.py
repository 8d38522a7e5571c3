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

# What shows a long build: takes a description and the rows to build, gives the function to tell of rows done.
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

    ``key`` must hold everything that the result depends on (JSON-serializable); it is kept as description.json.
    Where the folder can't be written the arrays stay in memory, after a warning. ``advance`` is to be called with the
    number of rows done, of ``rows`` in all.
    """
    description = json.dumps(key, indent=2, sort_keys=True)
    entry = folder / f"{name}-{hashlib.sha256(description.encode()).hexdigest()[:16]}"
    if entry.is_dir():
        return _load(entry)
    arrays: Arrays | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / ".lock"):
            if not entry.is_dir():
                arrays = _build(name, build, progress, rows)
                _save(entry, description, arrays)
        return _load(entry)
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


def _load(entry: Path) -> Arrays:
    # Plain arrays over the mapping: numpy's own class for it is slow to index.
    return {path.stem: np.load(path, mmap_mode="r").view(np.ndarray) for path in entry.glob("*.npy")}


def _save(entry: Path, description: str, arrays: Arrays) -> None:
    """Writes a folder beside ``entry`` and renames it: an entry is there completely or not at all."""
    partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        partial.chmod(0o755)  # mkdtemp's 0700 would shut out other users of a common cache
        for name, array in arrays.items():
            with open(partial / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        (partial / "description.json").write_text(description)
        with contextlib.suppress(FileExistsError):  # another node was faster on a common file system: same content
            partial.rename(entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        with contextlib.suppress(OSError):  # a file system without locks: ranks build side by side, results are equal
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
