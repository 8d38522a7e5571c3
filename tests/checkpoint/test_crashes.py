"""Saving is atomic: killed, or without power, at every change of files, a folder holds the checkpoint before or the new
one, whole."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint import FolderLock, find_checkpoint, is_complete, iterate_parameters, problems, read_meta
from megatron_zpp.checkpoint.folder import retain
from tests.checkpoint.saved import save
from tests.crashes import check_order_of_changes, run_killed

# The iteration that is saved, and whether checkpoints of iterations 1 and 2 are there. Saved again: by a run that was
# taken back.
SAVES = {"next": (3, True), "again": (2, True), "first": (1, False)}


def save_new(folder: Path, iteration: int) -> None:
    save(folder, iteration, value=7.0)
    retain(folder, 1, None)


def fill(folder: Path, has_old: bool) -> None:
    if has_old:
        for iteration in (1, 2):
            save(folder, iteration, value=float(iteration))


def value_found(folder: Path) -> float | None:
    """What the next job loads: the parameters' value, None where there is no checkpoint. All that is there is whole."""
    FolderLock(str(folder)).release()
    found = find_checkpoint(str(folder))
    for path in folder.glob("iter_*"):
        assert problems(path) == []
    if found is None:
        return None
    values = torch.cat([tensor.flatten() for _, tensor in iterate_parameters(found, read_meta(found))])
    assert values.min() == values.max()
    return values[0].item()


@pytest.mark.parametrize("case", SAVES)
def test_killed_at_every_change_of_files(tmp_path, case):
    iteration, has_old = SAVES[case]
    fill(tmp_path / "before", has_old)
    (tmp_path / "before").mkdir(exist_ok=True)
    fatal = kills = 0
    while True:
        fatal += 1
        folder = shutil.copytree(tmp_path / "before", tmp_path / "folder")
        status = run_killed(lambda: save_new(folder, iteration), fatal)  # noqa: B023 - called before the next round
        for path in folder.glob("iter_*"):  # the marker is written last: what has it is whole, whatever its name
            goes = path.suffix == ".deleted" or (path.suffix == ".replaced" and path.with_suffix("").exists())
            assert goes or not is_complete(path) or problems(path) == [], (fatal, path)
        value = value_found(folder)
        shutil.rmtree(folder)
        if status is None:
            assert value == 7.0
            break
        assert status == -signal.SIGKILL
        kills += 1
        assert value in ({2.0, 7.0} if has_old else {None, 7.0}), fatal
    assert kills >= 9


@pytest.mark.parametrize("case", SAVES)
def test_without_power_at_any_time_the_old_checkpoint_or_the_new_one_is_there(tmp_path, case):
    iteration, has_old = SAVES[case]
    folder = tmp_path / "runs" / "mine"  # made by the first save
    fill(folder, has_old)
    check_order_of_changes(tmp_path, lambda: save_new(folder, iteration))
    assert value_found(folder) == 7.0
