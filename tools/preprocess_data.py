"""Turns JSON lines into the token files that the trainer reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod --workers 8 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

writes ``data/corpus_text_document.bin`` and ``.idx``; the trainer takes ``--data-path data/corpus_text_document``.

Every line is one JSON object; the value of each key of ``--json-keys`` is one document: a text, or a list of texts
that become its sequences. Documents keep their order. An empty text leaves a document without tokens, as in Megatron.
Lines are read, tokenized and written in a stream, and the output takes its final name only when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter, best_dtype
from megatron_zpp.data.tokenizers import TOKENIZER_TYPES, Tokenizer, build_tokenizer

Column = tuple[NDArray, list[int], list[int]]  # tokens, sequence lengths, sequences per document

BATCH_BYTES = 256 << 10  # input handed to a worker at a time: small enough to balance, large enough to be worth it
BATCHES_AHEAD = 4  # batches per worker that may be waiting, so that memory stays bounded


@dataclass
class EncodedBatch:
    """What a worker returns: the documents of each key in their order, and the lines it could not use."""

    columns: dict[str, Column]
    bad_lines: list[str]
    num_documents: int
    num_bytes: int


class Encoder:
    """Tokenizes batches of lines; each worker process holds one."""

    def __init__(self, tokenizer: Tokenizer, json_keys: list[str], append_eod: bool) -> None:
        self.tokenizer, self.json_keys, self.append_eod = tokenizer, json_keys, append_eod
        self.dtype = best_dtype(tokenizer.vocab_size)

    def encode_batch(self, name: str, first_line: int, lines: list[bytes]) -> EncodedBatch:
        documents = []  # of each: key -> sequences
        bad_lines = []
        for number, line in enumerate(lines, start=first_line):
            if line.isspace():
                continue
            try:
                documents.append(self._encode(line))
            except ValueError as error:
                bad_lines.append(f"{name}:{number}: {error}")
        columns = {key: self._column([document[key] for document in documents]) for key in self.json_keys}
        return EncodedBatch(columns, bad_lines, len(documents), sum(map(len, lines)))

    def _encode(self, line: bytes) -> dict[str, list[list[int]]]:
        """The sequences of each key. ValueError says what is wrong with the line: JSON, UTF-8, keys, tokens."""
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"not a JSON object but a {type(record).__name__}")
        document = {}
        for key in self.json_keys:
            if key not in record:
                raise ValueError(f"no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
            texts = record[key] if isinstance(record[key], list) else [record[key]]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"the value of {key!r} is neither a text nor a list of texts")
            for text in texts:
                text.encode()  # refuses half a surrogate pair, which JSON can spell and which is no text
            sequences = [ids for ids in map(self.tokenizer.tokenize, texts) if ids]
            if sequences and self.append_eod:
                sequences[-1].append(self.tokenizer.eod)
            document[key] = sequences
        return document

    def _column(self, documents: list[list[list[int]]]) -> Column:
        sequences = list(chain.from_iterable(documents))
        tokens = np.fromiter(chain.from_iterable(sequences), self.dtype)
        return tokens, [len(sequence) for sequence in sequences], [len(document) for document in documents]


def preprocess(args: argparse.Namespace) -> str:
    """Runs the whole job and returns a sentence about it. Raises ValueError, FileNotFoundError on bad input."""
    if not Path(args.input).is_file():
        raise FileNotFoundError(f"--input {args.input} does not exist")
    vocab_size = make_encoder(args).tokenizer.vocab_size  # checks the tokenizer before any process starts
    documents = skipped = 0
    with contextlib.ExitStack() as stack:
        writers = {
            key: stack.enter_context(
                IndexedDatasetWriter(f"{args.output_prefix}_{key}_document", best_dtype(vocab_size))
            )
            for key in args.json_keys
        }
        report = stack.enter_context(progress(Path(args.input).stat().st_size, args.log_interval))
        for batch in encoded_batches(args):
            if batch.bad_lines and not args.skip_bad_lines:
                raise ValueError(f"{batch.bad_lines[0]} (--skip-bad-lines leaves such lines out)")
            skipped += len(batch.bad_lines)
            documents += batch.num_documents
            for key, column in batch.columns.items():
                writers[key].add_documents(*column)
            report(documents, batch.num_bytes)
        for key, writer in writers.items():
            if writer.num_tokens == 0:
                raise ValueError(f"{args.input} holds no text under {key!r}: nothing to write")
    tokens = ", ".join(f"{writer.num_tokens:,} tokens in {writer.prefix}.bin" for writer in writers.values())
    return f"{documents:,} documents, {tokens}; {skipped:,} bad lines skipped"


def encoded_batches(args: argparse.Namespace) -> Iterator[EncodedBatch]:
    """All batches of the input in their order, tokenized by ``args.workers`` processes."""
    batches = read_batches(Path(args.input))
    if args.workers == 1:
        encoder = make_encoder(args)
        for first_line, lines in batches:
            yield encoder.encode_batch(args.input, first_line, lines)
        return
    # "spawn", because the progress display runs a thread, and a process with threads must not fork.
    with ProcessPoolExecutor(args.workers, get_context("spawn"), _start_worker, (args,)) as pool:
        waiting: deque[Future[EncodedBatch]] = deque()
        try:
            for first_line, lines in batches:
                waiting.append(pool.submit(_encode_batch, args.input, first_line, lines))
                if len(waiting) >= BATCHES_AHEAD * args.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise RuntimeError("a worker process died, perhaps for want of memory: try fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def read_batches(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Batches of lines with the number of the first, counted from 1."""
    lines: list[bytes] = []
    size, first_line = 0, 1
    with open(path, "rb") as file:
        for line in file:
            lines.append(line)
            size += len(line)
            if size >= BATCH_BYTES:
                yield first_line, lines
                first_line += len(lines)
                lines, size = [], 0
    if lines:
        yield first_line, lines


