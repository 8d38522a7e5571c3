"""A folder of checkpoints: which are complete, which one is the latest, and who may write there.

    SAVE/latest_checkpointed_iteration.txt   the iteration, as in Megatron
    SAVE/iter_0000100/*.safetensors          tensors, a file or more of each rank
    SAVE/iter_0000100/index.json             where each tensor's parts are
    SAVE/iter_0000100/meta.json              readable: settings, counters, versions, size and digest of every file
    SAVE/iter_0000100/complete               digest of meta.json; written last
    SAVE/lock                                held by the job that saves here

A checkpoint is written beside, as ``iter_0000100.incomplete``, and renamed when everything is on the disk; only then
does the text file name it. The folder must be on storage that all nodes share.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

LATEST = "latest_checkpointed_iteration.txt"
META, INDEX, MARKER, LOCK = "meta.json", "index.json", "complete", "lock"
INCOMPLETE, REPLACED = ".incomplete", ".replaced"
_META_TYPES: dict[str, Any] = {
    "iteration": int,
    "world_size": int,
    "has_optimizer": bool,
    "has_rng": bool,
    "zeropp": (dict, type(None)),
    "settings": dict,
    "model_config": dict,
    "counters": dict,
    "schedule": (dict, type(None)),
    "loss_scaler": dict,
    "files": dict,
}


class CheckpointError(ValueError):
    """A checkpoint that is not one, is damaged, or belongs to another model. One line that says what to do."""


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    return Path(folder) / f"iter_{iteration:07d}"


def is_complete(checkpoint: Path) -> bool:
    return (checkpoint / MARKER).is_file()


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """All complete checkpoints of a folder, oldest first. Says nothing about damage."""
    paths = [path for path in Path(folder).glob("iter_*") if re.fullmatch(r"iter_\d+", path.name) and is_complete(path)]
    return sorted(paths, key=iteration_of)


def iteration_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("iter_"))


def find_checkpoint(folder: str, iteration: int | None = None) -> Path | None:
    """The folder of one checkpoint under ``folder``: the latest, or that of ``iteration``; None if there is none yet.

    Raises CheckpointError when ``folder`` holds something else, or the checkpoint it names is not there.
    """
    root = Path(folder)
    if not root.exists():
        return None
    if not root.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder of checkpoints: give --load what was given to --save")
    if iteration is None:
        iteration = _latest_iteration(root)
        if iteration is None:
            return None
    checkpoint = checkpoint_path(root, iteration)
    if not is_complete(checkpoint):
        there = [path.name for path in complete_checkpoints(root)]
        raise CheckpointError(
            f"{checkpoint} is not a complete checkpoint; complete ones in {folder}: {', '.join(there) or 'none'}; take "
            "one with --ckpt-step, or the newest good one with --load-latest-good"
        )
    return checkpoint


def candidates(folder: str) -> list[Path]:
    """Checkpoints that a run may go on from, damaged ones too, newest first: none that is newer than the latest one.

    (Newer ones are left over from a run that was taken back to an earlier iteration.)
    """
    paths = [path for path in Path(folder).glob("iter_*") if re.fullmatch(r"iter_\d+", path.name)]
    try:
        latest = _latest_iteration(Path(folder))
    except (CheckpointError, OSError):
        latest = None
    paths = [path for path in paths if latest is None or iteration_of(path) <= latest]
    return sorted(paths, key=iteration_of, reverse=True)


def _latest_iteration(root: Path) -> int | None:
    """What the text file says; None where no checkpoint has been saved. Raises CheckpointError."""
    tracker = root / LATEST
    if not tracker.exists():
        # Folders of TensorBoard and wandb may be there before the first checkpoint is.
        if any(path.is_file() or is_complete(path) for path in root.iterdir() if path.name != LOCK):
            raise CheckpointError(
                f"{root} holds no checkpoint (it has files, but no {LATEST}): give --load what was given to --save"
            )
        return None
    text = tracker.read_bytes()[:40].decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise CheckpointError(
            f"{tracker} should hold an iteration, not {text!r}: write the number of one there, or take the newest good "
            "checkpoint with --load-latest-good"
        )
    return int(text)


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """The readable part of a checkpoint, checked against the marker. Raises CheckpointError."""
    path = checkpoint / META
    try:
        text = path.read_bytes()
        if digest(text) != (checkpoint / MARKER).read_text().strip():
            raise ValueError(f"its digest is not the one in {MARKER}")
        meta = json.loads(text)
        _check_meta(meta)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {_REMEDY}") from error
    return meta


_REMEDY = "load another checkpoint with --ckpt-step, or the newest good one with --load-latest-good"


def _check_meta(meta: Any) -> None:
    """Raise ValueError unless every value that a run relies on is of its kind, and files are plain names."""
    if not isinstance(meta, dict):
        raise ValueError("it holds no JSON object")
    missing = _META_TYPES.keys() - meta.keys()
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    for key, kind in _META_TYPES.items():
        if not isinstance(meta[key], kind):
            raise ValueError(f"{key} is {meta[key]!r}"[:200])
    for key, value in meta["counters"].items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"the counter {key} is {value!r}"[:200])
    for name, entry in meta["files"].items():
        if not is_plain_name(name):
            raise ValueError(f"it names the file {name!r}, which is not in the checkpoint"[:200])
        if not (
            isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        ):
            raise ValueError(f"size and digest of {name} are missing")


def is_plain_name(name: Any) -> bool:
    """Whether a name that was read from a checkpoint stays in its folder."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


