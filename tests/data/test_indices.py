"""The rules of Megatron's sample order and blends written out slowly."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_zpp.data import blended_dataset, indices
from megatron_zpp.data.blended_dataset import BlendedDataset, exhaustive_blend, normalize, shares, weighted_blend
from megatron_zpp.data.gpt_dataset import GPTDataset, SampleOptions
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.indices import build_sample_index, count_epochs, samples_in
from tests.data.small_data import A


def walk(lengths, document_index, seq_length, num_samples):
    """Megatron's rule token by token: rows at which a reader that consumes ``seq_length`` at a time stands."""
    positions = [(row, offset) for row, d in enumerate(document_index) for offset in range(lengths[d])]
    last = len(positions) - 1
    return [[0, 0]] + [list(positions[min(k * seq_length, last)]) for k in range(1, num_samples + 1)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(sum),
    epochs=st.integers(1, 3),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 99),
    chunk=st.integers(1, 9),
)
def test_sample_index_is_where_a_walk_arrives(lengths, epochs, seq_length, seed, chunk):
    document_index = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    np.random.RandomState(seed).shuffle(document_index)
    num_samples = samples_in(epochs, sum(lengths), seq_length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "CHUNK", chunk)
        index = build_sample_index(np.array(lengths, dtype=np.int32), document_index, seq_length, num_samples)
    assert index.tolist() == walk(lengths, document_index, seq_length, num_samples)


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 500), num_samples=st.integers(1, 300), seq_length=st.integers(1, 40))
def test_epochs_are_just_enough(tokens, num_samples, seq_length):
    epochs, separate = count_epochs(tokens, num_samples, seq_length)
    assert epochs * tokens >= num_samples * seq_length + 1
    assert epochs == 1 or (epochs - 1) * tokens < num_samples * seq_length + 1
    assert not (epochs == 1 and separate)


def greedy(weights, size, lengths=None):
    """One step at a time, in Python's float64."""
    drawn = [0] * len(weights)
    order = []
    for k in range(size):
        open_ones = [i for i in range(len(weights)) if lengths is None or drawn[i] < lengths[i]]
        chosen = max(open_ones, key=lambda i: weights[i] * float(max(k, 1)) - float(drawn[i]))  # first of equals
        order.append((chosen, drawn[chosen]))
        drawn[chosen] += 1
    return order


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks small enough to be several."""
    monkeypatch.setattr(blended_dataset, "CHUNK", 37)


ANY_WAY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY_WAY
@given(weights=st.lists(st.integers(1, 12) | st.floats(0.01, 10), min_size=1, max_size=6), size=st.integers(0, 200))
def test_weighted_blend_is_the_greedy_rule(small_chunks, weights, size):
    weights = normalize(weights)
    index, sample_index = weighted_blend(weights, size)
    assert (index.dtype, sample_index.dtype) == (np.int16, np.int64)
    assert list(zip(index, sample_index, strict=True)) == greedy(weights, size)


@ANY_WAY
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum))
def test_exhaustive_blend_is_the_greedy_rule_and_takes_everything(small_chunks, lengths):
    index, sample_index = exhaustive_blend(lengths)
    weights = [length / sum(lengths) for length in lengths]
    assert list(zip(index, sample_index, strict=True)) == greedy(weights, sum(lengths), lengths)
    assert np.bincount(index, minlength=len(lengths)).tolist() == lengths


def test_shares_round_up_twice():
    assert shares([0.3, 0.7], 300) == ([90, 210], [91, 212])
    assert shares([0.5, 0.5], 3) == ([2, 2], [3, 3])


def test_a_blend_of_more_datasets_than_its_index_can_number_is_refused():
    with pytest.raises(ValueError, match="the train blend has 32768 datasets, more than"):
        BlendedDataset([None] * 32_768, None, None, name="train", cache=IndexCache())


def test_blend_that_takes_more_than_there_is_says_so(tmp_path):
    options = SampleOptions(seq_length=128, seed=1)
    cache = IndexCache(str(tmp_path))
    part = GPTDataset(IndexedDataset(A), range(200), options, num_samples=None, cache=cache)
    with pytest.raises(ValueError, match=r"takes 300 of the 257 samples of .*a"):
        BlendedDataset([part], [1.0], 300, name="train", cache=cache)
