"""Reads a corpus of any size block by block: JSON lines (plain, .gz, .zst), Parquet, text files, and folders of them.

A block is a piece that begins and ends between records (a line, a row, a file). Where blocks begin depends on nothing
but the files, so reading can go on at the end of any block.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megatron_zpp.data.text.sentences import split_sentences

FORMATS = ("jsonl", "parquet", "text")
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst")
BLOCK_BYTES = 256 << 10  # small enough to balance between workers, large enough to be worth sending
MAX_ROWS = 4096  # of a Parquet file in a block


@dataclass(frozen=True)
class CorpusFile:
    path: Path
    format: str  # one of FORMATS
    num_bytes: int  # on disk
    mtime_ns: int


@dataclass(frozen=True)
class Position:
    file: int = 0  # number of the file in the corpus
    offset: int = 0  # bytes of its uncompressed content before it; rows of a Parquet file
    line: int = 1  # number of its line or row, from 1


@dataclass(frozen=True)
class Block:
    """``records``: bytes of many lines, or a list of rows (key -> value), or a list of files (path, content)."""

    path: str
    format: str
    records: bytes | list[dict[str, Any]] | list[tuple[str, bytes]]
    start: Position
    end: Position
    num_bytes: int  # of the records, uncompressed
    disk_bytes: int = field(compare=False)  # read from disk for them, about: files are read ahead
    too_long: bool = False  # one record that was passed over, since it is longer than allowed


@dataclass(frozen=True)
class Reading:
    """How files become documents."""

    keys: tuple[str, ...] = ("text",)
    text_documents: str = "file"  # of a text file: "file" or "line"
    max_document_bytes: int = 4 << 20
    sentences: str | None = None  # each is a sequence: "alone", or with the "blanks" after it; None: no splitting


def find_files(inputs: Sequence[str], file_format: str | None = None) -> list[CorpusFile]:
    """The files of a corpus: those named, those that a pattern such as part-*.jsonl matches, and those below the
    folders named, sorted by path.

    ``file_format`` None: by suffix; another file is JSON lines where it is named, and no part of the corpus in a
    folder. With a ``file_format`` all files of a folder belong to it, but hidden ones. Raises FileNotFoundError if
    there is nothing, ValueError for what is no regular file.
    """
    files = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = [below for below in sorted(path.rglob("*")) if below.is_file() and not _hidden(below, path)]
            known = [(below, file_format or _format_of(below)) for below in found]
            new = [_corpus_file(below, kind) for below, kind in known if kind]
            if not new:
                raise FileNotFoundError(
                    f"--input {name} holds no file of {', '.join(SUFFIXES)}; --input-format takes all of its files"
                )
            files += new
        elif path.is_file():
            files.append(_corpus_file(path, file_format or _format_of(path) or "jsonl"))
        elif path.exists():
            raise ValueError(f"--input {name} is no regular file")  # a FIFO, a device
        elif matching := sorted(glob.glob(name, recursive=True)):
            files += find_files(matching, file_format)
        else:
            raise FileNotFoundError(f"--input {name} does not exist")
    return files


def read_blocks(files: list[CorpusFile], reading: Reading, start: Position = Position()) -> Iterator[Block]:
    """The blocks of the corpus from ``start`` on, the beginning of one of them.

    Raises ValueError for a damaged or foreign file, ImportError where a package is missing.
    """
    number = start.file
    while number < len(files):
        file = files[number]
        position = start if number == start.file else Position(number)
        if file.format == "text" and reading.text_documents == "file":
            block = _block_of_files(files, number, reading)
            yield block
            number = block.end.file
            continue
        try:
            if file.format == "parquet":
                yield from _row_blocks(file, reading, position)
            else:
                yield from _line_blocks(file, reading, position)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{file.path} can't be read to its end: {error}") from error
        number += 1


def records(block: Block) -> Iterator[tuple[str, Any]]:
    """Of each record that is no blank line: where it is, and the line, row or file as it was read."""
    number = block.start.line
    if isinstance(block.records, bytes):
        lines = block.records.split(b"\n")
        for line in lines if lines[-1] else lines[:-1]:
            if line and not line.isspace():
                yield f"{block.path}:{number}", line
            number += 1
        return
    for record in block.records:
        if isinstance(record, tuple):
            yield record
        else:
            yield f"{block.path}:{number}", record
            number += 1


def texts_of(record: Any, file_format: str, reading: Reading) -> dict[str, list[str]]:
    """The document of each key, as the texts of its sequences. ValueError says what is wrong with the record."""
    if file_format == "text":
        text = record.decode("utf-8")
        text = text.removesuffix("\r") if reading.text_documents == "line" else text
        return {reading.keys[0]: _sequences([text], reading)}
    if file_format == "jsonl":
        try:
            record = json.loads(record)
        except RecursionError:
            raise ValueError("JSON that is nested too deep") from None
        if not isinstance(record, dict):
            raise ValueError(f"not a JSON object but a {type(record).__name__}")
    documents = {}
    for key in reading.keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
        texts = [_text(text, key) for text in (record[key] if isinstance(record[key], list) else [record[key]])]
        if sum(map(len, texts)) > reading.max_document_bytes:  # a row; a line was measured when it was read
            raise ValueError(too_long(reading))
        documents[key] = _sequences(texts, reading)
    return documents


def _sequences(texts: list[str], reading: Reading) -> list[str]:
    if reading.sentences is None:
        return texts
    return [sentence for text in texts for sentence in split_sentences(text, reading.sentences == "blanks")]


def too_long(reading: Reading) -> str:
    return f"longer than --max-document-megabytes {reading.max_document_bytes / 2**20:g}"


def _text(value: Any, key: str) -> str:
    if isinstance(value, bytes):  # Parquet's
        return value.decode("utf-8")
    if not isinstance(value, str):
        raise ValueError(f"the value of {key!r} is neither a text nor a list of texts")
    value.encode()  # refuses half a surrogate pair, which JSON can spell and which is no text
    return value


# Formats


def _corpus_file(path: Path, file_format: str) -> CorpusFile:
    status = path.stat()
    return CorpusFile(path, file_format, status.st_size, status.st_mtime_ns)


def _format_of(path: Path) -> str | None:
    return SUFFIXES.get(Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix)


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _open(raw: BinaryIO, path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if path.suffix == ".zst":
        try:
            import pyarrow
        except ImportError as error:
            raise ImportError(
                f"reading {path} needs the package pyarrow: pip install pyarrow, or megatron_zpp's extra data"
            ) from error
        return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"), BLOCK_BYTES)
    return raw


def _line_blocks(file: CorpusFile, reading: Reading, start: Position) -> Iterator[Block]:
    with open(file.path, "rb") as raw:
        stream = _open(raw, file.path)
        if stream is raw:
            raw.seek(start.offset)
        else:
            left = start.offset
            while left and (passed := len(stream.read(min(left, BLOCK_BYTES)))):
                left -= passed
        disk = raw.tell()
        while content := stream.read(BLOCK_BYTES):
            rest = b"" if content.endswith(b"\n") else stream.readline(reading.max_document_bytes + 1)
            cut = content.rfind(b"\n") + 1  # where the last line begins, which rest completes
            is_long = len(content) - cut + len(rest) > reading.max_document_bytes + 1
            kept = content[:cut] if is_long else content + rest
            if kept:
                # What follows a long line's beginning was read too; it counts for the long line.
                end = Position(start.file, start.offset + len(kept), start.line + kept.count(b"\n"))
                yield Block(str(file.path), file.format, kept, start, end, len(kept), raw.tell() - disk)
                start, disk = end, raw.tell()
            if is_long:
                size = len(content) - cut + len(rest)
                while rest and not rest.endswith(b"\n"):
                    rest = stream.readline(BLOCK_BYTES)
                    size += len(rest)
                end = Position(start.file, start.offset + size, start.line + 1)
                yield Block(str(file.path), file.format, b"", start, end, size, raw.tell() - disk, too_long=True)
                start, disk = end, raw.tell()


def _row_blocks(file: CorpusFile, reading: Reading, start: Position) -> Iterator[Block]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(
            f"reading {file.path} needs the package pyarrow: pip install pyarrow, or megatron_zpp's extra data"
        ) from error
    try:
        # Page by page: with Arrow's defaults a whole row group lies in memory.
        parquet = ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file.path} is not a Parquet file: {error}") from error
    keys = list(reading.keys)
    with parquet:
        missing = [key for key in keys if key not in parquet.schema_arrow.names]
        if missing:
            raise ValueError(
                f"{file.path} has no column {missing[0]!r}; it has {', '.join(parquet.schema_arrow.names)}"
            )
        first = 0  # row of the file that the row group begins with
        for group in range(parquet.num_row_groups):
            num_rows = parquet.metadata.row_group(group).num_rows
            if first + num_rows > start.offset:
                row = first
                for batch in parquet.iter_batches(
                    _rows_per_block(parquet, group, keys), [group], keys, use_threads=False
                ):
                    end = Position(start.file, row + len(batch), row + len(batch) + 1)
                    if row >= start.offset:
                        disk = file.num_bytes * len(batch) // parquet.metadata.num_rows
                        begin = Position(start.file, row, row + 1)
                        rows = _undecoded(batch).to_pylist()
                        yield Block(str(file.path), file.format, rows, begin, end, batch.nbytes, disk)
                    row = end.offset
            first += num_rows


def _rows_per_block(parquet: Any, group: int, keys: list[str]) -> int:
    metadata = parquet.metadata.row_group(group)
    columns = map(metadata.column, range(metadata.num_columns))
    size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] in keys)
    return min(max(1, BLOCK_BYTES * metadata.num_rows // max(1, size)), MAX_ROWS)


def _undecoded(batch: Any) -> Any:
    """The rows with bytes in place of texts: only the one that is no UTF-8 shall be a bad row, where it is decoded."""
    import pyarrow

    for number, column in enumerate(batch.schema):
        if pyarrow.types.is_string(column.type):
            batch = batch.set_column(number, column.name, batch.column(number).cast(pyarrow.binary()))
        elif pyarrow.types.is_large_string(column.type):
            batch = batch.set_column(number, column.name, batch.column(number).cast(pyarrow.large_binary()))
    return batch


def _block_of_files(files: list[CorpusFile], first: int, reading: Reading) -> Block:
    """Text files from number ``first`` on, until they fill a block; a file that is too long is a block of its own."""
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
