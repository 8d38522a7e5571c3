"""Every way to give a corpus gives the same documents, and whatever it holds comes back from the .bin/.idx files."""

import dataclasses
import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_zpp.data.text import corpus
from megatron_zpp.data.text.corpus import Reading, extract_texts, find_files, read_blocks, records
from megatron_zpp.data.text.preprocessing import Job, preprocess
from megatron_zpp.data.text.tokenizers import ByteTokenizer
from tests.data.small_data import read as read_ids

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
DOCUMENT = st.one_of(TEXT, st.lists(TEXT, max_size=4))


def write(folder: Path, name: str, documents: list) -> Path:
    path = folder / name
    lines = "".join(json.dumps({"text": d}, ensure_ascii=i % 2 == 0) + "\n" for i, d in enumerate(documents)).encode()
    if ".json" in name and ".jsonl" not in name:
        indent = len(documents) % 3 or None
        lines = json.dumps([{"id": i, "text": d} for i, d in enumerate(documents)], indent=indent).encode()
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
    return [[ByteTokenizer().detokenize(ids) for ids in document] for document in read_ids(prefix)]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 64)
    monkeypatch.setattr(corpus, "MAX_ROWS", 2)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "parquet"])
@given(documents=st.lists(DOCUMENT, min_size=1, max_size=12))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_corpus_comes_back(tmp_path, small_blocks, suffix, documents):
    documents = [*documents, "the end"]
    path = write(tmp_path, f"in.{suffix}", documents)
    job = Job((str(path),), str(tmp_path / "out"), {"tokenizer_type": "ByteTokenizer"}, append_eod=True)
    state = preprocess(job, lambda state, total: None, lambda note: None)
    expected = [[text for text in (d if isinstance(d, list) else [d]) if text] for d in documents]
    assert documents_of(tmp_path / "out_text_document") == expected
    assert (state.documents, state.bad, state.eods_in_text) == (len(documents), 0, 0)
    ends = [ids[-1] for document in read_ids(tmp_path / "out_text_document") for ids in document]
    assert ends.count(256) == sum(map(bool, expected))


@given(lines=st.lists(TEXT.map(lambda text: text.replace("\n", " ")), max_size=12), cuts=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reading_goes_on_at_the_end_of_any_block(tmp_path, small_blocks, lines, cuts):
    files = [write(tmp_path, name, lines) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "d.json")]
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


DEFAULT = Reading()


def read(path: Path, reading: Reading = DEFAULT) -> list[str]:
    """All texts, and the places of records that are too long."""
    found = []
    for block in read_blocks(find_files([str(path)]), reading):
        found += [f"too long at {block.start.line}"] if block.too_long else []
        found += [text for _, record in records(block) for text in extract_texts(record, block.format, reading)["text"]]
    return found


def test_a_line_that_is_too_long_is_passed_over_wherever_it_lies(tmp_path, small_blocks):
    path = tmp_path / "in.txt"
    reading = Reading(text_documents="line", max_document_bytes=200)
    for num_before in (0, 1, 30):
        for long in (200, 201, 5000):
            path.write_bytes(b"short\n" * num_before + b"x" * long + b"\nend")
            middle = "x" * 200 if long == 200 else f"too long at {num_before + 1}"
            assert read(path, reading) == [*["short"] * num_before, middle, "end"]
    *_, long_block, last = read_blocks(find_files([str(path)]), reading)
    assert long_block.too_long
    assert list(read_blocks(find_files([str(path)]), reading, long_block.start)) == [long_block, last]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": ', "element 2 of the JSON array is not JSON"),
        ('[{"text": "a"} {"text" "b"}]', "element 2 of the JSON array is not JSON"),
        ('[{"text": "a"}', "element 2 of the JSON array is not JSON"),
        ('[{"text": "a"}{"text": "b"}]', "element 2 of the JSON array is not JSON.*no comma in front of it"),
        ('[{"text": "a"},]', "element 2 of the JSON array is not JSON"),
        ('[{"text": "a"}, , {"text": "b"}]', "element 2 of the JSON array is not JSON"),
        ('[{"text": "a"}, {"text": "%s"}]' % ("b" * 2000), "element 2 .* longer than --max-document-megabytes 0.00085"),
    ],
)
def test_a_damaged_array_is_named_with_the_element(tmp_path, small_blocks, content, message):
    (tmp_path / "in.json").write_text(content)
    with pytest.raises(ValueError, match=f"in.json: {message}"):
        read(tmp_path / "in.json", Reading(max_document_bytes=900))


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a"}]\n[{"text": "b"}]',  # arrays that cat joined
        '[{"text": "a"}]' + " " * 200 + '{"text": "b"}\n',
        '[1, 2]\n{"text": "a"}\n{"text": "b"}\n',  # lines, the first of which is bad
        "[]\n[]",
    ],
)
def test_nothing_behind_an_array_is_lost_in_silence(tmp_path, small_blocks, content):
    (tmp_path / "in.json").write_text(content)
    job = Job((str(tmp_path / "in.json"),), str(tmp_path / "out"), {"tokenizer_type": "ByteTokenizer"}, skip_bad=True)
    with pytest.raises(
        ValueError, match=r"in\.json goes on after its JSON array: give one array, or an object on each"
    ):
        preprocess(job, lambda state, total: None, lambda note: None)


