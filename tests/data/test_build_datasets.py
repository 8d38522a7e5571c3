"""From flags to datasets and batches: splits, blends, checks, resuming."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from megatron_zpp.data.build import build_datasets, build_loader, parse_blend, split_edges, split_sequences
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter

A = str(Path(__file__).parent / "golden" / "a")
B = str(Path(__file__).parent / "golden" / "b")


@pytest.fixture
def build(tmp_path):
    def build(**options):
        defaults = {"seq_length": 128, "seed": 1234, "num_samples": (100, 5, 1), "vocab_size": 257}
        return build_datasets(**(defaults | {"cache_path": str(tmp_path / "cache")} | options))

    return build


def test_split_edges_and_ranges():
    assert split_edges("969, 30, 1") == [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]
    assert split_edges("9,1") == [(0.0, 0.9), (0.9, 1.0), None]
    assert split_edges("0,1,1") == [None, (0.0, 0.5), (0.5, 1.0)]
    assert split_sequences(5, (0.0, 0.5)) == range(0, 2)  # 2.5 to the even number
    assert split_sequences(7, (0.5, 1.0)) == range(4, 7)  # 3.5 likewise
    for bad in ("", "1,2,3,4", "0,0,0"):
        with pytest.raises(ValueError, match="--split"):
            split_edges(bad)


def test_parse_blend():
    assert parse_blend(["0.3", "a", "2", "b"]) == (["a", "b"], [0.3, 2.0])
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["a", "b", "c"]) == (["a", "b", "c"], None)
    with pytest.raises(ValueError, match=r"0\.3 is not a dataset"):
        parse_blend(["0.3", "a", "0.7"])
    with pytest.raises(ValueError, match="must be positive"):
        parse_blend(["0", "a", "1", "b"])


def test_splits_do_not_overlap(build):
    splits = build(data_path=[A], split="90,8,2")
    documents = [set(split.document_index.tolist()) for split in splits]
    assert [len(part) for part in documents] == [180, 16, 4]
    assert set.union(*documents) == set(range(200))


def test_nothing_is_built_of_what_is_not_asked_for(build):
    assert build(data_path=[A], split="90,10", num_samples=(100, 5, 1)).test is None
    assert build(data_path=[A], num_samples=(100, 0, 0))[1:] == (None, None)


def test_paths_per_split(build):
    train, valid, test = build(train_data_path=["1", A, "2", B], valid_data_path=[B])
    assert len(train) >= 100
    assert len(valid) == 12_224 // 128
    assert test is None


def test_prefixes_without_weights_are_read_once_each(build):
    train = build(data_path=[A, B], split="1", num_samples=(300, 0, 0)).train
    assert len(train) == 300
    with pytest.raises(ValueError, match="352 samples in the train split, but the run asks for 400"):
        build(data_path=[A, B], split="1", num_samples=(400, 0, 0))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "no data: give --data-path"),
        ({"data_path": [A + "x"]}, FileNotFoundError, r"ax\.idx does not exist"),
        ({"data_path": [A], "train_data_path": [A]}, ValueError, "exclude each other"),
        ({"train_data_path": [A], "split": "1"}, ValueError, "--split cuts --data-path"),
        ({"data_path": [A], "mock_data": True}, ValueError, "--mock-data"),
        ({"data_path": [A], "split": "0,1,1"}, ValueError, "no training data"),
        ({"data_path": [A], "split": "1000,1", "num_samples": (9, 9, 0)}, ValueError, "the valid split .* is empty"),
        ({"data_path": [A], "vocab_size": 256}, ValueError, r"a\.bin holds token 256, but the vocabulary has 256"),
    ],
)
def test_bad_input_is_named(build, options, error, message):
    with pytest.raises(error, match=message):
        build(**options)


def test_vocabulary_check_sees_rewritten_data(build, tmp_path):
    def write(token):
        with IndexedDatasetWriter(tmp_path / "x", "<i4") as writer:
            writer.add_document([[1] * 1000 + [token]])

    options = {"data_path": [str(tmp_path / "x")], "split": "1", "num_samples": (9, 0, 0)}
    write(256)
    build(**options)
    write(300)
    with pytest.raises(ValueError, match="holds token 300"):
        build(**options)
    write(-1)
    with pytest.raises(ValueError, match="holds token -1"):
        build(**options)


def loader_of(dataset, consumed_samples=0, rank=0, ranks=1, micro_batch_size=2, num_workers=0):
    return build_loader(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        dp_rank=rank,
        dp_size=ranks,
        num_workers=num_workers,
        device="cpu",
    )


def test_loader_resumes_at_any_sample_for_any_number_of_ranks(build):
    dataset = build(data_path=[A], split="1").train
    whole = torch.cat([batch["tokens"] for batch in islice(loader_of(dataset), 12)])  # [24, 128]
    parts = [next(loader_of(dataset, consumed_samples=8, rank=rank, ranks=4))["tokens"] for rank in range(4)]
    assert torch.equal(torch.cat(parts), whole[8:16])


def test_workers_give_the_same_batches_and_leave_random_state_alone(build):
    dataset = build(data_path=[A], split="1").train
    state = torch.get_rng_state()
    with_workers = list(islice(loader_of(dataset, num_workers=2), 5))
    assert torch.equal(torch.get_rng_state(), state)  # or a resumed run would have other dropout
    for expected, batch in zip(loader_of(dataset), with_workers, strict=False):
        assert batch.keys() == {"tokens", "labels", "loss_mask"}
        assert all(torch.equal(batch[key], expected[key]) for key in batch)


def test_running_out_of_samples_is_an_error(build):
    dataset = build(data_path=[A], split="1").train  # 257 samples
    batches = loader_of(dataset, consumed_samples=250)
    assert len(list(islice(batches, 3))) == 3
    with pytest.raises(ValueError, match="out of data: the dataset has 257 samples"):
        next(batches)


def test_mock_data_is_the_same_everywhere_and_differs_by_sample(build):
    first, second = (build(mock_data=True, vocab_size=50) for _ in range(2))
    assert torch.equal(first.train[3]["tokens"], second.train[3]["tokens"])
    assert torch.equal(first.train[3]["tokens"][1:], first.train[3]["labels"][:-1])
    assert not torch.equal(first.train[3]["tokens"], first.train[4]["tokens"])
    assert not torch.equal(first.train[3]["tokens"], first.valid[3]["tokens"])
    assert first.train[3]["tokens"].max() < 50
