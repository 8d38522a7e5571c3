"""Every way to give a corpus gives the same documents, and whatever it holds comes back from the .bin/.idx files."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.text import corpus
from megatron_zpp.data.text.corpus import Position, Reading, extract_texts, find_files, read_blocks, records
from megatron_zpp.data.text.preprocessing import Job, preprocess
from megatron_zpp.data.text.tokenizers import ByteTokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
DOCUMENT = st.one_of(TEXT, st.lists(TEXT, max_size=4))


def write(folder: Path, name: str, documents: list) -> Path:
    path = folder / name
    lines = "".join(json.dumps({"text": d}, ensure_ascii=i % 2 == 0) + "\n" for i, d in enumerate(documents)).encode()
    if name.endswith(".parquet"):
        rows = [d if isinstance(d, list) else [d] for d in documents]
        table = pyarrow.table(
            {"id": list(range(len(rows))), "text": pyarrow.array(rows, pyarrow.list_(pyarrow.string()))}
        )
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines[: len(lines) // 2]) + gzip.compress(lines[len(lines) // 2 :]))
    elif name.endswith(".zst"):
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write(lines)
    else:
        path.write_bytes(lines)
    return path


def documents_of(prefix: Path) -> list[list[str]]:
    dataset, tokenizer = IndexedDataset(prefix), ByteTokenizer()
    ends = dataset.document_indices
    return [
        [tokenizer.detokenize(dataset[s].tolist()) for s in range(ends[d], ends[d + 1])]
        for d in range(dataset.num_documents)
    ]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 64)
    monkeypatch.setattr(corpus, "MAX_ROWS", 2)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@given(documents=st.lists(DOCUMENT, min_size=1, max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_corpus_comes_back(tmp_path, small_blocks, suffix, documents):
    documents = [*documents, "the end"]
    path = write(tmp_path, f"in.{suffix}", documents)
    job = Job((str(path),), str(tmp_path / "out"), {"tokenizer_type": "ByteTokenizer"}, append_eod=True)
    state = preprocess(job, lambda state, total: None, lambda note: None)
    expected = [[text for text in (d if isinstance(d, list) else [d]) if text] for d in documents]
    assert documents_of(tmp_path / "out_text_document") == expected
    assert (state.documents, state.bad, state.eods_in_text) == (len(documents), 0, 0)
    ends = [d[-1] for d in map(IndexedDataset(tmp_path / "out_text_document").get, range(state.written["text"][1]))]
    assert ends.count(256) == sum(map(bool, expected))


@given(lines=st.lists(TEXT.map(lambda text: text.replace("\n", " ")), max_size=12), cuts=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reading_goes_on_at_the_end_of_any_block(tmp_path, small_blocks, lines, cuts):
    files = [write(tmp_path, name, lines) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet")]
    (tmp_path / "e.txt").write_text("one file")
    (tmp_path / "f.txt").write_text("\n".join(lines), newline="")
    corpus_files = find_files([*map(str, files), str(tmp_path / "e.txt"), str(tmp_path / "f.txt")])
    for reading in (Reading(), Reading(text_documents="line")):
        blocks = list(read_blocks(corpus_files, reading))
        for block in [cuts.draw(st.sampled_from(blocks))]:
            after = blocks[blocks.index(block) + 1 :]
            assert list(read_blocks(corpus_files, reading, block.end)) == after
            assert list(read_blocks(corpus_files, reading, block.start)) == [block, *after]
    places = [place for block in blocks for place, _ in records(block) if "e.txt" not in place and "f.txt" not in place]
    assert places == [f"{file}:{number}" for file in files for number in range(1, len(lines) + 1)]


def read(path: Path, **reading) -> list[str]:
    """All texts, and the places of records that are too long."""
    how = Reading(**reading)
    found = []
    for block in read_blocks(find_files([str(path)]), how):
        found += [f"too long at {block.start.line}"] if block.too_long else []
        found += [text for _, record in records(block) for text in extract_texts(record, block.format, how)["text"]]
    return found


def test_a_line_that_is_too_long_is_passed_over_wherever_it_lies(tmp_path, small_blocks):
    path = tmp_path / "in.txt"
    for num_before in (0, 1, 30):
        for long in (200, 201, 5000):
            path.write_bytes(b"short\n" * num_before + b"x" * long + b"\nend")
            middle = ["x" * 200] if long == 200 else [f"too long at {num_before + 1}"]
            assert read(path, text_documents="line", max_document_bytes=200) == ["short"] * num_before + middle + [
                "end"
            ]
    files = find_files([str(path)])
    *_, long_block, last = read_blocks(files, Reading(text_documents="line", max_document_bytes=200))
    assert long_block.too_long
    again = list(read_blocks(files, Reading(text_documents="line", max_document_bytes=200), long_block.start))
    assert again == [long_block, last]


def test_text_files_are_documents_or_lines(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(b"first\r\n\r\n  second")
    (tmp_path / "b" / "c.md").write_bytes(b"third\n")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"fourth"))
    (tmp_path / "b" / "code.py").write_bytes(b"not by default")
    (tmp_path / ".hidden.txt").write_bytes(b"never")
    assert read(tmp_path) == ["first\r\n\r\n  second", "third\n", "fourth"]
    assert read(tmp_path, text_documents="line") == ["first", "  second", "third", "fourth"]
    assert read(tmp_path, max_document_bytes=8) == ["too long at 1", "third\n", "fourth"]
    names = [file.path.name for file in find_files([str(tmp_path)], "text")]
    assert names == ["a.txt", "c.md", "code.py", "d.txt.gz"]


def test_parquet_columns_of_any_text_type(tmp_path):
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.dictionary("int32", "string")):
        values = pyarrow.array(["größe", "東京"], pyarrow.string()).cast(kind)
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "in.parquet")
        assert read(tmp_path / "in.parquet") == ["größe", "東京"]


def test_rows_without_a_text_are_bad_rows(tmp_path):
    bad = pyarrow.array([b"\xff", b"fine", None], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad.view(pyarrow.string())}), tmp_path / "in.parquet")
    notes = []
    job = Job((str(tmp_path),), str(tmp_path / "out"), {"tokenizer_type": "ByteTokenizer"}, skip_bad=True)
    preprocess(job, lambda state, total: None, notes.append)
    assert documents_of(tmp_path / "out_text_document") == [["fine"]]
    assert [note.split("in.parquet:")[1][:14] for note in notes] == ["1: 'utf-8' cod", "3: the value o"]


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst", "in.parquet"])
def test_damaged_files_are_named(tmp_path, name):
    path = write(tmp_path, name, ["some text"] * 1000)
    content = path.read_bytes()
    for damaged in (content[:-10], b"something else"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=name):
            list(read_blocks(find_files([str(path)]), Reading()))


def test_what_is_missing_is_named(tmp_path):
    write(tmp_path, "in.parquet", ["a"])
    with pytest.raises(ValueError, match="no column 'body'; it has id, text"):
        list(read_blocks(find_files([str(tmp_path)]), Reading(("body",))))
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        find_files([str(tmp_path / "nothing")])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_files([str(tmp_path / "*.nothing")])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl is not a regular file"):
        find_files([str(tmp_path / "pipe.jsonl")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no file of"):
        find_files([str(tmp_path / "empty")])
    assert list(read_blocks([], Reading(), Position())) == []


def test_a_pattern_stands_for_the_files_that_it_matches_in_order(tmp_path):
    for name in ("part-2.jsonl", "part-10.jsonl", "part-1.txt", "below/part-3.jsonl", "[odd].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")

    def names(pattern):
        return [str(file.path.relative_to(tmp_path)) for file in find_files([str(tmp_path / pattern)])]

    assert names("part-*.jsonl") == ["part-10.jsonl", "part-2.jsonl"]
    assert names("**/part-[1-3].*") == ["below/part-3.jsonl", "part-1.txt", "part-2.jsonl"]
    assert names("[odd].jsonl") == ["[odd].jsonl"]  # a file of that very name is no pattern