def test_an_array_behind_a_byte_order_mark_or_of_numbers_is_read_whole(tmp_path, small_blocks):
    (tmp_path / "in.json").write_bytes(b'\xef\xbb\xbf [{"text": "a"}, {"text": "b"}] \n')
    assert read(tmp_path / "in.json") == ["a", "b"]
    numbers = list(range(1000, 1100))  # pieces of the file end within some
    (tmp_path / "in.json").write_text(json.dumps(numbers))
    blocks = list(read_blocks(find_files([str(tmp_path / "in.json")]), DEFAULT))
    assert [record for block in blocks for _, record in records(block)] == numbers


def test_an_element_of_an_array_that_is_no_object_is_a_bad_record(tmp_path):
    (tmp_path / "in.json").write_text('[{"text": "a"}, 3]')
    with pytest.raises(ValueError, match="not a JSON object but a int"):
        read(tmp_path / "in.json")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_token_ids_stay_as_they_are(tmp_path, suffix):
    rows = [[5, 0, 31], [7], [[1, 2], [3]]] if suffix == "jsonl" else [[5, 0, 31], [7], [1, 2]]
    if suffix == "jsonl":
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"ids": rows}), tmp_path / "in.parquet")
    for kind, size in (("ByteTokenizer", None), ("NullTokenizer", 32)):
        tokenizer = {"tokenizer_type": kind, "vocab_size": size}
        reading = Reading(("ids",))
        job = Job((str(tmp_path / f"in.{suffix}"),), str(tmp_path / kind), tokenizer, reading=reading, append_eod=True)
        preprocess(job, lambda state, total: None, lambda note: None)
        end = 256 if size is None else size
        expected = [[[5, 0, 31, end]], [[7, end]], [[1, 2], [3, end]] if suffix == "jsonl" else [[1, 2, end]]]
        assert read_ids(tmp_path / f"{kind}_ids_document") == expected
    job = dataclasses.replace(job, tokenizer=tokenizer | {"vocab_size": 30}, output_prefix=str(tmp_path / "small"))
    with pytest.raises(ValueError, match=f"in.{suffix}:1: ids 0 to 31 are not all below the tokenizer's 31"):
        preprocess(job, lambda state, total: None, lambda note: None)


def test_a_window_that_is_too_large_names_the_command_that_reads_it(tmp_path):
    """The header of a frame with a window of 2 GiB, as zstd --long=31 writes it."""
    (tmp_path / "in.jsonl.zst").write_bytes(bytes.fromhex("28b52ffd 00 a8 010000"))
    with pytest.raises(ValueError, match=r"can't be read to its end: .*: zstd -dc --long=31 .*in.jsonl.zst"):
        read(tmp_path / "in.jsonl.zst")


def test_text_files_are_documents_or_lines(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(b"first\r\n\r\n  second")
    (tmp_path / "b" / "c.md").write_bytes(b"third\n")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"fourth"))
    (tmp_path / "b" / "code.py").write_bytes(b"not by default")
    (tmp_path / ".hidden.txt").write_bytes(b"never")
    assert read(tmp_path) == ["first\r\n\r\n  second", "third\n", "fourth"]
    assert read(tmp_path, Reading(text_documents="line")) == ["first", "  second", "third", "fourth"]
    assert read(tmp_path, Reading(max_document_bytes=8)) == ["too long at 1", "third\n", "fourth"]
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


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nothing", FileNotFoundError, "nothing does not exist"),
        ("*.nothing", FileNotFoundError, "does not exist"),
        ("pipe.jsonl", ValueError, r"pipe\.jsonl is not a regular file"),
        ("empty", FileNotFoundError, "holds no file of"),
        ("in.parquet", ValueError, "no column 'body'; it has id, text"),
    ],
)
def test_what_is_missing_is_named(tmp_path, name, error, message):
    write(tmp_path, "in.parquet", ["a"])
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=message):
        list(read_blocks(find_files([str(tmp_path / name)]), Reading(("body",))))


def test_a_pattern_stands_for_the_files_that_it_matches_in_order(tmp_path):
    for name in ("part-2.jsonl", "part-10.jsonl", "part-1.txt", "below/part-3.jsonl", "[odd].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")

    def names(pattern):
        return [str(file.path.relative_to(tmp_path)) for file in find_files([str(tmp_path / pattern)])]

    assert names("part-*.jsonl") == ["part-10.jsonl", "part-2.jsonl"]
    assert names("**/part-[1-3].*") == ["below/part-3.jsonl", "part-1.txt", "part-2.jsonl"]
    assert names("[odd].jsonl") == ["[odd].jsonl"]  # a file of that very name is no pattern
