"""Folders of checkpoints: find the complete ones and the latest, write new ones, and lock the folder.

    SAVE/latest_checkpointed_iteration.txt   the iteration, as in Megatron
    SAVE/iter_0000100/*.safetensors          tensors, one file per rank
    SAVE/iter_0000100/index.json, shards.bin where each tensor's shards are
    SAVE/iter_0000100/meta.json              settings, counters, versions, size and digest of every file
    SAVE/iter_0000100/complete               digest of meta.json; written last
    SAVE/settings.toml                       the last run's settings, for --config
    SAVE/metrics.jsonl                       points of the run, unless --metrics-dir or --tensorboard-dir has them
    SAVE/lock                                held by the job that saves here

A checkpoint is written to ``iter_0000100.incomplete``, and renamed when everything is on the disk; then the text file
names it. The folder must be on storage that all nodes share. SAVE and iter_* may be links; links to files are refused.

SAVE may be a URL. A bucket cannot rename, so a checkpoint is written to ``iter_0000100``, and counts only with its
marker: an upload that was cut short has none, and a save of the same iteration deletes it. A bucket has no locks.
"""

import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_zpp.files import PATIENCE_SECONDS, BucketPath, as_path, is_bucket, lexists, lock_for_process
from megatron_zpp.metrics.history import METRICS
from megatron_zpp.parallel.flight_record import FILES

from .files import CheckpointError, digest, make_folder, open_regular, sync_folder, write_durably
from .meta import FORMAT, MARKER, META, REMEDY, nonfinite, read_meta

LATEST = "latest_checkpointed_iteration.txt"
LOCK = "lock"
SETTINGS = "settings.toml"
INCOMPLETE, REPLACED, DELETED = ".incomplete", ".replaced", ".deleted"


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    return as_path(folder) / f"iter_{iteration:07d}"


def _incomplete(final: Path) -> Path:
    """Return where a checkpoint is written."""
    return final if is_bucket(final) else final.with_name(final.name + INCOMPLETE)


def is_complete(checkpoint: Path) -> bool:
    return (checkpoint / MARKER).is_file()


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """List the complete checkpoints of a folder, oldest first. They may be damaged."""
    return [path for path in _checkpoints(folder) if is_complete(path)]


def _checkpoints(folder: str | Path, latest: float = math.inf) -> list[Path]:
    """List all, also damaged ones and uploads that were cut short, up to the iteration ``latest``, oldest first."""
    paths = [path for path in as_path(folder).glob("iter_*") if re.fullmatch(r"iter_[0-9]+", path.name)]
    return sorted((path for path in paths if iteration_of(path) <= latest), key=iteration_of)


def iteration_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("iter_"))


def find_checkpoint(folder: str, iteration: int | None = None) -> Path | None:
    """Find the latest checkpoint in ``folder``, or the one of ``iteration``; None if there is none yet.

    Raises CheckpointError if ``folder`` holds something else, or lacks the checkpoint that it names.
    """
    root = as_path(folder)
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder of checkpoints: give --load what was given to --save")
    if iteration is None and (not root.exists() or (iteration := _latest_iteration(root)) is None):
        return None
    checkpoint = checkpoint_path(root, iteration)
    if not is_complete(checkpoint):
        if root.exists():
            refuse_foreign(root)
        there = ", ".join(path.name for path in complete_checkpoints(root)) or "none"
        if there == "none" and not checkpoint.exists():
            raise CheckpointError(f"{folder} holds no checkpoint, and so none of iteration {iteration}")
        raise CheckpointError(f"{checkpoint} is not a complete checkpoint; complete ones: {there}; {REMEDY}")
    for path in _checkpoints(root) if is_bucket(root) else ():
        if iteration_of(path) > iteration and not is_complete(path):
            print(f"note: passed over {path}: its upload was cut short, or still goes on", flush=True)
    return checkpoint


def require_checkpoint(folder: str, iteration: int | None = None) -> Path:
    """Find a checkpoint as ``find_checkpoint`` does. Raises CheckpointError if there is none."""
    checkpoint = find_checkpoint(folder, iteration)
    if checkpoint is None:
        raise CheckpointError(f"{folder} holds no checkpoint: give what was given to --save in training")
    return checkpoint


def candidates(folder: str) -> list[Path]:
    """List what a run may resume from, damaged ones too, newest first, up to the one that the text file names."""
    latest = None
    with suppress(CheckpointError):
        latest = _latest_iteration(as_path(folder))
    return _checkpoints(folder, math.inf if latest is None else latest)[::-1]


