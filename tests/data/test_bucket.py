"""Datasets under a URL, in fsspec's store of this process."""

import fsspec
import numpy as np
import pytest

from megatron_zpp.commands.data import preprocess_data
from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.indexed_dataset import IndexedDataset, upload
from megatron_zpp.data.text import preprocessing
from tests.tools import call, refuse

URL = "memory://bucket/corpus/part"
TEXT = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--text-documents", "line"]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Text that was tokenized into a folder, and into a bucket; the bytes of each read from then on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    (tmp_path / "in.txt").write_text("\n".join(f"line {i} " * 9 for i in range(400)))
    for output in (tmp_path / "part", URL):
        code, out, err = call(preprocess_data, "--input", tmp_path / "in.txt", "--output-prefix", output, *TEXT)
        assert code == 0 and f"in {output}_text_document.bin" in out, err
    reads, cat_file = [], memory.cat_file
    monkeypatch.setattr(
        type(memory),
        "cat_file",
        lambda self, path, start=None, end=None, **more: reads.append(end - start) or cat_file(path, start, end),
    )
    return reads


def test_samples_and_order_are_those_of_local_files_and_reads_are_small(corpus, tmp_path):
    options = SampleOptions(seq_length=64, seed=3, eod=256)
    ours, theirs = (
        build_datasets(options, data_path=[f"{prefix}_text_document"], num_samples=(50, 4, 0), vocab_size=70_000).train
        for prefix in (URL, tmp_path / "part")
    )
    assert ours.order == theirs.order
    del corpus[:]
    for i in range(50):
        np.testing.assert_array_equal(ours[i], theirs[i])
    assert len(corpus) >= 50 and max(corpus) <= 2 * 65
    assert {path.name for path in (tmp_path / "cache").rglob("*.bin")} == set()
    (copy,) = (tmp_path / "cache" / "megatron_zpp").glob("*.idx")
    copied = copy.stat().st_mtime_ns
    IndexedDataset(f"{URL}_text_document")
    assert copy.stat().st_mtime_ns == copied


def test_an_upload_that_was_cut_short_is_no_dataset_and_nothing_is_lost(corpus, tmp_path, monkeypatch):
    refuse(monkeypatch, ".idx", "wb")
    prefix = str(tmp_path / "part_text_document")
    with pytest.raises(
        OSError, match=r"cannot write memory://bucket/corpus/part_text_document\.idx: the token has exp"
    ):
        upload(prefix, f"{URL}_text_document")
    with pytest.raises(FileNotFoundError, match=r"part_text_document\.idx does not exist"):
        IndexedDataset(f"{URL}_text_document")
    assert len(IndexedDataset(prefix)) == 400


def test_a_failed_upload_costs_no_second_tokenizing_and_a_refusal_not_even_one(corpus, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"a": "one", "b": "two"}\n' * 9)
    words = ["--input", tmp_path / "in.jsonl", "--output-prefix", f"{URL}s", "--json-keys", "a", "b", *TEXT]
    encode = preprocessing.encode_blocks
    for name, tokenize in (("parts", None), ("parts_b_document.idx", encode), ("nothing", None)):
        with monkeypatch.context() as patch:
            refuse(patch, name, "wb")
            patch.setattr(preprocessing, "encode_blocks", tokenize)
            code, out, err = call(preprocess_data, *words)
        assert code == 0 if name == "nothing" else f"error: cannot write {URL}s" in err, err
    assert len(IndexedDataset(f"{URL}s_a_document")) == len(IndexedDataset(f"{URL}s_b_document")) == 9
    assert not [*(tmp_path / "cache").rglob("*.bin")] and "9 documents" in out
    assert not any("probe" in name for name in fsspec.filesystem("memory").store)
