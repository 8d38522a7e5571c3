"""Megatron's sample order: its golden vectors, its rules written out slowly, and the items."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.build import split_edges, split_sequences
from megatron_zpp.data.gpt_dataset import GPTDataset, build_indices, build_sample_index, count_epochs
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "golden.json").read_text())
# Name in golden.json -> split, number of the split, samples. Two names there are the wrong way round: of 257 samples
# an epoch, 500 take 243 of the last epoch, which is joint with the first; 550 take 35 of it, which is separate.
CASES = {
    "one_epoch_no_target": ("1", 0, None),
    "one_epoch_100": ("1", 0, 100),
    "separate_last_epoch_500": ("1", 0, 500),
    "joint_last_epoch_550": ("1", 0, 550),
    "split_90_8_2_train": ("90,8,2", 0, 400),
    "split_90_8_2_valid": ("90,8,2", 1, 20),
    "split_90_8_2_test": ("90,8,2", 2, 3),
}


def dataset_of(tmp_path, prefix=GOLDEN / "a", sequences=None, **options):
    indexed = IndexedDataset(prefix)
    options = {"num_samples": None, "seq_length": 128, "seed": 1234, "cache_path": str(tmp_path / "cache")} | options
    return GPTDataset(indexed, range(len(indexed)) if sequences is None else sequences, **options)


def assert_equals_golden(dataset, expected):
    assert len(dataset) == expected["length"]
    for name in ("document_index", "sample_index", "shuffle_index"):
        array = getattr(dataset, name)
        assert (str(array.dtype), list(array.shape)) == (expected[name]["dtype"], expected[name]["shape"])
        assert hashlib.sha256(array.tobytes()).hexdigest() == expected[name]["sha256"], name
    samples = np.stack([dataset.sample(i) for i in range(3)])
    assert hashlib.sha256(samples.tobytes()).hexdigest() == expected["first_samples_sha256"]


@pytest.mark.parametrize("case", CASES)
def test_equals_megatron_to_the_bit(tmp_path, case):
    split, number, num_samples = CASES[case]
    sequences = split_sequences(200, split_edges(split)[number])
    assert_equals_golden(dataset_of(tmp_path, sequences=sequences, num_samples=num_samples), EXPECTED["gpt"][case])


def test_golden_covers_all_cases():
    assert set(CASES) == set(EXPECTED["gpt"])


def walk(lengths, document_index, seq_length, num_samples):
    """Megatron's rule token by token: rows at which a reader that consumes ``seq_length`` at a time stands."""
    positions = [(row, offset) for row, d in enumerate(document_index) for offset in range(lengths[d])]
    return [[0, 0]] + [list(positions[k * seq_length]) for k in range(1, num_samples + 1)]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(sum),
    epochs=st.integers(1, 3),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_sample_index_is_where_a_walk_arrives(lengths, epochs, seq_length, seed):
    document_index = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    np.random.RandomState(seed).shuffle(document_index)
    index = build_sample_index(np.array(lengths, dtype=np.int32), document_index, seq_length)
    num_samples = (epochs * sum(lengths) - 1) // seq_length
    assert index.tolist() == walk(lengths, document_index, seq_length, num_samples)