def _latest_iteration(root: Path) -> int | None:
    """Read the text file, or without it find the newest; None before the first save. Raises CheckpointError."""
    tracker = root / LATEST
    if not lexists(tracker):  # a job may die in its first save after the rename
        if complete := complete_checkpoints(root):
            return iteration_of(complete[-1])
        refuse_foreign(root)
        return None
    with open_regular(tracker) as file:
        text = file.read(40).decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9]{1,12}", text):
        refuse_foreign(root)
        raise CheckpointError(f"{tracker} should hold an iteration, not {text!r}: write one, or use --load-latest-good")
    latest = int(text)
    if is_bucket(root) and not is_complete(checkpoint_path(root, latest)):  # a job died as it saved this one again
        older = [iteration_of(path) for path in complete_checkpoints(root) if iteration_of(path) < latest]
        latest = max(older, default=latest)
    return latest


def describe_empty(folder: str) -> str:
    """Tell a user that a run starts from scratch, and warn if ``folder`` has files (not just metrics)."""
    root = as_path(folder)
    files = [path.name for path in root.iterdir() if path.is_file()] if root.is_dir() else []
    if any(name not in (LOCK, SETTINGS, METRICS) and not name.startswith(FILES) for name in files):
        return f"WARNING: {folder} has files, but no {LATEST} and no checkpoint: starting from scratch"
    return f"no checkpoint in {folder} yet: starting from scratch"


# Checkpoints of other programs

KINDS = {  # description, and a file that only this kind has
    "torch_dist": ("Megatron-LM (--ckpt-format torch_dist)", "common.pt"),
    "torch": ("Megatron-LM (--ckpt-format torch)", "mp_rank_*/model_optim_rng.pt"),
    "universal": ("DeepSpeed, a universal one", "zero/*/fp32.pt"),
    "deepspeed": ("DeepSpeed", "*mp_rank_*_model_states.pt"),
}


def kind_of(checkpoint: Path) -> str | None:
    """Return the kind of ``KINDS`` that a folder is a checkpoint of, by its file names alone."""
    return next((kind for kind, (_, pattern) in KINDS.items() if _has(checkpoint, pattern)), None)


def refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` holds checkpoints of another program, or is itself one of ours."""
    if (folder / META).exists() and (folder / MARKER).exists():
        raise CheckpointError(f"{folder} is one checkpoint: give --load the folder that it is in, and --ckpt-step")
    folders = (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
    import_hf = "with tools/import_hf.py, and load that with --finetune"
    if kind := next(filter(None, map(kind_of, folders)), None):
        what = f"a checkpoint of {KINDS[kind][0]}: convert it with python tools/import_megatron.py --input {folder}"
        raise CheckpointError(f"{folder} holds {what} --save NEW, and give --load NEW")
    if _has(folder, ".metadata", "*/.metadata", "*.distcp", "*/*.distcp"):
        what = "a checkpoint of torch.distributed.checkpoint, whose names mean nothing here: make a Hugging Face model"
        raise CheckpointError(f"{folder} holds {what} of it with its own tools, import it {import_hf}")
    if _has(folder, "config.json") and _has(folder, "*.safetensors", "pytorch_model*.bin"):
        what = "a Hugging Face model, not a run to go on with: import it"
        raise CheckpointError(f"{folder} holds {what} {import_hf}")


def _has(folder: Path, *patterns: str) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


# Writing


def begin(folder: str | Path, iteration: int) -> Path:
    """Create an empty folder to write a checkpoint in."""
    final = checkpoint_path(folder, iteration)
    incomplete = _incomplete(final)
    make_folder(final.parent)
    _remove(incomplete)
    make_folder(incomplete)
    return incomplete


def discard(folder: str, iteration: int) -> None:
    """Delete what a failed save wrote, if that can be deleted."""
    incomplete = _incomplete(checkpoint_path(folder, iteration))
    with suppress(OSError):
        if not is_complete(incomplete):
            _remove(incomplete)


def _remove(folder: Path) -> None:
    """Delete a checkpoint's folder if there is one, or only the link to it. Ignores files that cannot be deleted.

    Raises OSError for a bucket, where the old marker must not stand over new shards.
    """
    if isinstance(folder, BucketPath):
        folder.joinpath(MARKER).unlink()  # before anything that it vouches for
        folder.remove_tree()
    elif folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def finish(
    incomplete: Path, index: Mapping[str, bytes], meta: dict[str, Any], files: dict[str, dict[str, Any]]
) -> Path:
    """Complete a checkpoint, and name it the latest; return its folder.

    index: files of ``build_index``. files: size and digest of the others by name.
    """
    root, final = incomplete.parent, incomplete.with_name(incomplete.name.removesuffix(INCOMPLETE))
    _wait_for_files(incomplete, files)
    for name, content in index.items():
        write_durably(incomplete / name, content)
        files = files | {name: {"bytes": len(content), "sha256": digest(content)}}
    text = (json.dumps({"format": FORMAT} | meta | {"files": files}, indent=1) + "\n").encode()
    write_durably(incomplete / META, text)
    write_durably(incomplete / MARKER, digest(text).encode() + b"\n")
    sync_folder(incomplete)
    latest = f"{iteration_of(final)}\n".encode()
    if is_bucket(root):
        write_durably(root / LATEST, latest)
        return final
    replaced = final.with_name(final.name + REPLACED)
    if os.path.lexists(final):  # from a run that went back to an earlier iteration
        _remove(replaced)
        final.rename(replaced)
    incomplete.rename(final)
    sync_folder(root)
    partial = root / (LATEST + INCOMPLETE)
    write_durably(partial, latest)
    os.replace(partial, root / LATEST)
    sync_folder(root)
    _remove(replaced)
    return final


def _wait_for_files(folder: Path, files: dict[str, dict[str, Any]], seconds: float = 30.0) -> None:
    """Wait until other nodes' files are visible here. Raises OSError."""
    deadline = time.monotonic() + seconds
    for name, entry in files.items():
        path = folder / name
        while not (path.exists() and path.stat().st_size == entry["bytes"]):
            if not folder.is_dir():
                raise OSError(f"{folder} was removed while the checkpoint was written there")
            if time.monotonic() > deadline:
                raise OSError(f"{path} of another node is not seen here: --save must be on storage that all share")
            time.sleep(0.2)


def retain(folder: str | Path, keep_last: int | None, interval: int | None) -> None:
    """Delete checkpoints, except the last ``keep_last``, the last ``keep_last`` finite, and multiples of ``interval``.

    So a run that diverged keeps what it can go back to. keep_last None deletes nothing. Checkpoints that are newer than
    the latest, or cannot be read now, stay too. In a bucket, where one job saves, what has no marker goes.
    """
    if keep_last is None or (latest := _latest_iteration(as_path(folder))) is None:
        return
    below = _checkpoints(folder, latest)[::-1]
    paths = [path for path in below if is_complete(path)]
    for path in {*below} - {*paths} if is_bucket(as_path(folder)) else ():
        if _has(path, "rank_*.safetensors"):  # ours, cut short or half deleted
            _remove(path)
    kept = {*paths[:keep_last], *islice(filter(_is_finite, paths), keep_last)}
    for path in paths:
        is_due = interval is None or iteration_of(path) % interval
        if is_due and path not in kept and _is_finite(path) is not None:
            if not is_bucket(path):  # renamed first, so that a half-deleted one is never taken for a checkpoint
                _remove(deleted := path.with_name(path.name + DELETED))
                path = path.rename(deleted)
                sync_folder(path.parent)
            _remove(path)


def _is_finite(checkpoint: Path) -> bool | None:
    """Return whether a checkpoint is undamaged and without NaN or Inf; None: an unreadable disk, or another format."""
    try:
        return nonfinite(checkpoint, read_meta(checkpoint)) is None
    except CheckpointError as error:
        is_damaged = isinstance(error.__cause__, (ValueError, RecursionError, FileNotFoundError))
        return False if is_damaged else None


class FolderLock:
    """A lock on a folder: one job at a time saves there. The system releases it when the process ends."""

    def __init__(self, folder: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Take it, waiting ``patience_seconds`` for a job that is just ending. Raises CheckpointError, OSError."""
        self._folder, self._file = folder, cast(BinaryIO | None, None)
        root = as_path(folder)
        holder = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
        if is_bucket(root):
            write_durably(root / LOCK, holder.encode())  # fails now, not at the first save
            print(f"note: {folder} knows no locks: let no other job save there", flush=True)
            return
        make_folder(root)
        file = self._file = open_regular(root / LOCK, "r+b")
        try:
            if not lock_for_process(file, folder, "job save", patience_seconds):
                return
        except BlockingIOError:
            holder = file.read(200).decode(errors="replace").strip() or "another process"
            file.close()
            in_use = f"{folder} is in use by another job ({holder}): give another --save, or end it"
            raise CheckpointError(in_use) from None
        file.truncate(0)
        file.write(holder.encode())
        file.flush()
        _clear(root)

    def renew(self) -> None:
        """Lock the folder again if it was moved and recreated. Raises CheckpointError if another job has the lock."""
        path, lost = Path(self._folder) / LOCK, self._file
        if lost and not (path.exists() and os.path.samestat(path.stat(), os.fstat(lost.fileno()))):
            self._file = FolderLock(self._folder, patience_seconds=0.0)._file
            lost.close()
            print(f"note: {self._folder} was moved, and made again: checkpoints are saved in the new one", flush=True)

    def release(self) -> None:
        if self._file is not None:
            self._file.close()


def _clear(root: Path) -> None:
    """Remove what a killed job left half-done. Requires the lock."""
    for path in root.glob(f"iter_*{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if is_complete(path) and not os.path.lexists(original):
            path.rename(original)  # killed between the two renames of ``finish``
        else:
            _remove(path)
    for suffix in (INCOMPLETE, DELETED):
        for path in root.glob(f"iter_*{suffix}"):
            _remove(path)
    (root / (LATEST + INCOMPLETE)).unlink(missing_ok=True)
