"""Reads and writes Megatron's ``.bin/.idx`` token files: a memory-mapped reader, a writer of bounded memory.

``PREFIX.bin`` holds the token ids of all sequences back to back. ``PREFIX.idx`` holds, all little-endian:
magic, version, dtype code, number of sequences S, number of documents + 1 D, then the arrays
lengths int32 [S], byte offsets int64 [S], documents int64 [D] (sequences before each document's end, from 0)
and, in Megatron's multimodal files and in ours of chats, modes: one byte per sequence. The sequences of a chat are its
parts in a row; mode 1 marks what the assistant says.

``PREFIX.tokenizer.json``, which Megatron's datasets lack, describes the tokenizer (``text/description.py``).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from megatron_zpp.data.indices import Advance
from megatron_zpp.data.text.special_tokens import check_description
from megatron_zpp.files import as_path, is_bucket, local_copy, read_json_object, read_range, regular_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
COPY_ROWS = 1 << 20  # rows per step when files are copied or summed
FILES = ".bin", ".tokenizer.json", ".idx"
PIECE = 16 << 20  # tokens per step when all are read
SAMPLE_BYTES = 16 << 10  # read at once to tell files apart


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron writes: uint16 for fewer than 65,500 ids (not 65,536), else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


class IndexedDataset:
    """The sequences of ``prefix.bin`` by number, memory-mapped or, with ``mmap_tokens=False``, read from the file.

    Attributes: ``sequence_lengths`` int32 [S]; ``document_indices`` int64 [D]: document d is the sequences
    ``document_indices[d] : document_indices[d + 1]``; ``sequence_modes`` uint8 [S], or None in a file without them.

    Raises FileNotFoundError if a file is missing, ValueError if one is truncated, damaged, foreign, or not the other's.
    """

    def __init__(self, prefix: str | os.PathLike[str], mmap_tokens: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.index_path = as_path(f"{self.prefix}.idx")
        self.token_path = as_path(f"{self.prefix}.bin")
        self.mmap_tokens = mmap_tokens and not is_bucket(self.token_path)
        for path in (self.index_path, self.token_path):
            if not path.exists():
                hint = "leave out the file suffix" if self.prefix.endswith((".bin", ".idx")) else "check the path"
                if self.prefix.endswith((".json", ".jsonl")):
                    hint = "tools/preprocess_data.py makes a dataset of such a file"
                raise FileNotFoundError(f"no dataset at {self.prefix}: {path} does not exist ({hint})")
            if not is_bucket(path):
                regular_file(path)

        self._local_index = local_copy(self.index_path)
        index = _map_file(self._local_index)
        if len(index) < HEADER.size:
            raise ValueError(f"{self.index_path} is truncated: {len(index)} bytes, shorter than its header")
        magic, version, code, num_sequences, num_documents = HEADER.unpack_from(index)
        if magic != MAGIC:
            raise ValueError(f"{self.index_path} is not a Megatron .idx file; make it with tools/preprocess_data.py")
        if version != VERSION or code not in DTYPES:
            raise ValueError(f"{self.index_path} has version {version} and dtype code {code}; known: {VERSION}, 1 to 8")
        size = HEADER.size + 12 * num_sequences + 8 * num_documents
        if len(index) not in (size, size + num_sequences):
            raise ValueError(f"{self.index_path} is truncated or damaged: {len(index)} bytes, its header says {size}")

        self.dtype = np.dtype(DTYPES[code])
        offset = HEADER.size
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num_sequences, offset)
        offset += 4 * num_sequences
        self._byte_offsets: NDArray[np.int64] = np.frombuffer(index, "<i8", num_sequences, offset)
        offset += 8 * num_sequences
        self.document_indices: NDArray[np.int64] = np.frombuffer(index, "<i8", num_documents, offset)
        self.sequence_modes: NDArray[np.uint8] | None = None
        if len(index) > size:
            self.sequence_modes = np.frombuffer(index, "u1", num_sequences, size)
        self.num_tokens = self._check_index()
        self._bytes = {self.index_path: len(index), self.token_path: self.num_tokens * self.dtype.itemsize}
        expected, actual = self._bytes[self.token_path], self.token_path.stat().st_size
        if expected != actual:
            raise ValueError(
                f"{self.token_path} holds {actual} bytes, {self.index_path} says {expected}: make both again"
            )
        self._maps = {self.index_path: index}
        if self.mmap_tokens:
            self._maps[self.token_path] = _map_file(self.token_path)
            self._tokens: NDArray = np.frombuffer(self._maps[self.token_path], self.dtype)
        elif not is_bucket(self.token_path):
            self._file = open(self.token_path, "rb")  # noqa: SIM115 (as long as the dataset lives)

    def _check_index(self) -> int:
        """Return the number of tokens. Raise ValueError unless documents cover all sequences, and these the tokens."""
        documents = self.document_indices
        covers = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(self)
        parts = [slice(first, first + COPY_ROWS) for first in range(0, len(documents), COPY_ROWS)]
        if not covers or any((documents[1:][part] < documents[:-1][part]).any() for part in parts):
            raise ValueError(f"{self.index_path} is damaged: its documents do not cover its sequences; make it again")
        end = 0  # bytes
        for first in range(0, len(self), COPY_ROWS):
            lengths = self.sequence_lengths[first : first + COPY_ROWS].astype(np.int64)
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            begins = ends - lengths * self.dtype.itemsize
            if lengths.min() < 0 or (self._byte_offsets[first : first + COPY_ROWS] != begins).any():
                raise ValueError(f"{self.index_path} is damaged: its sequences do not cover the tokens; make it again")
            end = int(ends[-1])
        return end // self.dtype.itemsize

    def check_not_cut(self) -> None:
        """Raise ValueError if a file has become shorter: reading a mapping beyond its end would kill the process."""
        for path, mapping in self._maps.items():
            if isinstance(mapping, mmap.mmap) and mapping.size() < self._bytes[path]:
                raise ValueError(_cut(path, self._bytes[path], mapping.size()))

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> NDArray:
        """Return sequence ``index``, [length], read-only."""
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Return ``length`` tokens (None: all) of sequence ``index`` from token ``offset`` on, read-only."""
        if length is None:
            length = int(self.sequence_lengths[index]) - offset
        return self._read(int(self._byte_offsets[index]) // self.dtype.itemsize + offset, length)

    def _read(self, start: int, length: int) -> NDArray:
        """Read tokens ``start`` to ``start + length`` of the file. Raises ValueError if it has become shorter."""
        if self.mmap_tokens:
            return self._tokens[start : start + length]
        content, end, position = b"", (start + length) * self.dtype.itemsize, start * self.dtype.itemsize
        while position < end:  # Linux reads at most 2 GiB at once
            if is_bucket(self.token_path):
                more = read_range(self.token_path, position, end)
            else:  # unlike seek and read, pread is safe in loader processes that share the open file
                more = os.pread(self._file.fileno(), end - position, position)
            if not more:
                raise ValueError(_cut(self.token_path, self._bytes[self.token_path], position))
            content, position = content + more, position + len(more)
        return np.frombuffer(content, self.dtype)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @cached_property
    def tokenizer(self) -> dict[str, Any] | None:
        """The description of the tokenizer that made the dataset; None if it is not beside it. Raises ValueError."""
        path = as_path(f"{self.prefix}.tokenizer.json")
        if not path.exists():
            return None
        description = read_json_object(local_copy(path))
        try:
            check_description(description)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it to do without") from error
        return description

    @cached_property
    def fingerprint(self) -> dict[str, int | str]:
        """Size, modification time and digest of the ``.idx``, which change when it is rewritten."""
        status = self._local_index.stat()
        with open(self._local_index, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"idx_bytes": status.st_size, "idx_mtime_ns": status.st_mtime_ns, "idx_sha256": digest}

    @cached_property
    def sampled_sha256(self) -> str:
        """Digest of 16 evenly spaced pieces, 16 KiB each, of the ``.bin``: tells tokens under the same ``.idx``."""
        last, digest = max(0, self._bytes[self.token_path] - SAMPLE_BYTES), hashlib.sha256()
        for offset in np.linspace(0, last, 16, dtype=np.int64).tolist():
            digest.update(read_range(self.token_path, offset, offset + SAMPLE_BYTES))
        return digest.hexdigest()

    def token_range(self, advance: Advance = lambda tokens: None, max_bytes: int | None = None) -> tuple[int, int]:
        """Return the smallest and largest token id; (0, 0) without tokens. ``advance`` gets the tokens done.

        Reads all of a ``.bin`` below ``max_bytes`` (None: 32 GiB, 1 GiB in a bucket); of a larger one it reads
        ``max_bytes`` in evenly spaced pieces.
        """
        max_bytes = max_bytes or (1 if is_bucket(self.token_path) else 32) << 30
        step = PIECE * (1 + self.num_tokens * self.dtype.itemsize // max_bytes)
        found = []
        for start in range(0, self.num_tokens, step):
            self.check_not_cut()
            tokens = self._read(start, min(PIECE, self.num_tokens - start))
            found += [int(tokens.min()), int(tokens.max())]
            advance(min(step, self.num_tokens - start))
        return min(found, default=0), max(found, default=0)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str, bool]]:
        return IndexedDataset, (self.prefix, self.mmap_tokens)  # loader processes map the files themselves


