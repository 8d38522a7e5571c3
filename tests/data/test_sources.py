"""The data flags give data in two ways, with weights and splits."""

import pytest

from megatron_zpp.data.text.sources import Source, parse_blend, read_sources, split_edges, split_sequences

WHOLE = (0.0, 1.0)


def test_split_edges_and_ranges():
    assert split_edges("969, 30, 1") == [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]
    assert split_edges("9,1") == [(0.0, 0.9), (0.9, 1.0), None]
    assert split_edges("0,1,1") == [None, (0.0, 0.5), (0.5, 1.0)]
    assert split_sequences(5, (0.0, 0.5)) == range(0, 2)  # 2.5 to the even number
    assert split_sequences(7, (0.5, 1.0)) == range(4, 7)  # 3.5 likewise
    assert split_sequences(7, (0.0, 0.5)) == range(0, 4)
    assert split_sequences(10, (0.26, 0.74)) == range(3, 7)
    assert split_edges("1e1, 10 5e0") == [(0.0, 0.4), (0.4, 0.8), (0.8, 1.0)]


@pytest.mark.parametrize(
    "split",
    ["", " ", "1,2,3,4", "0,0,0", "nan,1,1", "1,nan", "-1,1,1", "1,-1", "inf,1", "1e308,1e308,1e308", "1;1", "1,,1"],
)
def test_splits_that_are_none_are_refused(split):
    with pytest.raises(ValueError, match=r"--split '.*' must be up to three shares"):
        split_edges(split)


def test_parse_blend():
    assert parse_blend(["0.3", "a", "2", "b"]) == (["a", "b"], [0.3, 2.0])
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["a", "b", "c"]) == (["a", "b", "c"], None)
    with pytest.raises(ValueError, match=r"0\.3 is not a dataset"):
        parse_blend(["0.3", "a", "0.7"])
    with pytest.raises(ValueError, match="must be positive"):
        parse_blend(["0", "a", "1", "b"])


def test_two_ways_to_give_data():
    train, valid, test = read_sources(data_path=["0.3", "a", "0.7", "b"], split="3,1")
    assert train == Source(["a", "b"], [0.3, 0.7], (0.0, 0.75))
    assert valid == Source(["a", "b"], [0.3, 0.7], (0.75, 1.0))
    assert test is None
    per_split = read_sources(train_data_path=["1", "a", "2", "b"], valid_data_path=["c", "d", "e"])
    assert per_split == [Source(["a", "b"], [1, 2], WHOLE), Source(["c", "d", "e"], None, WHOLE), None]


def test_default_split():
    assert [source.edges for source in read_sources(data_path=["a"])] == [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"data_path": ["1e308", "a", "1e308", "b"]}, "too large to add up"),
        ({"data_path": ["nan", "a", "1", "b"]}, "weights of a blend must be positive, not nan"),
    ],
)
def test_bad_flags_are_named(flags, message):
    with pytest.raises(ValueError, match=message):
        read_sources(**flags)