@settings(max_examples=100, deadline=None)
@given(tokens=st.integers(1, 500), num_samples=st.integers(1, 300), seq_length=st.integers(1, 40))
def test_epochs_are_just_enough(tokens, num_samples, seq_length):
    epochs, separate = count_epochs(tokens, num_samples, seq_length)
    assert epochs * tokens >= num_samples * seq_length + 1
    assert epochs == 1 or (epochs - 1) * tokens < num_samples * seq_length + 1
    assert not (epochs == 1 and separate)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=20),
    num_samples=st.integers(1, 60),
    seq_length=st.integers(1, 20),
)
def test_shuffle_index_permutes_and_keeps_a_separate_last_epoch_last(lengths, num_samples, seq_length):
    epochs, separate = count_epochs(sum(lengths), num_samples, seq_length)
    arrays = build_indices(np.array(lengths, dtype=np.int32), range(len(lengths)), epochs, separate, seq_length, seed=3)
    shuffle, total = arrays["shuffle_index"], len(arrays["sample_index"]) - 1
    assert sorted(shuffle) == list(range(total))
    assert total >= num_samples
    counts = Counter(arrays["document_index"].tolist())
    assert counts == {d: epochs for d in range(len(lengths))}
    if separate:
        first_part = ((epochs - 1) * sum(lengths) - 1) // seq_length
        assert sorted(shuffle[:first_part]) == list(range(first_part))
        assert sorted(arrays["document_index"][-len(lengths) :].tolist()) == list(range(len(lengths)))


def test_one_epoch_serves_every_token_once(tmp_path):
    """Distinct ids: as inputs each at most once, and all but the tail that fills no sample."""
    documents = np.split(np.arange(1000), [3, 40, 41, 500, 730])
    with IndexedDatasetWriter(tmp_path / "x", "<u2") as writer:
        for document in documents:
            writer.add_document([document])
    dataset = dataset_of(tmp_path, tmp_path / "x", seq_length=16)
    inputs = torch.cat([dataset[i]["tokens"] for i in range(len(dataset))])
    assert len(dataset) == 999 // 16
    assert len(inputs.unique()) == len(inputs) == 16 * len(dataset)


def test_items(tmp_path):
    dataset = dataset_of(tmp_path, eod=256, eod_mask_loss=True)
    plain = dataset_of(tmp_path)
    for i in range(20):
        item, sample = dataset[i], dataset.sample(i)
        assert item["tokens"].dtype == item["labels"].dtype == torch.int64
        assert item["tokens"].tolist() == sample[:-1].tolist()
        assert item["labels"].tolist() == sample[1:].tolist()
        assert item["loss_mask"].dtype == torch.float32
        # Where the input is the end of a document the next one's beginning is no one's to predict.
        assert torch.equal(item["loss_mask"] == 0, item["tokens"] == 256)
        assert plain[i]["loss_mask"].sum() == 128
    assert any(256 in dataset[i]["tokens"] for i in range(20))
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_longer_run_keeps_the_order_within_the_same_epochs(tmp_path):
    first, longer, shorter = (dataset_of(tmp_path, num_samples=n) for n in (480, 500, 300))
    assert first.epochs == longer.epochs == shorter.epochs == 2
    assert np.array_equal(first.shuffle_index, longer.shuffle_index)
    # 300 samples take 43 of the second epoch's 257, so that is shuffled by itself: another order, another entry.
    assert not np.array_equal(first.shuffle_index, shorter.shuffle_index)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_rewritten_data_is_not_served_by_the_old_index(tmp_path):
    def write(lengths):
        with IndexedDatasetWriter(tmp_path / "x", "<u2") as writer:
            for length in lengths:
                writer.add_document([range(length)])

    write([50, 30])
    assert len(dataset_of(tmp_path, tmp_path / "x", seq_length=8).document_index) == 2
    write([20, 30, 30])  # as many tokens
    assert len(dataset_of(tmp_path, tmp_path / "x", seq_length=8).document_index) == 3


def test_an_empty_split_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"the valid split of .* is empty \(0 of 200 documents\), but 20 samples"):
        dataset_of(tmp_path, sequences=range(5, 5), num_samples=20, name="valid")


def test_less_than_one_sample_says_so(tmp_path):
    with pytest.raises(ValueError, match="32965 tokens, less than one sample of 40000"):
        dataset_of(tmp_path, seq_length=40_000)


def test_eod_mask_without_tokenizer_says_so(tmp_path):
    with pytest.raises(ValueError, match="--eod-mask-loss needs a tokenizer"):
        dataset_of(tmp_path, eod_mask_loss=True)
