"""Tokenizes the blocks of a corpus in several processes, in bounded memory."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.data.indexed_dataset import best_dtype
from megatron_zpp.data.text.corpus import BLOCK_BYTES, Block, Reading, extract_texts, records, too_long
from megatron_zpp.data.text.tokenizers import HuggingFaceTokenizer, Ids, build_tokenizer

BLOCKS_AHEAD = 4  # blocks in flight per worker
LARGE_BLOCK = 4 * BLOCK_BYTES


class Column(NamedTuple):
    """The documents of one key, as ``IndexedDatasetWriter.add_documents`` takes them."""

    tokens: NDArray
    sequence_lengths: NDArray[np.int64]  # [sequences]
    sequences_per_document: list[int]
    modes: NDArray[np.uint8] | None = None  # [sequences], one per part of a chat: 1 where the assistant speaks


@dataclass(frozen=True)
class EncodedBlock:
    columns: dict[str, Column]
    bad_records: list[str]  # the place of each, and what is wrong with it
    num_documents: int
    num_eods: int  # end-of-document ids inside the texts


class Encoder:
    """Tokenizes blocks; each worker has one."""

    def __init__(self, tokenizer: dict[str, Any], reading: Reading, append_eod: bool) -> None:
        self.tokenizer, self.reading, self.append_eod = build_tokenizer(**tokenizer), reading, append_eod
        self.dtype = best_dtype(self.tokenizer.vocab_size)

    def encode(self, block: Block) -> EncodedBlock:
        documents: list[dict[str, list[Any]]] = []
        places: list[str] = []
        bad = [f"{block.path}:{block.start.line}: {too_long(self.reading)}"] if block.too_long else []
        for place, record in records(block):
            try:
                documents.append(extract_texts(record, block.format, self.reading))
                places.append(place)
            except ValueError as error:
                bad.append(f"{place}: {error}")
        try:
            encoded = self._tokenize(documents)
        except ValueError:  # the tokenizer refuses a text: find out which
            encoded = []
            for place, document in zip(places, documents, strict=True):
                try:
                    encoded += self._tokenize([document])
                except ValueError as error:
                    bad.append(f"{place}: {error}")
        column = self._column_of_chats if self.reading.chats else self._column
        columns = {key: column([document[key] for document in encoded]) for key in self.reading.keys}
        num_eods = sum(int(np.count_nonzero(column.tokens == self.tokenizer.eod)) for column in columns.values())
        if self.reading.chats:
            num_eods = 0  # its template writes them
        if self.append_eod:
            num_eods -= sum(bool(sequences) for document in encoded for sequences in document.values())
        return EncodedBlock(columns, bad, len(encoded), num_eods)

    def _tokenize(self, documents: list[dict[str, list[Any]]]) -> list[dict[str, list[Ids]]]:
        """Return the ids of each document's sequences, or ids and mask of its chat; all are tokenized in one batch."""
        texts = [text for document in documents for texts in document.values() for text in texts]
        if self.reading.chats:
            assert isinstance(self.tokenizer, HuggingFaceTokenizer)
            ids: Iterator[Ids] = iter(self.tokenizer.tokenize_chats(texts))
        else:
            tokenized = iter(self.tokenizer.tokenize_batch([text for text in texts if isinstance(text, str)]))
            ids = (next(tokenized) if isinstance(text, str) else self._check_ids(text) for text in texts)
        return [
            {key: [sequence for _ in texts if len(sequence := next(ids))] for key, texts in document.items()}
            for document in documents
        ]

    def _check_ids(self, ids: list[int]) -> list[int]:
        """Return ids that a document brings along. Raises ValueError if the tokenizer does not have one."""
        if min(ids) < 0 or max(ids) >= self.tokenizer.vocab_size:
            raise ValueError(
                f"ids {min(ids)} to {max(ids)} are not all below the tokenizer's {self.tokenizer.vocab_size}"
            )
        return ids

    def _column(self, documents: list[list[Ids]]) -> Column:
        eod = np.array([self.tokenizer.eod], self.dtype)
        pieces: list[NDArray] = [np.empty(0, self.dtype)]
        lengths = []
        for document in documents:
            for ids in document:
                pieces.append(np.asarray(ids, self.dtype))
                lengths.append(len(ids))
            if document and self.append_eod:  # an empty text has no sequence and so no end, as in Megatron
                pieces.append(eod)
                lengths[-1] += 1
        return Column(np.concatenate(pieces), np.array(lengths, np.int64), [len(document) for document in documents])

    def _column_of_chats(self, documents: list[list[Ids]]) -> Column:
        """Cut chats, ids and mask [2, tokens], where the assistant begins and ends."""
        chats = [np.asarray(chat) for document in documents for chat in document]
        begins = [np.flatnonzero(np.diff(mask, prepend=-1)) for _, mask in chats]  # where each chat's parts begin
        lengths = [np.diff(begin, append=len(mask)) for begin, (_, mask) in zip(begins, chats, strict=True)]
        modes = [mask[begin] for begin, (_, mask) in zip(begins, chats, strict=True)]
        nothing = [np.empty(0, np.int64)]
        return Column(
            np.concatenate(nothing + [ids for ids, _ in chats]).astype(self.dtype),
            np.concatenate(nothing + lengths),
            [len(begin) for begin in begins],
            np.concatenate(nothing + modes).astype(np.uint8),
        )


