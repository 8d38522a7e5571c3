"""The rules of Megatron's sample order written out slowly, and what a stable order promises."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data import indices
from megatron_zpp.data.indices import build_sample_index, count_epochs, megatron_order, samples_in, stable_order


def walk(lengths, document_index, seq_length, num_samples):
    """Megatron's rule token by token: rows at which a reader that consumes ``seq_length`` at a time stands."""
    positions = [(row, offset) for row, d in enumerate(document_index) for offset in range(lengths[d])]
    last = len(positions) - 1
    return [[0, 0]] + [list(positions[min(k * seq_length, last)]) for k in range(1, num_samples + 1)]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(sum),
    epochs=st.integers(1, 3),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 99),
    keep_last=st.booleans(),
    chunk=st.integers(1, 9),
)
def test_sample_index_is_where_a_walk_arrives(lengths, epochs, seq_length, seed, keep_last, chunk):
    document_index = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    np.random.RandomState(seed).shuffle(document_index)
    num_samples = samples_in(epochs, sum(lengths), seq_length, keep_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "CHUNK", chunk)
        index = build_sample_index(np.array(lengths, dtype=np.int32), document_index, seq_length, num_samples)
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
    arrays = megatron_order(np.array(lengths, "i4"), range(len(lengths)), epochs, separate, seq_length, seed=3)
    shuffle, total = arrays["shuffle_index"], len(arrays["sample_index"]) - 1
    assert sorted(shuffle) == list(range(total))
    assert total >= num_samples
    counts = Counter(arrays["document_index"].tolist())
    assert counts == {d: epochs for d in range(len(lengths))}
    if separate:
        first_part = ((epochs - 1) * sum(lengths) - 1) // seq_length
        assert sorted(shuffle[:first_part]) == list(range(first_part))
        assert sorted(arrays["document_index"][-len(lengths) :].tolist()) == list(range(len(lengths)))


def spelled_out(lengths, arrays, seq_length):
    """Each sample as (document, offset) of its tokens, in the order in which samples are served."""
    samples = []
    for k in arrays["shuffle_index"].tolist():
        (row, offset), (last_row, last_offset) = arrays["sample_index"][k : k + 2].tolist()
        sample = []
        while (row, offset) <= (last_row, last_offset):
            document = int(arrays["document_index"][row])
            if offset < lengths[document]:
                sample.append((document, offset))
                offset += 1
            else:
                row, offset = row + 1, 0
        samples.append(sample)
    return samples


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 20),
    epochs=st.integers(1, 4),
    seq_length=st.integers(1, 20),
)
def test_a_stable_order_only_grows_and_serves_each_token_once_an_epoch(lengths, epochs, seq_length):
    array, sequences = np.array(lengths, dtype=np.int32), range(len(lengths))
    order = spelled_out(lengths, stable_order(array, sequences, epochs, seq_length, seed=5), seq_length)
    longer = spelled_out(lengths, stable_order(array, sequences, epochs + 1, seq_length, seed=5), seq_length)
    assert longer[: len(order)] == order
    megatrons = spelled_out(lengths, megatron_order(array, sequences, 1, False, seq_length, seed=5), seq_length)
    assert order[: len(megatrons)] == megatrons  # the first epoch
    per_epoch = len(order) // epochs
    assert per_epoch == (sum(lengths) - 1) // seq_length
    for epoch in range(epochs):
        samples = order[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(len(sample) == seq_length + 1 for sample in samples)
        inputs = [token for sample in samples for token in sample[:-1]]
        assert len(set(inputs)) == len(inputs) == per_epoch * seq_length


def test_epochs_of_a_stable_order_differ():
    arrays = stable_order(np.full(50, 9, dtype=np.int32), range(50), 3, 4, seed=5)
    epochs = arrays["document_index"].reshape(3, 50)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3


def test_progress_is_told_of_all_rows():
    rows = []
    megatron_order(np.full(50, 9, dtype=np.int32), range(10, 40), 2, False, 4, seed=5, advance=rows.append)
    samples = (2 * 30 * 9 - 1) // 4
    assert sum(rows) == 2 * 30 + (samples + 1) + samples