def open_in(checkpoint: Path, name: str) -> BufferedReader:
    """Open a file of a checkpoint for reading; raises CheckpointError for what leads out of its folder."""
    path = checkpoint / name
    if not is_plain_name(name) or path.is_symlink():
        raise CheckpointError(f"{path} is not a plain file of the checkpoint, and is not followed: {_REMEDY}")
    return path.open("rb")


# Writing


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, and return when it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when renames and new names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin(folder: str | Path, iteration: int) -> Path:
    """A fresh folder to write a checkpoint in."""
    final = checkpoint_path(folder, iteration)
    incomplete = final.with_name(final.name + INCOMPLETE)
    final.parent.mkdir(parents=True, exist_ok=True)
    if incomplete.exists():
        shutil.rmtree(incomplete)
    incomplete.mkdir()
    return incomplete


def finish(incomplete: Path, index: Mapping[str, Any], meta: dict[str, Any], files: dict[str, dict[str, Any]]) -> Path:
    """Complete a checkpoint whose tensors are on the disk, and name it the latest. Returns its folder.

    files: size and SHA-256 of every file of tensors, by name.
    """
    root, final = incomplete.parent, incomplete.with_name(incomplete.name.removesuffix(INCOMPLETE))
    _wait_for_files(incomplete, files)
    text = json.dumps(index, separators=(",", ":")).encode()
    write_durably(incomplete / INDEX, text)
    files = files | {INDEX: {"bytes": len(text), "sha256": digest(text)}}
    text = (json.dumps(meta | {"files": files}, indent=1) + "\n").encode()
    write_durably(incomplete / META, text)
    write_durably(incomplete / MARKER, digest(text).encode() + b"\n")
    sync_folder(incomplete)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():  # of a run that was taken back to an earlier iteration
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    incomplete.rename(final)
    sync_folder(root)
    partial = root / (LATEST + INCOMPLETE)
    write_durably(partial, f"{iteration_of(final)}\n".encode())
    os.replace(partial, root / LATEST)
    sync_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _wait_for_files(folder: Path, files: dict[str, dict[str, Any]], seconds: float = 30.0) -> None:
    """Other nodes' files may take a moment to be seen here; raises OSError for those that never are."""
    deadline = time.monotonic() + seconds
    for name, entry in files.items():
        path = folder / name
        while not (path.exists() and path.stat().st_size == entry["bytes"]):
            if time.monotonic() > deadline:
                raise OSError(
                    f"{path} was written by another node and is not seen here: --save must be on storage that all "
                    "nodes share"
                )
            time.sleep(0.2)


def retain(folder: str | Path, keep_last: int | None, interval: int | None) -> None:
    """Delete complete checkpoints but the latest ``keep_last`` and those at multiples of ``interval``.

    None and None: nothing is deleted. Only what is older than the latest one, which must have been written.
    """
    if keep_last is None:
        return
    latest = _latest_iteration(Path(folder))
    older = [path for path in complete_checkpoints(folder) if latest is not None and iteration_of(path) < latest]
    for path in older[: len(older) - (keep_last - 1)]:
        if interval is None or iteration_of(path) % interval:
            # Under another name first, so that a half-deleted one is never taken for a checkpoint.
            doomed = path.with_name(path.name + REPLACED)
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


class FolderLock:
    """The right to save in a folder: one job's at a time, and given up by the system when the process ends."""

    def __init__(self, folder: str, patience: float = 10.0) -> None:
        """Take it, waiting ``patience`` seconds for a job that is just ending. Raises CheckpointError, OSError."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        # POSIX locks: unlike flock's they are not inherited by loader processes, which may outlive a killed rank.
        self._file = (root / LOCK).open("a+")
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    self._file.seek(0)
                    holder = self._file.read(200).strip() or "another process"
                    self._file.close()
                    raise CheckpointError(
                        f"{folder} is in use by another job ({holder}), which saves there: give --save another folder, "
                        "or end that job"
                    ) from None
                time.sleep(0.2)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                print(f"note: {folder} knows no locks ({error.strerror}): let no other job save there", flush=True)
                return
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        self._file.flush()
        _clear(root)

    def release(self) -> None:
        self._file.close()


def _clear(root: Path) -> None:
    """Remove what a killed job left half-done; nobody else writes here."""
    for path in root.glob(f"iter_*{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if is_complete(path) and not original.exists():
            path.rename(original)  # killed between the two renames of ``finish``
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f"iter_*{INCOMPLETE}"):
        shutil.rmtree(path, ignore_errors=True)
    (root / (LATEST + INCOMPLETE)).unlink(missing_ok=True)
