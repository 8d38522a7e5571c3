"""Streams the text of a dataset of Hugging Face's package datasets, and tokenizes it on the fly (--hf-dataset).

A rank reads its share of the documents in the dataset's order, and workers tokenize them. A checksum of its text says
whether a document belongs to the train, validation or test split. At its end the stream begins again.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.data.gpt_dataset import TooLittleDataError
from megatron_zpp.data.source import DataRequest, Datasets, DataSource
from megatron_zpp.data.text.packages import load_package
from megatron_zpp.data.text.sources import SPLIT_NAMES, Edges, split_edges
from megatron_zpp.data.text.tokenizers import Tokenizer
from megatron_zpp.errors import describe_error

DOCUMENTS = 32  # tokenized by one call of a worker
TAIL_BYTES = 4096  # which tell files apart: Parquet ends with what it holds
KEYS = ("name", "data_dir", "data_files", "revision", "split", "column")  # all but the last are load_dataset's

Position = dict[str, Any]  # as JSON: "samples" read by this rank, "state" of the dataset or None, and tokens to "skip"


class TextStream:
    """Samples of ``options.seq_length + 1`` tokens, int64, from the documents of a dataset, without end.

    dataset: a datasets.IterableDataset. ``position``: where this rank stands behind the last sample.
    """

    def __init__(
        self, request: DataRequest, dataset: Any, name: str, column: str, digest: str, split: str, share: Edges
    ) -> None:
        self.options, self.tokenizer, self.note = request.options, request.tokenizer, request.note
        self.dataset, self.name, self.column, self.digest = dataset, name, column, digest
        self.split, self.share = split, share
        self.begin_at({"samples": 0, "state": None, "skip": 0})

    def begin_at(self, start: Position) -> None:
        """Begin to read where ``position`` stood on the same rank of as many."""
        self.start = self.position = start

    @property
    def order(self) -> dict[str, Any]:
        """Everything that the documents and their order depend on, wherever the files are."""
        share, length = list(self.share), self.options.seq_length
        return {"files": self.digest, "column": self.column, "share": share, "seq_length": length}

    def micro_batches(
        self, call: Callable[..., Any], consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield this rank's samples, int64 [B, L + 1], once all ranks have read ``consumed_samples``; without end.

        call: yields a function's results in the order of its arguments.
        """
        samples = self._samples(call(partial(_tokenize, self.tokenizer), self._blocks(rank, num_ranks)))
        for _ in range(consumed_samples // num_ranks - self.start["samples"]):
            next(samples)  # an evaluation that was cut short did not read it
        while True:
            yield np.stack([*islice(samples, micro_batch_size)])

    def _samples(self, blocks: Iterator[tuple[Any, NDArray[np.int64]]]) -> Iterator[NDArray[np.int64]]:
        """Cut blocks of tokens into samples [L + 1], each of which begins with the last token of the one before."""
        length, num_samples, at = self.options.seq_length, self.start["samples"], self.start["skip"]
        tokens = np.empty(0, np.int64)  # not read, from ``at`` on
        for state, ids in blocks:
            begin, tokens = len(tokens), np.concatenate([tokens, ids])
            while at + length < len(tokens):
                sample, at, num_samples = tokens[at : at + length + 1], at + length, num_samples + 1
                # A sample ends in this block, or it would have been read before.
                self.position = {"samples": num_samples, "state": state, "skip": at - begin}
                yield sample
            tokens, at = tokens[at:], 0

    def _blocks(self, rank: int, num_ranks: int) -> Iterator[tuple[Any, list[str]]]:
        """Yield documents of a rank from ``start`` on, epoch after epoch, behind the dataset's state before them."""
        from datasets.distributed import split_dataset_by_node

        dataset, state = split_dataset_by_node(self.dataset, rank, num_ranks), self.start["state"]
        is_whole = state is None  # whether the epoch is read from its start
        if state is not None:
            dataset.set_epoch(state["epoch"])
            dataset.load_state_dict(state)
        while True:
            texts, is_empty = self.texts(dataset), is_whole
            while documents := [*islice(texts, DOCUMENTS)]:
                yield state, documents
                state, is_empty = dataset.state_dict(), False
            if is_empty:
                raise ValueError(f"{self.name} has no document for rank {rank} of {num_ranks}: give more text")
            dataset.set_epoch(epochs := dataset.epoch + 1)
            if epochs.bit_count() == 1:  # 1, 2, 4, ...
                self.note(f"rank {rank} begins epoch {epochs + 1} of the {self.split} documents in {self.name}")
            is_whole = True

    def texts(self, dataset: Any) -> Iterator[str]:
        """Yield the documents of an epoch in this split but for empty ones. Raises ValueError."""
        rows, (begin, end) = iter(dataset), self.share
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # from whatever library reads this kind of file
                raise ValueError(f"{self.name} cannot be read: {describe_error(error)}") from error
            if row is None:
                return
            text = row.get(self.column)
            if self.column not in row or not isinstance(text, str | None):
                raise ValueError(
                    f"{self.name} has no text in a column {self.column}: give column=NAME with one of {', '.join(row)}"
                )
            if text and begin <= zlib.crc32(text.encode()) / 2**32 < end:
                yield text


def _tokenize(tokenizer: Tokenizer, block: tuple[Any, list[str]]) -> tuple[Any, NDArray[np.int64]]:
    state, texts = block
    documents = [np.append(ids, tokenizer.eod) for ids in tokenizer.tokenize_batch(texts) if len(ids)]
    return state, np.concatenate([np.empty(0, np.int64), *documents], dtype=np.int64, casting="unsafe")


def _read_words(flags: Any) -> tuple[str, dict[str, str]]:
    name, *words = flags.hf_dataset
    for word in words:
        if "=" not in word or word.partition("=")[0] not in KEYS:
            raise ValueError(f"--hf-dataset {name} {word}: give a name, and KEY=VALUE of {', '.join(KEYS)}")
    return name, dict(word.split("=", 1) for word in words)


def _open(request: DataRequest) -> Datasets:
    name, options = _read_words(request.flags)
    split, column = options.pop("split", "train"), options.pop("column", "text")
    library = load_package("datasets", "--hf-dataset", "stream")
    try:
        library.disable_progress_bars()
        builder = library.load_dataset_builder(name, **options)
        files = {str(key): found for key, found in (builder.config.data_files or {}).items()}
        if split not in files:
            raise ValueError(f"it has no split {split}: give split=NAME with one of {', '.join(files)}")
        dataset = builder.as_streaming_dataset(split=split)
    except Exception as error:  # from the network, or whatever library reads this kind of file
        raise ValueError(f"--hf-dataset {name} cannot be opened: {describe_error(error)}") from error
    shares, digest, streams = request.flags.split, _digest(files[split]), list[TextStream | None]()
    for part, share, size in zip(SPLIT_NAMES, split_edges(shares or "97, 3, 0"), request.num_samples, strict=True):
        if part == "train" and size and not share:
            raise ValueError("no training data: give the train split a share in --split")
        stream = TextStream(request, dataset, name, column, digest, part, share) if size and share else None
        if stream is not None and next(stream.texts(dataset), None) is None:
            none = f"no document of {name} is in the {part} split"
            if part == "train" or shares is not None:
                raise TooLittleDataError(f"{none}: give it a larger share with --split, more data, or --eval-iters 0")
            request.note(f"nothing is evaluated on {part} data: by the default of --split, {none}")
            stream = None
        streams.append(stream)
    return Datasets(*streams)


def _digest(files: list[str]) -> str:
    """Tell local files by name, size and end, and others by their addresses, which hold the revision at the Hub."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(os.path.basename(path).encode() if os.path.isfile(path) else path.encode())
        if os.path.isfile(path):
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(b"%d" % size + os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)))
    return digest.hexdigest()


_EXCLUDES = ("sft", "dataloader_type", "data_cache_path", "no_mmap_bin_files")
STREAM = DataSource(("hf_dataset",), _open, _EXCLUDES, check=_read_words)
