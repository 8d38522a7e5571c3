"""What a rank reads of the index: it does not grow with the ranks that saved. And shards.bin that somebody changed."""

import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_zpp.checkpoint import iterate_tensors, problems, read_meta
from megatron_zpp.checkpoint.index import _sizes, read_index
from tests.checkpoint.saved import replace, rewrite, save
from tests.ranks import run_ranks
from tests.training.small_run import flags, train_each

SHARDED = "--num-layers 1 --zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1"


def _resume_counting(argv: list[str]) -> tuple[int, int]:
    """Resume; return how many places of shards became objects, and how many bytes of the index were parsed."""
    places, parsed, loads = [], [], json.loads
    init = _StorageInfo.__init__

    def count_parsed(text, *args, **kwargs):
        if isinstance(text, bytes) and b'"chunks"' in text:
            parsed.append(len(text))
        return loads(text, *args, **kwargs)

    def count_place(self, *args, **kwargs):
        places.append(None)
        init(self, *args, **kwargs)

    with mock.patch.object(json, "loads", count_parsed), mock.patch.object(_StorageInfo, "__init__", count_place):
        train_each({"": argv})
    return len(places), sum(parsed)


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory) -> dict[int, Path]:
    """Checkpoints of 2 and of 4 ranks, with LoCo's errors of each rank."""
    folders = {ranks: tmp_path_factory.mktemp(f"of_{ranks}") for ranks in (2, 4)}
    for ranks, folder in folders.items():
        save = f"--save {folder} --save-interval 1 --exit-interval 1"
        run_ranks(ranks, train_each, {"": flags(data, SHARDED, save)})
    return folders


def test_what_a_rank_parses_does_not_grow_with_the_ranks_that_saved(saved, data):
    """Only rank 0, which checks the whole, parses more."""
    counts = {
        ranks: run_ranks(ranks, _resume_counting, flags(data, SHARDED, f"--load {folder} --exit-interval 2"))
        for ranks, folder in saved.items()
    }
    for places, parsed in (counts[4][3], counts[4][1]):
        assert 0 < places <= 1.1 * counts[2][1][0]
        assert 0 < parsed <= 1.1 * counts[2][1][1]
    assert counts[4][0][1] > 2 * counts[4][1][1]


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda rows: rows[:-1], "are not in shards.bin"),
        (lambda rows: np.where(np.arange(rows.size) == rows.size - 1, -8, rows), "is not in a file"),
        (lambda rows: np.where(np.arange(rows.size) == rows.size - 2, 99, rows), "is not in a file"),
        (lambda rows: np.where(np.arange(rows.size) == 0, 2**62, rows), "is not of its size"),
        (lambda rows: np.zeros_like(rows), "are missing, or there are too many"),
    ],
)
def test_rows_that_are_no_shards_are_refused(saved, tmp_path, change, expected):
    checkpoint = shutil.copytree(saved[2] / "iter_0000001", tmp_path / "iter_0000001")
    whole = dict(iterate_tensors(checkpoint, read_meta(checkpoint)))
    assert whole and all(isinstance(tensor, torch.Tensor) for tensor in whole.values())
    rows = np.fromfile(checkpoint / "shards.bin", dtype="<i8")
    replace(checkpoint, "shards.bin", change(rows).astype("<i8").tobytes())
    (problem,) = problems(checkpoint)
    assert "index.json is damaged" in problem and expected in problem


def test_shards_without_elements_are_passed_over(tmp_path):
    """Ranks that hold nothing of a tensor wrote such shards into indices without shards.bin."""
    checkpoint = save(tmp_path, 1)

    def add_empty(index):
        (shard,) = index["tensors"]["model.first"]["chunks"]
        empty = shard | {"offsets": [4, 0], "shape": [0, 3], "bytes": [shard["bytes"][1]] * 2}
        index["tensors"]["model.first"]["chunks"].append(empty)

    rewrite(checkpoint, "index.json", add_empty)
    index = read_index(checkpoint, read_meta(checkpoint))
    assert len(index.rows("model.first")) == 1
    assert dict(iterate_tensors(checkpoint, read_meta(checkpoint)))["model.first"].eq(1).all()


def test_a_shape_that_torch_cannot_count_is_refused():
    with pytest.raises(ValueError, match="is too large for a shape"):
        _sizes([0, 2**59, 4])
    assert _sizes([0, 2**40]) == torch.Size([0, 2**40])
