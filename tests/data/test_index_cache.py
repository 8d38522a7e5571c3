"""The cache must never serve a half-written entry, nor cost a run that can't write it."""

import multiprocessing
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.index_cache import cached_arrays


def build_and_count(folder: Path, advance) -> dict[str, np.ndarray]:
    (folder / f"built-{os.getpid()}").touch()
    return {"numbers": np.arange(1000)}


def read_sum(folder: Path, _: int) -> int:
    return int(cached_arrays(folder / "cache", "x", {"size": 1000}, partial(build_and_count, folder))["numbers"].sum())


def test_processes_that_start_together_build_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map(partial(read_sum, tmp_path), range(6)) == [499_500] * 6
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()) == [".lock", "x"]


def test_another_key_is_another_entry(tmp_path):
    for size in (3, 5, 3):
        arrays = cached_arrays(tmp_path, "x", {"size": size}, lambda advance, size=size: {"a": np.arange(size)})
        assert len(arrays["a"]) == size


def test_a_build_that_fails_leaves_no_entry(tmp_path):
    with pytest.raises(ZeroDivisionError):
        cached_arrays(tmp_path, "x", {}, lambda advance: {"a": np.arange(1 // 0)})
    assert cached_arrays(tmp_path, "x", {}, lambda advance: {"a": np.arange(4)})["a"].sum() == 6


def test_without_a_place_to_write_it_warns_and_goes_on(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="--data-cache-path"):
        arrays = cached_arrays(tmp_path / "file" / "cache", "x", {}, lambda advance: {"a": np.arange(4)})
    assert arrays["a"].tolist() == [0, 1, 2, 3]


def test_a_long_build_shows_how_far_it_is(tmp_path):
    seen = []

    @contextmanager
    def progress(description, rows):
        seen.append((description, rows))
        yield seen.append

    def build(advance):
        advance(40)
        return {"a": np.arange(4)}

    for _ in range(2):  # the second time there is nothing to build
        cached_arrays(tmp_path, "x", {}, build, progress, rows=100)
    assert seen == [("building the index x", 100), 40]
