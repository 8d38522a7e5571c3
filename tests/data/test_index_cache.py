"""The cache must never serve a half-written entry, nor cost a run that can't write it."""

import fcntl
import multiprocessing
import os
import pickle
import shutil
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.index_cache import IndexCache, no_progress
from tests.tools import cut, flip


def numbers(advance):
    return {"a": np.arange(4)}


def load(folder, build=numbers, progress=no_progress):
    return IndexCache(str(folder), progress).arrays("data/x", "x", {}, build, 100)


def build_and_count(folder: Path, advance) -> dict[str, np.ndarray]:
    (folder / f"built-{os.getpid()}").touch()
    return {"numbers": np.arange(1000)}


def read_sum(folder: Path, _: int) -> int:
    return int(load(folder / "cache", partial(build_and_count, folder))["numbers"].sum())


def test_processes_that_start_together_or_find_damage_together_build_once(tmp_path):
    for built, kind in ((1, "spawn"), (2, "fork")):
        with multiprocessing.get_context(kind).Pool(3) as pool:
            assert pool.map(partial(read_sum, tmp_path), range(6), chunksize=1) == [499_500] * 6
        assert len(list(tmp_path.glob("built-*"))) == built
        assert sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()) == [".lock", "x"]
        empty(entry_in(tmp_path / "cache"))


def test_a_build_that_fails_leaves_no_entry(tmp_path):
    with pytest.raises(ZeroDivisionError):
        load(tmp_path, lambda advance: {"a": np.arange(1 // 0)})
    assert load(tmp_path)["a"].sum() == 6


def test_workers_that_are_not_forked_map_the_arrays_again(tmp_path):
    """Python 3.14's get their data set pickled."""
    for _ in range(2):  # built, loaded
        mapped = load(tmp_path, lambda advance: {"a": np.arange(10_000)})["a"]
        pickled = pickle.dumps(mapped)
        assert len(pickled) < 500
        assert np.array_equal(pickle.loads(pickled), np.arange(10_000))
        assert np.array_equal(pickle.loads(pickle.dumps(mapped[3:5])), [3, 4])


def entry_in(folder: Path) -> Path:
    (entry,) = (path for path in folder.iterdir() if path.name.startswith("x-"))
    return entry


def empty(entry):
    for path in entry.iterdir():
        path.unlink()


def replaced_by(array):
    return lambda entry: np.save(entry / "a.npy", array, allow_pickle=array.dtype == object)


def pipe(entry):
    (entry / "a.npy").unlink()
    os.mkfifo(entry / "a.npy")


@pytest.mark.parametrize(
    "damage",
    [
        empty,
        lambda entry: cut(entry / "a.npy", -1),
        lambda entry: flip(entry / "a.npy", -3),
        pipe,
        lambda entry: (entry / "b.npy").unlink(),
        lambda entry: cut(entry / "a.npy", 0),
        lambda entry: (entry / "a.npy").write_bytes(b"garbage"),
        replaced_by(np.arange(999)),
        replaced_by(np.arange(1000, dtype=np.int32)),
        replaced_by(np.array([print] * 1000)),
        lambda entry: (entry / "description.json").unlink(),
        lambda entry: (entry / "description.json").write_text("{"),
        lambda entry: (entry / "description.json").write_text('{"key": {}, "sha256": 3}'),
        lambda entry: (entry / "description.json").write_text('{"key": {"other": 1}, "sha256": {}}'),
        lambda entry: (shutil.rmtree(entry), entry.write_text("a file")),
    ],
)
def test_a_damaged_entry_is_built_again_with_a_warning(tmp_path, damage):
    built = []

    def build(advance):
        built.append(1)
        return {"a": np.arange(1000), "b": np.ones(3)}

    first = load(tmp_path, build)
    damage(entry_in(tmp_path))
    with pytest.warns(UserWarning, match="x-.* is damaged: it is built again"):
        again = load(tmp_path, build)
    with warnings.catch_warnings(action="error"):
        once_more = load(tmp_path, build)
    assert len(built) == 2
    for arrays in (again, once_more):
        assert {name: array.tolist() for name, array in arrays.items()} == {"a": list(range(1000)), "b": [1] * 3}
        assert not arrays["a"].flags.writeable  # from the file
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == [".", "x"]
    assert {path.name for path in entry_in(tmp_path).iterdir()} == {"a.npy", "b.npy", "description.json"}
    del first


def test_two_nodes_without_locks_may_build_at_once(tmp_path, monkeypatch):
    """While one builds, another is done: its entry stays, and both serve the same."""
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)

    def build(advance):
        load(tmp_path)
        return numbers(advance)

    with warnings.catch_warnings(action="error"):
        assert load(tmp_path, build)["a"].tolist() == [0, 1, 2, 3]
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == [".", "x"]


def test_a_pipe_in_place_of_the_lock_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert load(tmp_path)["a"].sum() == 6
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".lock").symlink_to(tmp_path / "victim")
    with pytest.warns(UserWarning, match="can't cache x"):
        load(tmp_path / "other")
    assert not (tmp_path / "victim").exists()


def test_without_a_place_to_write_it_warns_and_goes_on(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="--data-cache-path"):
        arrays = load(tmp_path / "file" / "cache")
    assert arrays["a"].tolist() == [0, 1, 2, 3]
