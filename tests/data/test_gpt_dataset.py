"""Samples: every token once, errors, what the cache belongs to."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.gpt_dataset import GPTDataset, SampleOptions
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indexed_dataset import IndexedDataset
from tests.data.small_data import A, B, write


def dataset_of(tmp_path, prefix=A, sequences=None, num_samples=None, name="train", **options):
    indexed = IndexedDataset(prefix)
    return GPTDataset(
        indexed,
        range(len(indexed)) if sequences is None else sequences,
        SampleOptions(**({"seq_length": 128, "seed": 1234} | options)),
        num_samples=num_samples,
        name=name,
        cache=IndexCache(str(tmp_path / "cache")),
    )


def write_lengths(prefix, lengths):
    """Documents whose ids are all different."""
    ids = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    write(prefix, [[part] if len(part) else [] for part in ids], "<i4")


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=15).filter(lambda lengths: sum(lengths) > 40),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_epoch_serves_every_token_once(tmp_path_factory, lengths, seq_length, seed):
    """Each token is an input once, but for the tokens after the last whole sample."""
    folder = tmp_path_factory.mktemp("data")
    write_lengths(folder / "x", lengths)
    dataset = dataset_of(folder, folder / "x", seq_length=seq_length, seed=seed)
    samples = [dataset[i] for i in range(len(dataset))]
    inputs = np.concatenate([sample[:-1] for sample in samples])
    labels = np.concatenate([sample[1:] for sample in samples])
    served = (sum(lengths) - 1) // seq_length * seq_length
    assert len(np.unique(inputs)) == len(inputs) == served
    assert len(np.unique(labels)) == len(labels) == served
    documents = np.repeat(np.arange(len(lengths)), lengths)
    same_document = documents[inputs] == documents[labels]
    assert (labels - inputs)[same_document].tolist() == [1] * int(same_document.sum())  # text in its own order


def test_rewritten_data_is_not_served_by_the_old_index(tmp_path):
    write_lengths(tmp_path / "x", [50, 30])
    assert len(dataset_of(tmp_path, tmp_path / "x", seq_length=8).document_index) == 2
    write_lengths(tmp_path / "x", [20, 30, 30])  # as many tokens
    assert len(dataset_of(tmp_path, tmp_path / "x", seq_length=8).document_index) == 3


def test_the_cache_knows_all_that_the_order_depends_on(tmp_path):
    variants = [
        *({}, {"seed": 1}, {"seq_length": 64}, {"sequences": range(1, 200)}, {"sequences": range(199)}),
        *({"num_samples": 500}, {"num_samples": 550}, {"num_samples": 300}, {"prefix": B}),
    ]
    for number, variant in enumerate(variants):
        cached, fresh = dataset_of(tmp_path, **variant), dataset_of(tmp_path / str(number), **variant)
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert np.array_equal(getattr(cached, name), getattr(fresh, name)), variant
        assert cached.order == fresh.order


def test_less_than_one_sample_says_so(tmp_path):
    with pytest.raises(ValueError, match="32965 tokens, less than 40000"):
        dataset_of(tmp_path, seq_length=40_000)
    with pytest.raises(ValueError, match="less than"):  # at once: not after an order of a billion epochs
        dataset_of(tmp_path, seq_length=40_000, num_samples=10**9)
