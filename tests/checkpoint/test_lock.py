"""The right to save in a folder, also in one that was moved and made again."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from megatron_zpp.checkpoint import CheckpointError, FolderLock
from tests.checkpoint.saved import save


def test_a_folder_that_was_moved_and_made_again_is_locked_again(tmp_path, capsys):
    lock = FolderLock(str(tmp_path / "save"))
    lock.renew()
    (tmp_path / "save").rename(tmp_path / "moved")
    lock.renew()
    assert (tmp_path / "save" / "lock").exists()
    assert "was moved, and made again" in capsys.readouterr().out
    with multiprocessing.get_context("fork").Pool(1) as other:  # locks are a process's own
        with pytest.raises(CheckpointError, match="is in use by another job"):
            other.apply(FolderLock, (str(tmp_path / "save"), 0.0))
    lock.release()


def _hold(folder: str, is_held, may_end) -> None:
    lock = FolderLock(folder)
    is_held.set()
    may_end.wait(60)
    lock.release()


def test_a_job_whose_folder_another_one_took_does_not_save_there(tmp_path):
    """Two jobs mixed their checkpoints."""
    folder = tmp_path / "save"
    lock = FolderLock(str(folder))
    folder.rename(tmp_path / "moved")
    save(folder, 4)
    context = multiprocessing.get_context("fork")
    is_held, may_end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(folder), is_held, may_end))
    other.start()
    try:
        assert is_held.wait(60)
        with pytest.raises(CheckpointError, match="is in use by another job"):
            lock.renew()
    finally:
        may_end.set()
        other.join()
    lock.renew()  # the other one has ended
    assert Path(folder / "iter_0000004").exists()
