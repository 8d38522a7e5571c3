"""What the data flags mean: three ways to give data, weights, splits."""

import json
import os

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


def test_three_ways_to_give_data(tmp_path):
    (tmp_path / "paths").write_text("0.3 a\n0.7   b\n")
    (tmp_path / "splits.json").write_text(json.dumps({"train": ["1", "a", 2, "b"], "valid": "c d e"}))
    train, valid, test = read_sources(data_path=["0.3", "a", "0.7", "b"], split="3,1")
    assert train == Source(["a", "b"], [0.3, 0.7], (0.0, 0.75))
    assert valid == Source(["a", "b"], [0.3, 0.7], (0.75, 1.0))
    assert test is None
    assert read_sources(data_args_path=str(tmp_path / "paths"), split="3,1") == [train, valid, test]
    per_split = read_sources(train_data_path=["1", "a", "2", "b"], valid_data_path=["c", "d", "e"])
    assert per_split == [Source(["a", "b"], [1, 2], WHOLE), Source(["c", "d", "e"], None, WHOLE), None]
    assert read_sources(per_split_data_args_path=str(tmp_path / "splits.json")) == per_split


def test_default_split():
    assert [source.edges for source in read_sources(data_path=["a"])] == [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "no data: give --data-path"),
        ({"data_path": ["a"], "train_data_path": ["a"]}, "--data-path and --train/valid/test-data-path exclude each"),
        ({"data_path": ["a"], "data_args_path": "f"}, "--data-path and --data-args-path exclude each other"),
        ({"train_data_path": ["a"], "split": "1"}, "--split divides --data-path"),
        ({"per_split_data_args_path": "FOLDER/json", "split": "1"}, "--split divides --data-path"),
        ({"per_split_data_args_path": "FOLDER/text"}, "text is not JSON"),
        ({"per_split_data_args_path": "FOLDER/list"}, "list holds no JSON object but a list"),
        ({"per_split_data_args_path": "FOLDER/twice"}, "twice is not JSON: the key train is there twice"),
        ({"per_split_data_args_path": "FOLDER/deep"}, "deep is JSON that is nested too deep"),
        ({"per_split_data_args_path": "FOLDER/binary"}, "binary is not UTF-8 text"),
        ({"per_split_data_args_path": "FOLDER/pipe"}, "pipe is no regular file"),
        (
            {"per_split_data_args_path": "FOLDER/number"},
            "path .*number gives 3 for train: give a list of prefixes",
        ),
        ({"per_split_data_args_path": "FOLDER/true"}, r"path .*true gives \[true\] for test: give a list"),
        ({"per_split_data_args_path": "FOLDER/nested"}, r"nested gives .* for valid: give a list"),
        ({"data_args_path": "FOLDER/binary"}, "binary is not UTF-8 text"),
        ({"data_args_path": "FOLDER/pipe"}, "pipe is no regular file"),
        ({"data_args_path": "FOLDER"}, "is no regular file"),
        ({"data_path": ["1e308", "a", "1e308", "b"]}, "too large to add up"),
        ({"data_path": ["nan", "a", "1", "b"]}, "weights of a blend must be positive, not nan"),
        ({"per_split_data_args_path": "FOLDER/other"}, "must hold an object of train, valid and test"),
        ({"data_args_path": "FOLDER/empty"}, "empty is empty"),
    ],
)
def test_bad_flags_are_named(tmp_path, flags, message):
    contents = {"json": "{}", "text": "a b", "list": "[]", "other": '{"dev": "a"}', "empty": " \n"}
    contents |= {"twice": '{"train": "a", "train": "b"}'}
    contents |= {"number": '{"train": 3}', "true": '{"test": [true]}', "nested": '{"valid": [["a"]]}'}
    contents |= {"deep": '{"train": ' + "[" * 100_000}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "pipe")
    flags = {k: v.replace("FOLDER", str(tmp_path)) if isinstance(v, str) else v for k, v in flags.items()}
    with pytest.raises(ValueError, match=message):
        read_sources(**flags)
