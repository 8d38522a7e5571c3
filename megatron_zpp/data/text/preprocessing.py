"""Turns a corpus into ``.bin/.idx`` files, and goes on where a killed run ended.

All is written to ``*.partial`` files. Every few seconds these are brought to the disk, and ``PREFIX.unfinished.json``
then says how far they are: up to which block of the corpus, and how many tokens, sequences and documents. A later run
of the same job cuts the files to that and goes on with the next block, so its output is that of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter, best_dtype, finish_finalizing
from megatron_zpp.data.text.corpus import Block, CorpusFile, Position, Reading, find_files, read_blocks
from megatron_zpp.data.text.encoding import EncodedBlock, encode_blocks
from megatron_zpp.data.text.tokenizers import TokenizerFlags, build_tokenizer, huggingface_path
from megatron_zpp.files import open_lock, read_json_object

PRINTED_BAD_RECORDS = 10  # the others are only in the file


@dataclass(frozen=True)
class Job:
    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerFlags
    input_format: str | None = None  # None: by suffix
    reading: Reading = field(default_factory=Reading)
    append_eod: bool = False
    workers: int = 1
    ordered: bool = True
    skip_bad: bool = False
    restart: bool = False
    save_seconds: float = 10.0

    def prefix(self, key: str) -> str:
        return f"{self.output_prefix}_{key}_{'sentence' if self.reading.sentences else 'document'}"

    @property
    def state_file(self) -> Path:
        return Path(f"{self.output_prefix}.unfinished.json")

    @property
    def bad_file(self) -> Path:
        return Path(f"{self.output_prefix}.bad_lines.txt")


@dataclass
class State:
    """How far a job is."""

    position: Position = field(default_factory=Position)  # all before it is written
    block: int = 0  # number of the block that begins there
    done: set[int] = field(default_factory=set)  # later blocks that are written, where the order is free
    written: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # key -> tokens, sequences, documents
    documents: int = 0
    num_bytes: int = 0  # of the corpus, uncompressed
    disk_bytes: int = 0
    bad: int = 0
    bad_file_bytes: int = 0
    eods_in_text: int = 0
    complete: bool = False  # nothing is left but to move the files into place


def preprocess(job: Job, report: Callable[[State, int], None], note: Callable[[str], None]) -> State:
    """Runs the job to its end. ``report`` is called with the state and the bytes of all files, now and then.

    Raises ValueError, FileNotFoundError, ImportError or RuntimeError (a worker died). What is done by then is kept for
    the next run of the job.
    """
    files = find_files(job.inputs, job.input_format)
    if len(job.reading.keys) > 1 and any(file.format == "text" for file in files):
        raise ValueError("text files have one key: give one with --json-keys")
    identity = _identity(job, files)  # builds the tokenizer, before any process starts
    dtype = best_dtype(identity["tokenizer"]["vocab_size"])
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with _alone(job.output_prefix):
        state = State() if job.restart else _load(job, identity)
        if state.written:
            note(f"going on after {state.documents:,} documents that an earlier run left")
        else:
            job.state_file.unlink(missing_ok=True)
        writers = {
            key: IndexedDatasetWriter(job.prefix(key), dtype, state.written.get(key))
            for key in job.reading.keys
            if not (state.complete and finish_finalizing(job.prefix(key)))
        }
        if not state.complete:
            with _Output(job, identity, state, writers, note) as output:
                _write_tokens(job, files, output, report)
        for writer in writers.values():
            writer.finalize()
        job.state_file.unlink()
        if not state.bad:
            job.bad_file.unlink(missing_ok=True)
    return state


def _write_tokens(job: Job, files: list[CorpusFile], output: _Output, report: Callable[[State, int], None]) -> None:
    total = sum(file.num_bytes for file in files)
    saved_at = time.monotonic()
    blocks = output.blocks_to_do(read_blocks(files, job.reading, output.state.position))
    for block, encoded in encode_blocks(blocks, job.tokenizer, job.reading, job.append_eod, job.workers, job.ordered):
        if encoded.bad_records and not job.skip_bad:
            raise ValueError(f"{encoded.bad_records[0]} (--skip-bad-lines leaves such lines out)")
        output.write(block, encoded)
        report(output.state, total)
        if time.monotonic() - saved_at >= job.save_seconds:
            output.save()
            saved_at = time.monotonic()
    for key, writer in output.writers.items():
        if writer.num_tokens == 0:
            output.state.documents = 0  # nothing to go on with
            raise ValueError(f"{', '.join(job.inputs)} holds no text under {key!r}: nothing to write")
    output.state.complete = True
    output.save()


class _Output:
    """A job's unfinished files, and the state that says how far they are."""

    def __init__(
        self,
        job: Job,
        identity: dict[str, Any],
        state: State,
        writers: dict[str, IndexedDatasetWriter],
        note: Callable[[str], None],
    ) -> None:
        self.job, self.identity, self.state, self.writers, self.note = job, identity, state, writers, note
        self._numbers: dict[Position, int] = {}  # of the blocks under way
        self._ends: dict[int, Position] = {}
        self._whole = True  # no block is half written
        self._bad_file = open(job.bad_file, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._bad_file.truncate(state.bad_file_bytes)
        self._bad_file.seek(0, os.SEEK_END)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is not None:
                self._stop()
        finally:
            self._bad_file.close()

    def blocks_to_do(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Those that are not written yet, of the blocks from the state's position on."""
        for number, block in enumerate(blocks, self.state.block):
            self._ends[number] = block.end
            if number not in self.state.done:
                self._numbers[block.start] = number
                yield block

    def write(self, block: Block, encoded: EncodedBlock) -> None:
        """Append a block's documents, and say so in the state."""
        self._whole, state = False, self.state
        for record in encoded.bad_records[: max(0, PRINTED_BAD_RECORDS - state.bad)]:
            self.note(f"skipped {record}")
        self._bad_file.write("".join(f"{record}\n" for record in encoded.bad_records))
        for key, column in encoded.columns.items():
            self.writers[key].add_documents(column.tokens, column.sequence_lengths, column.sequences_per_document)
        state.documents += encoded.num_documents
        state.num_bytes += block.num_bytes
        state.disk_bytes += block.disk_bytes
        state.bad += len(encoded.bad_records)
        state.eods_in_text += encoded.num_eods
        state.done.add(self._numbers.pop(block.start))
        while state.block in state.done:
            state.done.remove(state.block)
            state.position = self._ends.pop(state.block)
            state.block += 1
        self._whole = True

    def save(self) -> None:
        """Bring the files to the disk, then the state that speaks of them."""
        self._bad_file.flush()
        os.fsync(self._bad_file.fileno())
        self.state.bad_file_bytes = self._bad_file.tell()
        self.state.written = {key: writer.sync() for key, writer in self.writers.items()}
        _save(self.job, self.identity, self.state)

    def _stop(self) -> None:
        """Before the end: leave what a later run can go on with. It cuts off a half written block, as after a kill."""
        with contextlib.suppress(OSError):  # the disk may be full
            if self._whole and self.state.documents:
                self.save()
        kept = self.state.documents and self.job.state_file.exists()
        for writer in self.writers.values():
            with contextlib.suppress(OSError):
                if kept:
                    writer.close()
                else:
                    writer.abort()
        if not kept:
            self.job.state_file.unlink(missing_ok=True)
            self.job.bad_file.unlink(missing_ok=True)


def _identity(job: Job, files: list[CorpusFile]) -> dict[str, Any]:
    """What the output depends on. An unfinished output is gone on with only if all of it is the same."""
    corpus = hashlib.sha256()
    for file in files:
        corpus.update(f"{file.path.resolve()}\0{file.format}\0{file.num_bytes}\0{file.mtime_ns}\n".encode())
    tokenizer = build_tokenizer(**job.tokenizer)
    digest = hashlib.sha256()
    flags = job.tokenizer
    for name in (flags.get("tokenizer_model"), flags.get("vocab_file"), flags.get("merge_file")):
        if name:
            path = Path(name) if Path(name).exists() else huggingface_path(name)
            for file_path in sorted(path.glob("tokenizer*.json")) if path.is_dir() else [path]:
                digest.update(file_path.read_bytes())
    return {
        "corpus": corpus.hexdigest(),
        "tokenizer": {
            "type": job.tokenizer["tokenizer_type"],
            "files": digest.hexdigest(),
            "pattern": job.tokenizer.get("tiktoken_pattern"),
            "num_special_tokens": job.tokenizer.get("tiktoken_num_special_tokens"),
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
        },
        "json_keys": list(job.reading.keys),
        "text_documents": job.reading.text_documents,
        "append_eod": job.append_eod,
        "sentences": job.reading.sentences,
    }


def _save(job: Job, identity: dict[str, Any], state: State) -> None:
    """Atomically, and after the files that it speaks of."""
    new = Path(f"{job.state_file}.new")
    with open(new, "w", encoding="utf-8") as file:
        json.dump({"job": identity, "state": dataclasses.asdict(state) | {"done": sorted(state.done)}}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, job.state_file)


def _load(job: Job, identity: dict[str, Any]) -> State:
    if not job.state_file.exists():
        return State()
    saved = read_json_object(job.state_file)
    try:
        differing = [name for name, value in identity.items() if saved["job"].get(name) != value]
        state = State(**saved["state"])
        state.position = Position(**saved["state"]["position"])
        state.done = set(state.done)
        state.written = {key: tuple(counts) for key, counts in state.written.items()}  # type: ignore[misc]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{job.state_file} is damaged ({error!r}): give --restart to start over") from error
    if differing:
        raise ValueError(
            f"{job.state_file} is of an unfinished job with another {', '.join(differing)}: run that to its end, "
            f"choose another --output-prefix, or give --restart to start over"
        )
    return state


@contextlib.contextmanager
def _alone(prefix: str) -> Iterator[None]:
    """Two runs must not write the same files."""
    path = Path(f"{prefix}.lock")
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {prefix}_*") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
