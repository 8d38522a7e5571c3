"""Megatron's blends: golden vectors, and its greedy rule written out in plain Python."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.blended_dataset import BlendedDataset, exhaustive_blend, normalize, shares, weighted_blend
from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.indexed_dataset import IndexedDataset

GOLDEN = Path(__file__).parent / "golden"


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


def test_equals_megatron_to_the_bit(tmp_path):
    expected = json.loads((GOLDEN / "golden.json").read_text())["blend_0.3_0.7_300"]
    blend = build_datasets(
        data_path=["0.3", str(GOLDEN / "a"), "0.7", str(GOLDEN / "b")],
        split="1",
        seq_length=128,
        seed=1234,
        num_samples=(300, 0, 0),
        vocab_size=257,
        cache_path=str(tmp_path),
    ).train
    for name in ("dataset_index", "dataset_sample_index"):
        array = getattr(blend, name)
        assert (str(array.dtype), list(array.shape)) == (expected[name]["dtype"], expected[name]["shape"])
        assert hashlib.sha256(array.tobytes()).hexdigest() == expected[name]["sha256"]
    for part, golden in zip(blend.datasets, expected["parts"], strict=True):
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert hashlib.sha256(getattr(part, name).tobytes()).hexdigest() == golden[name]["sha256"]
    assert blend[1]["tokens"].tolist() == blend.datasets[0][0]["tokens"].tolist()


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 12) | st.floats(0.01, 10), min_size=1, max_size=6), size=st.integers(0, 200))
def test_weighted_blend_is_the_greedy_rule(weights, size):
    index, sample_index = weighted_blend(weights, size)
    assert list(zip(index, sample_index, strict=True)) == greedy(normalize(weights), size)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum))
def test_exhaustive_blend_is_the_greedy_rule_and_takes_everything(lengths):
    index, sample_index = exhaustive_blend(lengths)
    weights = [length / sum(lengths) for length in lengths]
    assert list(zip(index, sample_index, strict=True)) == greedy(weights, sum(lengths), lengths)
    assert np.bincount(index, minlength=len(lengths)).tolist() == lengths


def test_shares_round_up_twice():
    assert shares([0.3, 0.7], 300) == ([90, 210], [91, 212])
    assert shares([0.5, 0.5], 3) == ([2, 2], [3, 3])


def test_blend_that_takes_more_than_there_is_says_so(tmp_path):
    part = GPTDataset(
        IndexedDataset(GOLDEN / "a"), range(200), num_samples=None, seq_length=128, seed=1, cache_path=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"takes 300 samples of .*a, which holds 257"):
        BlendedDataset([part], [1.0], 300, name="train", cache_folder=tmp_path)
