"""What a rank reads of the index: it does not grow with the ranks that saved. And shards.bin that somebody changed."""

import json
import random
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_zpp.checkpoint import iterate_tensors, problems, read_meta
from megatron_zpp.checkpoint.index import Index, _cover, _size
from tests.checkpoint.saved import replace
from tests.ranks import run_ranks
from tests.training.small_run import flags, train_each

SHARDED = "--num-layers 1 --zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1"


def _resume_counting(argv: list[str]) -> tuple[int, int]:
    """Resume; return how many parts of shards became objects, and how many bytes of the index were parsed."""
    parts, parsed, loads, of_index = [], [], json.loads, Index.parts

    def count_parsed(text, *args, **kwargs):
        if isinstance(text, bytes) and b'"rows"' in text:
            parsed.append(len(text))
        return loads(text, *args, **kwargs)

    def count_parts(*args):
        parts.extend(found := [*of_index(*args)])
        return found

    with mock.patch.object(json, "loads", count_parsed), mock.patch.object(Index, "parts", count_parts):
        train_each({"": argv})
    return len(parts), sum(parsed)


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
    for parts, parsed in (counts[4][3], counts[4][1]):
        assert 0 < parts <= 1.1 * counts[2][1][0]
        assert 0 < parsed <= 1.1 * counts[2][1][1]
    assert counts[4][0][1] > 2 * counts[4][1][1]


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda rows: rows[:-1], "are not in shards.bin"),
        (lambda rows: np.where(np.arange(rows.size) == rows.size - 1, -8, rows), "is not in a file"),
        (lambda rows: np.where(np.arange(rows.size) == rows.size - 2, 99, rows), "is not in a file"),
        (lambda rows: np.where(np.arange(rows.size) == 0, 2**62, rows), "is not of its size"),
        (lambda rows: np.zeros_like(rows), "is not of its size"),
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


def test_shards_cover_a_tensor_if_each_element_is_in_one():
    draw, found = random.Random(0), []
    for _ in range(400):
        size = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
        boxes = [[0] * len(size) + size]
        for _ in range(draw.randint(0, 5)):
            box, dim = draw.choice(boxes), draw.randrange(len(size) or 1)
            if size and box[len(size) + dim] > 1:  # cut it in two
                first = draw.randint(1, box[len(size) + dim] - 1)
                boxes.append([*box])
                boxes[-1][dim] += first
                boxes[-1][len(size) + dim] -= first
                box[len(size) + dim] = first
        if size and draw.random() < 0.5:
            box = draw.choice(boxes)
            box[: len(size)] = [draw.randint(0, end - part) for end, part in zip(size, box[len(size) :], strict=True)]
        count = np.zeros(size, dtype=int)
        for box in boxes:
            count[tuple(slice(at, at + part) for at, part in zip(box, box[len(size) :], strict=False))] += 1
        rows = np.array(boxes, dtype=np.int64).reshape(len(boxes), 2 * len(size))
        found.append(_cover(rows, torch.Size(size)))
        assert found[-1] == (count == 1).all(), (size, boxes)
    assert 100 < sum(found) < 380
    assert not _cover(np.zeros((0, 2), dtype=np.int64), torch.Size([1]))
    assert _cover(np.zeros((0, 4), dtype=np.int64), torch.Size([0, 2]))


def test_a_shape_that_torch_cannot_count_is_refused():
    with pytest.raises(ValueError, match="is too large for a shape"):
        _size([0, 2**59, 4])
    assert _size([0, 2**40]) == torch.Size([0, 2**40])
