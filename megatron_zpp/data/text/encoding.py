"""Tokenizes the blocks of a corpus in several processes, in bounded memory."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.data.indexed_dataset import best_dtype
from megatron_zpp.data.text.corpus import BLOCK_BYTES, Block, Reading, records, texts_of, too_long
from megatron_zpp.data.text.tokenizers import Ids, TokenizerFlags, build_tokenizer

BLOCKS_AHEAD = 4  # blocks per worker that may be under way
LARGE_BLOCK = 4 * BLOCK_BYTES


@dataclass(frozen=True)
class Column:
    """The documents of one key."""

    tokens: NDArray
    sequence_lengths: NDArray[np.int64]  # [sequences]
    sequences_per_document: list[int]


@dataclass(frozen=True)
class EncodedBlock:
    columns: dict[str, Column]
    bad_records: list[str]  # where each is, and what is wrong with it
    num_documents: int
    num_eods: int  # end-of-document ids that texts themselves hold


class Encoder:
    """Tokenizes blocks; each worker has one."""

    def __init__(self, tokenizer: TokenizerFlags, reading: Reading, append_eod: bool) -> None:
        self.tokenizer, self.reading, self.append_eod = build_tokenizer(**tokenizer), reading, append_eod
        self.dtype = best_dtype(self.tokenizer.vocab_size)

    def encode(self, block: Block) -> EncodedBlock:
        documents: list[dict[str, list[str]]] = []
        places: list[str] = []
        bad: list[str] = []
        if block.too_long:
            bad.append(f"{block.path}:{block.start.line}: {too_long(self.reading)}")
        for place, record in records(block):
            try:
                documents.append(texts_of(record, block.format, self.reading))
                places.append(place)
            except ValueError as error:
                bad.append(f"{place}: {error}")
        try:
            encoded = self._tokenize(documents)
        except ValueError:  # a text that its tokenizer refuses: find out whose
            encoded = []
            for place, document in zip(places, documents, strict=True):
                try:
                    encoded += self._tokenize([document])
                except ValueError as error:
                    bad.append(f"{place}: {error}")
        columns = {}
        num_eods = 0
        for key in self.reading.keys:
            columns[key] = self._column([document[key] for document in encoded])
            num_eods += int(np.count_nonzero(columns[key].tokens == self.tokenizer.eod))
        if self.append_eod:
            num_eods -= sum(bool(sequences) for document in encoded for sequences in document.values())
        return EncodedBlock(columns, bad, len(encoded), num_eods)

    def _tokenize(self, documents: list[dict[str, list[str]]]) -> list[dict[str, list[Ids]]]:
        """Ids of each document's sequences, all texts in one batch."""
        texts = [text for document in documents for texts in document.values() for text in texts]
        ids = iter(self.tokenizer.tokenize_batch(texts))
        return [
            {key: [sequence for _ in texts if len(sequence := next(ids))] for key, texts in document.items()}
            for document in documents
        ]

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


def encode_blocks(
    blocks: Iterable[Block], tokenizer: TokenizerFlags, reading: Reading, append_eod: bool, workers: int, ordered: bool
) -> Generator[tuple[Block, EncodedBlock]]:
    """Every block and what became of it; not ``ordered``: those first that are ready first.

    No more is read than keeps the workers busy. Documents of some megabytes go through almost alone, since tokenizers
    need up to two hundred times a document's size. Raises RuntimeError if a worker died.
    """
    with _pool(workers, (tokenizer, reading, append_eod)) as pool:
        under_way: dict[Future[EncodedBlock], Block] = {}  # in the order of the corpus
        size = 0

        def take() -> tuple[Block, EncodedBlock]:
            nonlocal size
            future = next(iter(under_way)) if ordered else _first_done(under_way, pool)
            while not wait([future], timeout=1).done:
                _check_alive(pool)
            block = under_way.pop(future)
            size -= block.num_bytes
            return block, future.result()

        try:
            for block in blocks:
                while under_way and (
                    len(under_way) >= BLOCKS_AHEAD * workers
                    or size + block.num_bytes > (BLOCKS_AHEAD + 1) * BLOCK_BYTES * workers
                ):
                    yield take()
                under_way[pool.submit(_encode, block)] = block
                size += block.num_bytes
            while under_way:
                yield take()
        except BrokenProcessPool:
            raise RuntimeError("a worker process died, perhaps for want of memory: try fewer --workers") from None


def _first_done(under_way: Iterable[Future[EncodedBlock]], pool: Executor) -> Future[EncodedBlock]:
    while not (done := wait(under_way, 1, FIRST_COMPLETED).done):
        _check_alive(pool)
    return next(iter(done))


def _check_alive(pool: Executor) -> None:
    """Raise BrokenProcessPool if a worker died, be it amid an answer, whose rest the pool would await forever."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    if isinstance(pool, ProcessPoolExecutor) and any(process.exitcode is not None for process in processes):
        for process in processes:
            process.kill()
        pool._result_queue._writer.close()  # type: ignore[attr-defined]
        raise BrokenProcessPool


@contextlib.contextmanager
def _pool(workers: int, encoder: tuple[TokenizerFlags, Reading, bool]) -> Iterator[Executor]:
    """One worker is a thread, which tokenizes while this one reads and writes; more are processes."""
    pool: Executor
    if workers == 1:
        pool = ThreadPoolExecutor(1, initializer=_start_thread, initargs=encoder)
    else:
        # "spawn": the progress display runs a thread, and a process with threads must not fork.
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_process, encoder)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder  # of a worker: a tokenizer is too dear to be sent with each block


def _start_thread(tokenizer: TokenizerFlags, reading: Reading, append_eod: bool) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one thread
    _encoder = Encoder(tokenizer, reading, append_eod)


def _start_process(tokenizer: TokenizerFlags, reading: Reading, append_eod: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _start_thread(tokenizer, reading, append_eod)


def _end_with_parent() -> None:
    """A killed parent can't end its workers, and they would wait for their next block forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    encoded = _encoder.encode(block)
    if block.num_bytes > LARGE_BLOCK and sys.platform == "linux":
        # A tokenizer's many small pieces of a large document would stay with this process.
        with contextlib.suppress(AttributeError):  # a C library without malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
    return encoded
