"""Reads a corpus of any size block by block: JSON lines or an array (plain, .gz, .zst), Parquet, text, folders of them.

A block begins and ends between records (a line, a row, a file). Where blocks begin depends on nothing but the files, so
reading can continue at the end of any block.
"""

import codecs
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megatron_zpp.data.text.packages import load_package

FORMATS = ("jsonl", "parquet", "text")
SUFFIXES = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
}
BLOCK_BYTES = 256 << 10  # small enough to balance between workers, large enough to be worth sending
# Before the first element of a JSON array, and before the others; the group is the array's end.
ARRAY_START, SEPARATOR = re.compile(r"\ufeff?\s*\[\s*(\])?"), re.compile(r"\s*(?:,\s*|(\]))")
MAX_ROWS = 4096  # rows of a Parquet file in a block


@dataclass(frozen=True)
class CorpusFile:
    path: Path
    format: str  # one of FORMATS
    num_bytes: int  # on disk
    mtime_ns: int


@dataclass(frozen=True)
class Position:
    file: int = 0  # number of the file in the corpus
    offset: int = 0  # uncompressed bytes before it; rows of a Parquet file
    line: int = 1  # number of its line or row, from 1


@dataclass(frozen=True)
class Block:
    """``records``: bytes of many lines, or a list of rows (key -> value), or a list of files (path, content)."""

    path: str
    format: str
    records: bytes | list[dict[str, Any]] | list[tuple[str, bytes]]
    start: Position
    end: Position
    num_bytes: int  # uncompressed size of the records
    disk_bytes: int = field(compare=False)  # read from disk for them; approximate, because files are read ahead
    too_long: bool = False  # one record that was skipped because it is longer than allowed


@dataclass(frozen=True)
class Reading:
    """How files become documents."""

    keys: tuple[str, ...] = ("text",)
    text_documents: str = "file"  # documents of a text file: "file" or "line"
    max_document_bytes: int = 4 << 20
    chats: bool = False  # a document is a list of messages, {"role": ..., "content": ...}


def find_files(inputs: Sequence[str], file_format: str | None = None) -> list[CorpusFile]:
    """Find the files of a corpus: those named, those that a pattern such as part-*.jsonl matches, and those in folders.

    ``file_format`` None goes by suffix: a file with another suffix is JSON lines if it is named, and is skipped in a
    folder. Hidden files of folders are skipped. Raises FileNotFoundError for nothing, ValueError for what is no regular
    file.
    """
    found: list[tuple[Path, str]] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            below = [each.relative_to(path) for each in sorted(path.rglob("*")) if each.is_file()]
            shown = [path / each for each in below if not any(part.startswith(".") for part in each.parts)]
            known = [(each, kind) for each in shown if (kind := file_format or _format_by_suffix(each))]
            if not known:
                raise FileNotFoundError(f"--input {name} holds no file of {', '.join(SUFFIXES)}: give --input-format")
            found += known
        elif path.is_file():
            found.append((path, file_format or _format_by_suffix(path) or "jsonl"))
        elif path.exists():
            raise ValueError(f"--input {name} is not a regular file")
        elif path.is_symlink():
            raise FileNotFoundError(f"--input {name} is a link that leads nowhere")
        elif matching := sorted(glob.glob(name, recursive=True)):
            found += [(file.path, file.format) for file in find_files(matching, file_format)]
        else:
            raise FileNotFoundError(f"--input {name} does not exist")
    stats = [path.stat() for path, _ in found]
    return [CorpusFile(*file, stat.st_size, stat.st_mtime_ns) for file, stat in zip(found, stats, strict=True)]


def _format_by_suffix(path: Path) -> str | None:
    return SUFFIXES.get(Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix)


def read_blocks(files: list[CorpusFile], reading: Reading, start: Position = Position()) -> Iterator[Block]:
    """Read the blocks of the corpus from ``start`` on. Raises ValueError for a damaged file, or ImportError."""
    number = start.file
    while number < len(files):
        file = files[number]
        position = start if number == start.file else Position(number)
        if file.format == "text" and reading.text_documents == "file":
            block = _read_files(files, number, reading)
            yield block
            number = block.end.file
            continue
        try:
            read = _read_rows if file.format == "parquet" else _read_array if _is_array(file) else _read_lines
            yield from read(file, reading, position)
        except (OSError, EOFError, zlib.error) as error:
            remedy = f": zstd -dc --long=31 {file.path} > OUTPUT" if "too much memory" in str(error) else ""
            raise ValueError(f"{file.path} can't be read to its end: {error}{remedy}") from error
        number += 1


def records(block: Block) -> Iterator[tuple[str, Any]]:
    """Iterate over the records that are not blank lines: the place, and the line, row or file as it was read."""
    rows: list[Any] = block.records if isinstance(block.records, list) else block.records.split(b"\n")
    for number, record in enumerate(rows, block.start.line):
        if isinstance(record, tuple):
            yield record
        elif not isinstance(record, bytes) or (record and not record.isspace()):
            yield f"{block.path}:{number}", record


