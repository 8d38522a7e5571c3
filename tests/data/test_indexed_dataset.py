"""The .bin/.idx format: bytes, round trips, and what happens to damaged files."""

import os
import pickle
import struct
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data import indexed_dataset
from megatron_zpp.data.gpt_dataset import GPTDataset, SampleOptions
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indexed_dataset import DTYPES, IndexedDataset, IndexedDatasetWriter, best_dtype
from tests.data.small_data import GOLDEN, A, read, write
from tests.tools import cut


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 120), max_size=9), max_size=4), max_size=12),
    code=st.sampled_from(sorted(DTYPES)),
)
def test_any_corpus_comes_back(documents, code):
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/x", documents, DTYPES[code])
        dataset = IndexedDataset(f"{folder}/x")
        assert dataset.dtype == np.dtype(DTYPES[code])
        assert read(f"{folder}/x") == documents
        for i in range(len(dataset)):
            if len(dataset[i]) >= 3:
                assert dataset.get(i, 1, 2).tolist() == dataset[i].tolist()[1:3]


def test_best_dtype_switches_at_65500():
    assert best_dtype(65_499) == np.uint16
    assert best_dtype(65_500) == np.int32


def test_multimodal_mode_bytes_are_tolerated(tmp_path):
    write(tmp_path / "x", [[[1, 2]], [[3]]])
    with open(tmp_path / "x.idx", "ab") as file:
        file.write(b"\x00\x01")
    assert IndexedDataset(tmp_path / "x")[1].tolist() == [3]


def test_reading_by_file_handle_equals_mapping_and_both_are_pickled_as_their_names_alone():
    mapped, read = IndexedDataset(A), IndexedDataset(A, mmap_tokens=False)
    assert all(np.array_equal(mapped[i], read[i]) for i in range(len(mapped)))
    assert mapped.token_range() == read.token_range()
    for dataset in (mapped, read):
        data = pickle.dumps(dataset)
        assert len(data) < 500
        assert np.array_equal(pickle.loads(data).get(7, 5, 20), mapped[7][5:25])


def test_token_range_reads_negative_ids(tmp_path):
    write(tmp_path / "x", [[[5, -3, 70_000]]], "<i4")
    passed = []
    assert IndexedDataset(tmp_path / "x").token_range(passed.append) == (-3, 70_000)
    assert sum(passed) == 3
    write(tmp_path / "y", [])
    assert IndexedDataset(tmp_path / "y").token_range() == (0, 0)


def test_token_range_reads_pieces_evenly_spaced_if_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "PIECE", 4)
    tokens = list(range(50, 27, -1))  # 23 of 2 bytes
    for place, outlier in ((0, 99), (22, 3), (13, 98)):
        write(tmp_path / "x", [[[*tokens[:place], outlier, *tokens[place + 1 :]]]])
        dataset, passed = IndexedDataset(tmp_path / "x"), []
        values = dataset[0]
        assert dataset.token_range(passed.append) == (values.min(), values.max())
        assert passed == [4, 4, 4, 4, 4, 3]
        passed.clear()
        some = np.concatenate([values[0:4], values[12:16]])  # 46 bytes of at most 20: one piece of three
        assert dataset.token_range(passed.append, max_bytes=20) == (some.min(), some.max())
        assert passed == [12, 11]


def test_a_writer_refuses_what_does_not_add_up(tmp_path):
    for tokens, lengths, counts in (([1, 2, 3], [2], [1]), ([1, 2], [2], [2])):
        with pytest.raises(ValueError, match="do not add up"), IndexedDatasetWriter(tmp_path / "x", "<u2") as writer:
            writer.add_documents(np.array(tokens), lengths, counts)
    with pytest.raises(ValueError, match="-1 to 2 do not fit uint16"), IndexedDatasetWriter(tmp_path / "x", "<u2") as w:
        w.add_document([[-1, 2]])
    with pytest.raises(ValueError, match="no code for complex64"):
        IndexedDatasetWriter(tmp_path / "x", np.complex64)
    with IndexedDatasetWriter(tmp_path / "x", "<u2") as writer:
        writer.add_document([[0, 65_535]])
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["x.bin", "x.idx"]


@pytest.mark.parametrize("part", ["bin", "lengths", "documents"])
def test_a_writer_goes_on_only_with_all_that_was_written(tmp_path, part):
    writer = IndexedDatasetWriter(tmp_path / "x", "<u2")
    writer.add_document([[1, 2], [3]])
    counts = writer.sync()
    assert counts == (3, 2, 1)
    writer.add_document([[4]])  # after the sync: is cut off
    writer.close()
    writer = IndexedDatasetWriter(tmp_path / "x", "<u2", counts)
    writer.close()
    cut(tmp_path / f"x.{part}.partial", -1)
    with pytest.raises(ValueError, match=f"x.{part}.partial is missing or too short .*--restart"):
        IndexedDatasetWriter(tmp_path / "x", "<u2", counts)


def put(path, offset, number, kind="q"):
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{kind}", data, offset, number)
    path.write_bytes(data)


