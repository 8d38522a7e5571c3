"""Fill-in-the-middle moves tokens and loses none, and is the same after a resume."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.fill_in_the_middle import FillInTheMiddle, find_token
from megatron_zpp.data.text.tokenizers import ByteTokenizer, NullTokenizer
from tests.data.small_data import train_data, write

EOD, PREFIX, MIDDLE, SUFFIX = 0, 101, 102, 103


def split_at(values, *separators):
    parts = [[]]
    for value in values:
        if value in separators:
            parts.append([])
        else:
            parts[-1].append(value)
    return parts


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 99), max_size=12), min_size=1, max_size=5),
    rate=st.sampled_from([0.0, 0.5, 1.0]),
    spm_rate=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 999),
)
def test_permuted_documents_can_be_put_together_again(documents, rate, spm_rate, seed):
    ids = np.array([token for document in documents for token in (*document, EOD)])
    room = np.full(len(ids) + 3 * len(documents), EOD)  # so that nothing is cut off
    room[: len(ids)] = ids
    permute = FillInTheMiddle(PREFIX, MIDDLE, SUFFIX, rate, spm_rate)
    result = permute(room, EOD, np.random.default_rng(seed)).tolist()
    assert len(result) == len(room)
    for document, part in zip(documents, split_at(result, EOD), strict=False):
        if PREFIX not in part:
            assert part == document
            assert rate < 1 or not document
            continue
        assert rate > 0
        assert Counter(part) == Counter([*document, PREFIX, MIDDLE, SUFFIX])
        nothing, first, second, third = split_at(part, PREFIX, MIDDLE, SUFFIX)
        assert nothing == []
        prefix_first = first + third + second == document
        suffix_first = first == [] and third + second == document
        assert {0.0: prefix_first, 0.5: prefix_first or suffix_first, 1.0: suffix_first}[spm_rate]


def test_rates_are_what_happens():
    ids = np.array([*range(1, 50), EOD] * 400)
    result = FillInTheMiddle(101, 102, 103, rate=0.5, spm_rate=0.25)(ids, EOD, np.random.default_rng(0)).tolist()
    parts = [part for part in split_at(result, EOD) if part]
    permuted = [part for part in parts if part[0] == PREFIX]
    suffix_first = [part for part in permuted if part[1] == SUFFIX and part.index(MIDDLE) < len(part) - 1]
    assert 0.4 < len(permuted) / len(parts) < 0.6
    assert 0.15 < len(suffix_first) / len(permuted) < 0.38  # some of the others have an empty prefix
    assert len(result) == len(ids)


def test_samples_are_the_same_in_any_order_of_reading(tmp_path):
    fims = (FillInTheMiddle(300, 301, 302),) * 2 + (None,)
    dataset, resumed, plain = (train_data(tmp_path, 300, eod=256, fill_in_the_middle=fim) for fim in fims)
    read = [dataset[i] for i in range(len(dataset))]
    for i in (len(dataset) - 1, 250, 3):
        assert np.array_equal(resumed[i], read[i])
    assert all(len(sample) == 129 for sample in read)
    changed = [not np.array_equal(sample, plain[i]) for i, sample in enumerate(read)]
    assert len(read) / 2 < sum(changed) < len(read)


def test_each_sample_has_draws_of_its_own(tmp_path):
    """Documents all alike: only the draws tell the samples apart."""
    write(tmp_path / "x", [[[*range(1, 64), 0]]] * 40)
    samples = []
    for seed in (1, 2):
        options = dict(seq_length=64, seed=seed, eod=0, fill_in_the_middle=FillInTheMiddle(101, 102, 103, rate=1.0))
        dataset = train_data(tmp_path, 39, [str(tmp_path / "x")], **options)
        samples += [tuple(dataset[i].tolist()) for i in range(39)]
    assert len(set(samples)) > 60  # of 78


def test_tokens_are_found_or_refused():
    assert find_token(ByteTokenizer(), "A", "--fim-prefix-token") == 65
    assert find_token(NullTokenizer(50), "49", "--fim-prefix-token") == 49
    for tokenizer in (ByteTokenizer(), NullTokenizer(50)):
        for name in ("<fim_prefix>", "999", str(tokenizer.vocab_size), ""):
            with pytest.raises(ValueError, match=f"--fim-data requires --fim-prefix-token, and '{name}' is not"):
                find_token(tokenizer, name, "--fim-prefix-token")
    with pytest.raises(ValueError, match="must be three tokens"):
        FillInTheMiddle(1, 1, 2)