def make_encoder(args: argparse.Namespace) -> Encoder:
    tokenizer = build_tokenizer(
        args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size
    )
    return Encoder(tokenizer, args.json_keys, args.append_eod)


_encoder: Encoder  # of a worker process: a tokenizer is too dear to be sent with each batch


def _start_worker(args: argparse.Namespace) -> None:
    global _encoder
    _encoder = make_encoder(args)


def _encode_batch(name: str, first_line: int, lines: list[bytes]) -> EncodedBatch:
    return _encoder.encode_batch(name, first_line, lines)


@contextlib.contextmanager
def progress(total_bytes: int, log_interval: int) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (documents so far, bytes read since the last call).

    Draws a bar if stderr is a terminal, and else prints a line at about every ``log_interval`` documents.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        printed = bytes_read = 0

        def print_line(documents: int, num_bytes: int) -> None:
            nonlocal printed, bytes_read
            bytes_read += num_bytes
            if documents - printed >= log_interval:
                print(
                    f"{documents:,} documents, {bytes_read / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB", file=sys.stderr
                )
                printed = documents

        yield print_line
        return
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[documents]:,} documents"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total_bytes, documents=0)
        yield lambda documents, num_bytes: bar.update(task, advance=num_bytes, documents=documents)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokenize JSON lines into PREFIX_KEY_document.bin and .idx.", allow_abbrev=False
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="file of JSON objects, one a line")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize; default text"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the output, without suffix")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="tokenizing processes; default 1")
    parser.add_argument("--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines")
    parser.add_argument("--skip-bad-lines", action="store_true", help="leave out lines that are no documents")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    group.add_argument("--tokenizer-model", metavar="PATH", help="SentencePiece model, or tokenizer.json or its folder")
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, metavar="N", help="number of ids of NullTokenizer")
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error("--workers must be at least 1")
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error("--json-keys names a key twice")
    return args


def main() -> int:
    try:
        print(preprocess(parse_arguments()))
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
