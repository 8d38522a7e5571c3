"""One job at a time saves in a folder, also in one that was moved and created again."""

import errno
import fcntl
import multiprocessing
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest

from megatron_zpp.checkpoint import CheckpointError, FolderLock
from tests.checkpoint.saved import save

HELD = []  # by the other process, until it ends


@pytest.fixture
def other_job() -> Iterator[Pool]:
    """Another process: locks belong to processes."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        yield pool


def _hold(folder: Path) -> None:
    HELD.append(FolderLock(str(folder), 0.5))


def test_one_job_at_a_time_saves_in_a_folder(tmp_path, other_job):
    names = ("iter_0000009.incomplete", "iter_0000005.replaced", "iter_0000004.replaced")
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000004.replaced" / "complete").touch()  # killed between two renames: the text file names it
    lock = FolderLock(str(tmp_path))
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000004"]
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is in use by another job \(process "):
        other_job.apply(_hold, (tmp_path,))
    lock.release()
    other_job.apply(_hold, (tmp_path,))


def test_a_folder_that_was_moved_and_created_again_is_locked_again(tmp_path, other_job, capsys):
    lock = FolderLock(str(tmp_path / "save"))
    lock.renew()
    (tmp_path / "save").rename(tmp_path / "moved")
    lock.renew()
    assert "was moved, and made again" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="is in use by another job"):
        other_job.apply(_hold, (tmp_path / "save",))


def test_a_job_whose_folder_another_one_took_does_not_save_there(tmp_path, other_job):
    """Two jobs mixed their checkpoints."""
    folder = tmp_path / "save"
    lock = FolderLock(str(folder))
    folder.rename(tmp_path / "moved")
    save(folder, 4)
    other_job.apply(_hold, (folder,))
    with pytest.raises(CheckpointError, match="is in use by another job"):
        lock.renew()
    other_job.terminate()
    other_job.join()
    lock.renew()
    assert (folder / "iter_0000004").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_a_note_and_a_failing_one_an_error(tmp_path, monkeypatch, capsys, number):
    def fail(*_: object) -> None:
        raise OSError(number, "the reason")

    monkeypatch.setattr(fcntl, "lockf", fail)
    if number == errno.EIO:
        with pytest.raises(OSError, match="the reason"):
            FolderLock(str(tmp_path))
    else:
        FolderLock(str(tmp_path)).release()
        assert "knows no locks (the reason): let no other" in capsys.readouterr().out