def extract_texts(record: Any, file_format: str, reading: Reading) -> dict[str, list[Any]]:
    """Return each key's document: the texts of its sequences, or its one chat. Raises ValueError for a bad record."""
    if file_format == "text":
        text = record.decode("utf-8")
        record = {reading.keys[0]: text.removesuffix("\r") if reading.text_documents == "line" else text}
    elif file_format == "jsonl":
        try:
            record = json.loads(record)
        except RecursionError:
            raise ValueError("JSON that is nested too deep") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but a {type(record).__name__}")
    documents: dict[str, list[Any]] = {}
    for key in reading.keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
        if reading.chats:
            documents[key] = [_check_chat(record[key], key, reading)]
            continue
        value = record[key]
        is_one = not isinstance(value, list) or _are_ids(value)
        texts = [_check_text(text, key) for text in ([value] if is_one else value)]
        if sum(map(len, texts)) > reading.max_document_bytes:  # a row; a line was measured when it was read
            raise ValueError(too_long(reading))
        documents[key] = texts
    return documents


def too_long(reading: Reading) -> str:
    return f"longer than --max-document-megabytes {reading.max_document_bytes / 2**20:g}"


def _are_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(i) is int for i in value)


def _check_text(value: Any, key: str) -> str | list[int]:
    """Return a text, or token ids as they are."""
    if isinstance(value, bytes):  # Parquet files may hold text as bytes
        return value.decode("utf-8")
    if isinstance(value, list) and _are_ids(value):
        return value
    if not isinstance(value, str):
        raise ValueError(f"the value of {key!r} is neither a text nor token ids, nor a list of these")
    value.encode()  # refuses half a surrogate pair, which JSON can spell and which is not text
    return value


def _check_chat(value: Any, key: str, reading: Reading) -> list[dict[str, Any]]:
    if not (isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value)):
        raise ValueError(f'the value of {key!r} is not a chat, [{{"role": "user", "content": "..."}}, ...]')
    num_bytes = len(json.dumps(value, ensure_ascii=False).encode())  # refuses half a surrogate pair
    if num_bytes > reading.max_document_bytes:
        raise ValueError(too_long(reading))
    return [message | _text_content(message) for message in value]


def _text_content(message: dict[str, Any]) -> dict[str, str]:
    """Return a message's content as one text: templates would print a list as Python does, and nothing for None."""
    content, role = message.get("content"), message["role"]
    if isinstance(content, list):  # parts, as OpenAI's format has them
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in content
        ]
        if not (texts and all(isinstance(text, str) for text in texts)):
            raise ValueError(f'a message of {role!r} has parts that are not {{"type": "text", "text": "..."}}')
        content = "".join(map(str, texts))
    if content is None and message.get("tool_calls"):
        return {}  # the template writes the calls
    if not isinstance(content, str):
        raise ValueError(f"a message of {role!r} has no text as its 'content'; it has {', '.join(map(repr, message))}")
    return {"content": content}


# Formats