def encode_blocks(
    blocks: Iterable[Block], tokenizer: dict[str, Any], reading: Reading, append_eod: bool, workers: int
) -> Generator[tuple[Block, EncodedBlock]]:
    """Yield every block with its tokens, in order.

    No more is read than keeps the workers busy. Documents of some megabytes are tokenized almost alone, since
    tokenizers need up to two hundred times a document's size. Raises ChildProcessError if a worker died.
    """
    start: Any = {"initializer": _start, "initargs": (workers > 1, tokenizer, reading, append_eod)}
    pool: Any  # only private attributes notice dead workers
    if workers == 1:  # a thread, which tokenizes while this one reads and writes
        pool = ThreadPoolExecutor(1, **start)
    else:
        # "spawn": the progress display runs a thread, and a process with threads must not fork.
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), **start)
    in_flight: deque[tuple[Block, Future[EncodedBlock]]] = deque()  # in the order of the corpus
    size = 0

    def take() -> tuple[Block, EncodedBlock]:
        nonlocal size
        block, future = in_flight.popleft()
        while not wait([future], 1).done:
            _check_alive(pool)
        size -= block.num_bytes
        return block, future.result()

    try:
        for block in blocks:
            while in_flight and (
                len(in_flight) >= BLOCKS_AHEAD * workers
                or size + block.num_bytes > (BLOCKS_AHEAD + 1) * BLOCK_BYTES * workers
            ):
                yield take()
            in_flight.append((block, pool.submit(_encode, block)))
            size += block.num_bytes
        while in_flight:
            yield take()
    except BrokenProcessPool:
        pool._call_queue._reader.close()  # Python 3.11.2 would wait for ever to write there
        raise ChildProcessError("a worker process died, perhaps for lack of memory: try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _check_alive(pool: Any) -> None:
    """Raise BrokenProcessPool if a worker died: in the middle of an answer, the pool would await the rest forever."""
    processes = [*(getattr(pool, "_processes", None) or {}).values()]
    if any(process.exitcode is not None for process in processes):
        for process in processes:
            process.kill()
        pool._result_queue._writer.close()
        raise BrokenProcessPool


_encoder: Encoder  # one per worker: a tokenizer is too large to be sent with each block


def _start(is_process: bool, *encoder: Any) -> None:
    global _encoder
    if is_process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
        threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one thread
    _encoder = Encoder(*encoder)


def _end_with_parent() -> None:
    """End this worker when its parent was killed: it would wait for its next block forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    encoded = _encoder.encode(block)
    if block.num_bytes > LARGE_BLOCK and sys.platform == "linux":
        # The many small allocations for a large document would stay with this process.
        with contextlib.suppress(AttributeError):  # a C library without malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
    return encoded
