"""The inspecting program describes a dataset."""

from megatron_zpp.commands.data.inspect_dataset import parse_arguments, run
from tests.data.small_data import A, write


def inspect(*words):
    return run(parse_arguments(list(map(str, words))))


def test_a_dataset_is_described_by_its_documents_tokens_and_lengths(tmp_path):
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