def _open(raw: BinaryIO, path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if path.suffix == ".zst":
        pyarrow = load_package("pyarrow", f"reading {path}", "data")
        return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"), BLOCK_BYTES)
    return raw


def _open_at(raw: BinaryIO, path: Path, offset: int) -> BinaryIO:
    """Open a file at a byte of its uncompressed content."""
    stream = _open(raw, path)
    if stream is raw:
        raw.seek(offset)
        return raw
    while offset and (passed := len(stream.read(min(offset, BLOCK_BYTES)))):
        offset -= passed
    return stream


def _is_array(file: CorpusFile) -> bool:
    """Whether a file of JSON begins as an array, not as lines of objects."""
    if file.format != "jsonl":
        return False
    with open(file.path, "rb") as raw:
        return _open(raw, file.path).read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_array(file: CorpusFile, reading: Reading, start: Position) -> Iterator[Block]:
    """Read the elements of a JSON array; one and a piece of the file are in memory."""
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode  # extract_texts refuses such a text
    rows: list[Any] = []
    text, at, offset = "", 0, start.offset
    with open(file.path, "rb") as raw:
        stream = _open_at(raw, file.path, start.offset)
        disk = raw.tell()

        def block() -> Block:
            nonlocal start, disk, rows
            begin, start = start, Position(start.file, offset, start.line + len(rows))
            disk_before, disk, taken, rows = disk, raw.tell(), rows, []
            return Block(str(file.path), "array", taken, begin, start, offset - begin.offset, disk - disk_before)

        while True:
            separator = (SEPARATOR if offset else ARRAY_START).match(text, at)
            if separator and separator[1]:
                break
            try:
                if separator is None:
                    raise ValueError("no comma in front of it")
                row, end = json.JSONDecoder().raw_decode(text, separator.end())
                if end == len(text) and not isinstance(row, dict):  # a number may go on in the next piece
                    raise ValueError("the file ends within it")
            except (ValueError, RecursionError) as error:  # the element goes on in the next piece, or is not JSON
                text, at = text[at:], 0
                more = stream.read(BLOCK_BYTES) if len(text) <= reading.max_document_bytes else b""
                if not more:
                    where = f"{file.path}: element {start.line + len(rows)} of the JSON array"
                    raise ValueError(f"{where} is not JSON, or {too_long(reading)} ({error})") from error
                text += decode(more)
                continue
            offset += len(text[at:end].encode("utf-8", "surrogateescape"))
            rows.append(row)
            at = end
            if offset - start.offset >= BLOCK_BYTES:
                yield block()
        text = text[separator.end() :]
        while not text.strip() and (more := stream.read(BLOCK_BYTES)):
            text = decode(more)
        if text.strip():
            raise ValueError(f"{file.path} goes on after its JSON array: give one array, or an object on each line")
        if rows:
            yield block()


def _read_lines(file: CorpusFile, reading: Reading, start: Position) -> Iterator[Block]:
    with open(file.path, "rb") as raw:
        stream = _open_at(raw, file.path, start.offset)
        disk = raw.tell()

        def block(records: bytes, size: int, num_lines: int) -> Block:
            nonlocal start, disk
            begin, start = start, Position(start.file, start.offset + size, start.line + num_lines)
            disk_before, disk = disk, raw.tell()
            where = (str(file.path), file.format, records, begin, start)
            return Block(*where, size, disk - disk_before, too_long=not records)

        while content := stream.read(BLOCK_BYTES):
            rest = b"" if content.endswith(b"\n") else stream.readline(reading.max_document_bytes + 1)
            cut = content.rfind(b"\n") + 1  # where the last line begins, which rest completes
            size = len(content) - cut + len(rest)
            is_long = size > reading.max_document_bytes + 1
            if kept := content[:cut] if is_long else content + rest:
                # The beginning of a long line was read too; it counts for the long line.
                yield block(kept, len(kept), kept.count(b"\n"))
            if is_long:
                while rest and not rest.endswith(b"\n"):
                    rest = stream.readline(BLOCK_BYTES)
                    size += len(rest)
                yield block(b"", size, 1)


def _read_rows(file: CorpusFile, reading: Reading, start: Position) -> Iterator[Block]:
    pyarrow = load_package("pyarrow", f"reading {file.path}", "data")
    from pyarrow.parquet import ParquetFile

    # Bytes instead of texts, so that only a row that is not UTF-8 is a bad row.
    binary = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    try:
        # Page by page: with Arrow's defaults a whole row group is in memory.
        parquet = ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file.path} is not a Parquet file: {error}") from error
    keys = list(reading.keys)
    with parquet:
        names = parquet.schema_arrow.names
        if missing := [key for key in keys if key not in names]:
            raise ValueError(f"{file.path} has no column {missing[0]!r}; it has {', '.join(names)}")
        row = 0
        for group in range(parquet.num_row_groups):
            metadata = parquet.metadata.row_group(group)
            if row + metadata.num_rows <= start.offset:
                row += metadata.num_rows
                continue
            columns = [metadata.column(number) for number in range(metadata.num_columns)]
            size = sum(each.total_uncompressed_size for each in columns if each.path_in_schema.split(".")[0] in keys)
            num_rows = min(max(1, BLOCK_BYTES * metadata.num_rows // max(1, size)), MAX_ROWS)
            for batch in parquet.iter_batches(num_rows, [group], keys, use_threads=False):
                begin, row = Position(start.file, row, row + 1), row + len(batch)
                if begin.offset >= start.offset:
                    disk = file.num_bytes * len(batch) // parquet.metadata.num_rows
                    schema = pyarrow.schema([(each.name, binary.get(each.type, each.type)) for each in batch.schema])
                    rows, end = batch.cast(schema).to_pylist(), Position(start.file, row, row + 1)
                    yield Block(str(file.path), file.format, rows, begin, end, batch.nbytes, disk)


def _read_files(files: list[CorpusFile], first: int, reading: Reading) -> Block:
    """Read text files from number ``first`` on until they fill a block; a file that is too long is a separate block."""
    contents: list[tuple[str, bytes]] = []
    size = disk = 0
    number = first
    while number < len(files) and files[number].format == "text" and size < BLOCK_BYTES:
        file = files[number]
        with open(file.path, "rb") as raw:
            try:
                content = _open(raw, file.path).read(reading.max_document_bytes + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"{file.path} can't be read to its end: {error}") from error
        if len(content) > reading.max_document_bytes:
            if not contents:
                ends = Position(first), Position(first + 1)
                return Block(str(file.path), file.format, b"", *ends, file.num_bytes, file.num_bytes, too_long=True)
            break
        contents.append((str(file.path), content))
        size, disk, number = size + len(content), disk + file.num_bytes, number + 1
    return Block(str(files[first].path), "text", contents, Position(first), Position(number), size, disk)