class IndexedDatasetWriter:
    """Writes a dataset document by document; memory does not grow with the corpus.

    Everything goes to ``*.partial`` files beside the target; ``finalize`` moves them into place, ``.idx`` last, so that
    ``prefix.idx`` exists only with its complete ``.bin``. A context manager finalizes on success and cleans up on an
    exception. ``has_modes``: every sequence gets a mode byte. ``resume_from``, the counts that ``sync`` returned,
    continues the partial files of a writer that was killed; ValueError if they are missing. ``tokenizer``: its
    description, which is kept beside the dataset.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: DTypeLike,
        resume_from: tuple[int, int, int] | None = None,
        has_modes: bool = False,
        tokenizer: Mapping[str, Any] | None = None,
    ) -> None:
        self.prefix, self.tokenizer = os.fspath(prefix), tokenizer
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, name in DTYPES.items() if np.dtype(name) == self.dtype), None)
        if self._code is None:
            raise ValueError(f"the .bin/.idx format has no code for {self.dtype}")
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        # The .idx holds its arrays one after the other, so each is a separate file until the end.
        self._partial = _partial_files(self.prefix)
        self.num_tokens, self.num_sequences, self.num_documents = resume_from or (0, 0, 0)
        self._parts = {"bin": self.dtype, "lengths": np.dtype("<i4"), "documents": np.dtype("<i8")}
        sizes = [self.num_tokens * self.dtype.itemsize, 4 * self.num_sequences, 8 * self.num_documents]
        if has_modes:
            self._parts["modes"] = np.dtype("u1")
            sizes.append(self.num_sequences)
        paths = [self._partial[part] for part in self._parts]
        if resume_from:
            if not paths[0].exists() and not Path(f"{self.prefix}.idx").exists():
                os.replace(f"{self.prefix}.bin", paths[0])  # killed during finalize
            for path, size in zip(paths, sizes, strict=True):
                if not path.is_file() or path.stat().st_size < size:
                    raise ValueError(f"{path} is missing or too short to continue: give --restart to start over")
                os.truncate(path, size)  # drop bytes that were written after the last sync
        self._files = [open(path, "ab" if resume_from else "wb") for path in paths]  # noqa: SIM115

    def add_document(self, sequences: Sequence[Sequence[int] | NDArray]) -> None:
        """Add a document of any number of sequences; one of none still leaves a document boundary, as in Megatron."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        self.add_documents(tokens, [len(array) for array in arrays], [len(arrays)])

    def add_documents(
        self,
        tokens: NDArray,
        sequence_lengths: ArrayLike,
        sequences_per_document: ArrayLike,
        modes: NDArray[np.uint8] | None = None,
    ) -> None:
        """Add many documents at once; modes: of each sequence. Raises ValueError if an id does not fit the dtype."""
        lengths = np.asarray(sequence_lengths, dtype=np.int64)
        counts = np.asarray(sequences_per_document, dtype=np.int64)
        if lengths.sum() != len(tokens) or counts.sum() != len(lengths):
            raise ValueError("tokens, sequence lengths and sequences per document do not add up")
        if ("modes" in self._parts) != (modes is not None) or (modes is not None and len(modes) != len(lengths)):
            raise ValueError("a dataset with modes has one for each sequence, and one without has none")
        if self.dtype.kind in "iu" and tokens.size and tokens.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            if tokens.min() < limits.min or tokens.max() > limits.max:
                raise ValueError(f"token ids {tokens.min()} to {tokens.max()} do not fit {self.dtype}")
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise ValueError(f"a sequence of {lengths.max()} tokens; the format holds fewer than 2**31")
        ends = self.num_sequences + np.cumsum(counts)
        arrays = [tokens, lengths, ends] + ([] if modes is None else [modes])
        for file, array, dtype in zip(self._files, arrays, self._parts.values(), strict=True):
            file.write(array.astype(dtype, copy=False).tobytes())
        self.num_tokens += len(tokens)
        self.num_sequences += len(lengths)
        self.num_documents += len(counts)

    def sync(self) -> tuple[int, int, int]:
        """Write everything to the disk; return the counts of tokens, sequences and documents, to resume from."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return self.num_tokens, self.num_sequences, self.num_documents

    def close(self) -> None:
        """Leave the partial files for a writer that resumes."""
        for file in self._files:
            file.close()

    def finalize(self) -> None:
        """Write ``.idx`` and move both files into place."""
        self.close()
        with open(self._partial["idx"], "wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1))
            with open(self._partial["lengths"], "rb") as lengths:
                shutil.copyfileobj(lengths, index)
                lengths.seek(0)
                end = 0
                while chunk := lengths.read(4 * COPY_ROWS):
                    sizes = np.frombuffer(chunk, "<i4").astype(np.int64) * self.dtype.itemsize
                    ends = end + np.cumsum(sizes)
                    index.write((ends - sizes).astype("<i8").tobytes())
                    end = int(ends[-1])
            index.write(bytes(8))  # where the first document begins
            for part in [*self._parts][2:]:  # documents and modes
                with open(self._partial[part], "rb") as file:
                    shutil.copyfileobj(file, index)
            index.flush()
            os.fsync(index.fileno())
        with open(self._partial["bin"], "rb") as tokens:
            os.fsync(tokens.fileno())
        # An old .idx must not be seen beside the new .bin.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        description = Path(f"{self.prefix}.tokenizer.json")
        if self.tokenizer is None:
            description.unlink(missing_ok=True)
        else:
            description.write_text(json.dumps(self.tokenizer, indent=1) + "\n", encoding="utf-8")
        os.replace(self._partial["bin"], f"{self.prefix}.bin")
        os.replace(self._partial["idx"], f"{self.prefix}.idx")
        _remove_partial_files(self.prefix)

    def abort(self) -> None:
        """Give up: remove what was written so far."""
        for file in self._files:
            with suppress(OSError):  # the disk may be full
                file.close()
        _remove_partial_files(self.prefix)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()


def finish_finalizing(prefix: str) -> bool:
    """Whether a writer that was killed in ``finalize`` had moved both files into place; if so, remove its leftovers."""
    if _partial_files(prefix)["bin"].exists() or not Path(f"{prefix}.idx").exists():
        return False
    _remove_partial_files(prefix)
    return True


def upload(prefix: str, url: str) -> None:
    """Copy a dataset into a bucket: its ``.idx`` last, because a dataset is there with its ``.idx``. Raises OSError."""
    as_path(f"{url}.idx").unlink()
    for suffix in FILES:
        if os.path.exists(f"{prefix}{suffix}"):
            with open(f"{prefix}{suffix}", "rb") as file, as_path(f"{url}{suffix}").open("wb") as target:
                shutil.copyfileobj(file, target, PIECE)


def _partial_files(prefix: str) -> dict[str, Path]:
    return {part: Path(f"{prefix}.{part}.partial") for part in ("bin", "lengths", "documents", "modes", "idx")}


def _remove_partial_files(prefix: str) -> None:
    for path in _partial_files(prefix).values():
        path.unlink(missing_ok=True)


def _cut(path: Path, expected: int, actual: int) -> str:
    return f"{path} holds {actual} bytes, and held {expected} when it was opened: something has cut it; make it again"


def _map_file(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # mmap refuses empty files
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
