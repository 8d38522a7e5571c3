"""The inspecting program, as a user starts it."""

import json
import sys

import pytest

from megatron_zpp.commands.data.inspect_dataset import main, parse_arguments, run
from tests.data.small_data import GOLDEN, A, B, write
from tests.data.test_golden import EXPECTED


def inspect(*words):
    return run(parse_arguments(list(map(str, words))))


def digest(*words):
    return json.loads(inspect("--digest", "--seed", 1234, "--seq-length", 128, *words))


def test_digests_are_those_of_golden_json():
    found = digest("--data-path", A, "--split", "90,8,2", "--num-samples", "400,20,3")
    assert found["gpt"] == {name: EXPECTED["gpt"][f"split_90_8_2_{name}"] for name in ("train", "valid", "test")}
    described = found["datasets"][A]
    assert all(described[name] == EXPECTED["datasets"]["a"][name] for name in ("documents", "tokens", "idx_sha256"))
    one_epoch = digest("--train-data-path", A)
    assert one_epoch["gpt"] == {"train": EXPECTED["gpt"]["one_epoch_no_target"]}
    assert (one_epoch["seed"], one_epoch["seq_len"]) == (EXPECTED["seed"], EXPECTED["seq_len"])
    assert not list(GOLDEN.glob("index_cache"))  # looking leaves nothing behind


def test_digests_of_blends(tmp_path):
    found = digest("--data-path", "0.3", A, "0.7", B, "--split", 1, "--num-samples", 300)["blend_train"]
    flags = ["--train-data-path", A, B, "--valid-data-path", "1", B, "2", A]
    everything = digest(*flags, "--num-samples", "all,9")
    assert everything["blend_train"]["length"] == 257 + 95
    assert [part["length"] for part in everything["blend_train"]["parts"]] == [257, 95]
    assert everything["blend_train"]["first_samples_sha256"] != found["first_samples_sha256"]
    assert everything["blend_valid"]["length"] == 3 + 6
    assert digest(*flags, "--num-samples", "all,9", "--data-cache-path", tmp_path / "cache") == everything
    assert (tmp_path / "cache").is_dir()


def test_description(tmp_path):
    text = inspect(A, "--tokenizer-type", "ByteTokenizer", "--show", 2)
    assert "200 documents, 200 sequences, 32,965 tokens (uint16, 0.1 MB), ids 32 to 256" in text
    assert "mean 164.8" in text
    assert "document 0, 233 tokens: '東京 naïve delta an" in text
    assert "document 199, 71 tokens: 'stone zero-shot gamma" in text
    text = inspect(write(tmp_path / "x", [[[5, 70_000], [7]], [], [range(9)]], "<i4"))
    assert "3 documents, 3 sequences, 12 tokens (int32" in text
    bars = [" ".join(line.split()) for line in text.splitlines()[2:7]]
    counts = {"empty": 1, "1 to 1 tokens": 0, "2 to 3 tokens": 1, "4 to 7 tokens": 0, "8 to 15 tokens": 1}
    assert bars == [f"{name} {count} {'#' * 40 * count}".rstrip() for name, count in counts.items()]
    assert "document 0, 3 tokens: 5 70000 7" in text
    assert "document 1, 0 tokens:" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([A + "x"], "error: no dataset at"),
        ([], "give a PREFIX to describe, or --digest"),
        ([A, "--digest"], "give a PREFIX to describe, or --digest"),
        (["--digest", "--data-path", A], "--digest requires --seq-length"),
        (["--digest", "--data-path", A, "--seq-length", 99999], "error: the train split of"),
        (["--digest", "--data-path", "1", A, "2", B, "--seq-length", 9], "error: a blend by weights has no epochs"),
    ],
)
def test_mistakes_are_named(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inspect_dataset.py", *map(str, words)])
    try:
        assert main() == 2
    except SystemExit as exit_:  # of argparse
        assert exit_.code == 2
    assert message in capsys.readouterr().err