# Where the arrays of three sequences in three documents begin, and what is said about damaged ones.
LENGTHS, POINTERS, DOCUMENTS = 34, 34 + 3 * 4, 34 + 3 * 12
SEQUENCES = "x.idx is damaged: its sequences do not cover the tokens"
DOCUMENTS_OUT_OF_ORDER = "x.idx is damaged: its documents do not cover its sequences"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a, b: cut(a / "x.bin", -2), "x.bin holds .* bytes"),
        (lambda a, b: ((a / "x.bin").unlink(), os.mkfifo(a / "x.bin")), r"x\.bin is no regular file"),
        (lambda a, b: cut(a / "x.idx", -8), "x.idx is truncated"),
        (lambda a, b: (a / "x.bin").write_bytes((a / "x.bin").read_bytes() + b"xx"), "x.bin holds 12 bytes, .* 10"),
        (lambda a, b: put(a / "x.idx", LENGTHS, -1, "i"), SEQUENCES),
        (lambda a, b: put(a / "x.idx", LENGTHS, 4, "i"), SEQUENCES),
        (lambda a, b: put(a / "x.idx", POINTERS, 2), SEQUENCES),
        (lambda a, b: put(a / "x.idx", POINTERS + 8, 1 << 40), SEQUENCES),
        (lambda a, b: put(a / "x.idx", POINTERS + 8, 4), SEQUENCES),
        (lambda a, b: put(a / "x.idx", POINTERS + 16, 999), SEQUENCES),
        (lambda a, b: put(a / "x.idx", DOCUMENTS, 1), DOCUMENTS_OUT_OF_ORDER),
        (lambda a, b: put(a / "x.idx", DOCUMENTS + 8, 3), DOCUMENTS_OUT_OF_ORDER),
        (lambda a, b: put(a / "x.idx", DOCUMENTS + 16, -1), DOCUMENTS_OUT_OF_ORDER),
        (lambda a, b: put(a / "x.idx", DOCUMENTS + 24, 7), DOCUMENTS_OUT_OF_ORDER),
        (lambda a, b: put(a / "x.idx", 17, 0, "B"), "x.idx has version 1 and dtype code 0; known: 1, 1 to 8"),
        (lambda a, b: put(a / "x.idx", 9, 2), "x.idx has version 2 and dtype code 8"),
        (lambda a, b: put(a / "x.idx", 18, 2), "x.idx is truncated or damaged: 102 bytes, its header says 90"),
        (lambda a, b: put(a / "x.idx", 26, 0), "x.idx is truncated or damaged: 102 bytes, its header says 70"),
        (lambda a, b: cut(a / "x.idx", 20), "x.idx is truncated"),
        (lambda a, b: cut(a / "x.idx", 0), "x.idx is truncated"),
        (lambda a, b: (a / "x.idx").write_bytes(b"TNTIDX\x00\x00" * 9), "x.idx is not a Megatron .idx"),
        (lambda a, b: (a / "x.bin").write_bytes((b / "y.bin").read_bytes()), "make both again"),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 1 << 20])
def test_damaged_files_are_named(tmp_path, monkeypatch, damage, message, rows):
    """Also where it lies between two pieces that are looked at one after the other."""
    monkeypatch.setattr(indexed_dataset, "COPY_ROWS", rows)
    write(tmp_path / "x", [[[1, 2, 3]], [[4]], [[5]]])
    write(tmp_path / "y", [[[1, 2, 3]], [[4, 5, 6]]])
    IndexedDataset(tmp_path / "x")
    damage(tmp_path, tmp_path)
    for mmap_tokens in (True, False):
        with pytest.raises(ValueError, match=message):
            IndexedDataset(tmp_path / "x", mmap_tokens)


@pytest.mark.parametrize("mmap_tokens", [True, False])
def test_files_that_are_cut_while_they_are_read_are_named(tmp_path, mmap_tokens):
    write(tmp_path / "x", [[range(18_000)]], "<i4")
    options = SampleOptions(seq_length=8999, seed=1)
    dataset = IndexedDataset(tmp_path / "x", mmap_tokens)
    samples = GPTDataset(dataset, range(1), options, num_samples=None, cache=IndexCache(str(tmp_path)))
    last = next(i for i in range(2) if samples[i][0] == 8999)
    os.truncate(tmp_path / "x.bin", 50_000)
    for use in (dataset.token_range, lambda: samples[last]):
        with pytest.raises(ValueError, match=r"x\.bin holds 50000 bytes, and held 72000 when it was opened"):
            use()
    os.truncate(tmp_path / "x.bin", 72_000)
    assert samples[1 - last].tolist() == list(range(9000))
    os.truncate(tmp_path / "x.idx", 40)
    with pytest.raises(ValueError, match=r"x\.idx holds 40 bytes, and held 62 when it was opened"):
        samples[0]


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", r"nothing\.idx does not exist"), ("a.bin", "leave out the file suffix")]
)
def test_missing_files_are_named(name, message):
    with pytest.raises(FileNotFoundError, match=message):
        IndexedDataset(GOLDEN / name)
