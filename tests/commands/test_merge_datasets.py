"""tools/merge_datasets.py as a user starts it."""

import numpy as np
import pytest

from megatron_zpp.commands.data import merge_datasets
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_zpp.data.text.description import describe_tokenizer
from megatron_zpp.data.text.tokenizers import ByteTokenizer
from tests.data.small_data import read, write
from tests.tools import call


def merge(*inputs, output):
    return call(merge_datasets, "--input", *inputs, "--output-prefix", output)


def write_random(prefix, seed, dtype="<u2"):
    """Documents of 0 to 3 sequences; returns them."""
    draw = np.random.default_rng(seed)
    documents = [
        [draw.integers(1000, size=draw.integers(0, 50)).tolist() for _ in range(draw.integers(4))] for _ in range(40)
    ]
    write(prefix, documents, dtype)
    return documents


def test_a_folder_is_merged_in_the_order_of_names(tmp_path):
    (tmp_path / "parts").mkdir()
    b, a = write_random(tmp_path / "parts" / "b", 1), write_random(tmp_path / "parts" / "a", 2)
    tokens = sum(len(sequence) for document in a + b for sequence in document)
    expected = f"{tmp_path}/all: 80 documents, {tokens:,} tokens of 2 datasets\n"
    assert merge(tmp_path / "parts", output=tmp_path / "all")[:2] == (0, expected)
    assert read(tmp_path / "all") == a + b
    merge(tmp_path / "parts" / "b", tmp_path / "all", output=tmp_path / "more")
    assert read(tmp_path / "more") == b + a + b


@pytest.mark.parametrize(("piece", "max_documents"), [(1, 100), (64, 3), (500, 100), (1 << 20, 1)])
def test_pieces_of_any_size_make_the_same_dataset(tmp_path, monkeypatch, piece, max_documents):
    monkeypatch.setattr(merge_datasets, "PIECE", piece)
    monkeypatch.setattr(merge_datasets, "MAX_DOCUMENTS", max_documents)
    documents = write_random(tmp_path / "a", 3) + write_random(tmp_path / "b", 4)
    merge_datasets.merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "all"))
    assert read(tmp_path / "all") == documents


def test_what_does_not_fit_is_named(tmp_path):
    write_random(tmp_path / "a", 1)
    write_random(tmp_path / "b", 2, "<i4")
    for inputs, output, message in [
        (["a", "b"], "all", "are from different tokenizers"),
        (["a", "c"], "all", "c.idx does not exist"),
        (["a", "b"], "b", "is one of the datasets to merge"),
        ([""], "b", "is one of the datasets to merge"),
    ]:
        status, _, error = merge(*(tmp_path / name for name in inputs), output=tmp_path / output)
        assert status == 2 and message in error
        assert not (tmp_path / "all.idx").exists()


def test_datasets_of_two_tokenizers_are_not_merged_and_the_description_of_one_is_kept(tmp_path):
    described = describe_tokenizer("ByteTokenizer", ByteTokenizer())
    other = described | {"type": "Llama2Tokenizer", "prefix": [1]}
    for name, tokenizer in {"a": described, "b": described, "c": other, "d": None}.items():
        with IndexedDatasetWriter(tmp_path / name, "<u2", tokenizer=tokenizer) as writer:
            writer.add_document([[1, 2]])
    for names, kept in (("ab", described), ("ad", None)):
        assert merge(*(tmp_path / name for name in names), output=tmp_path / names)[0] == 0
        assert IndexedDataset(tmp_path / names).tokenizer == kept
    code, _, error = merge(tmp_path / "a", tmp_path / "c", output=tmp_path / "ac")
    assert (
        code and "was made with another tokenizer, ByteTokenizer" in error and "begin with nothing, here [1]" in error
    )
