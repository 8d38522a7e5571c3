"""Turns a corpus into ``.bin/.idx`` files, and continues where a killed run ended.

Everything is written to ``*.partial`` files. Every few seconds these are brought to the disk, and then
``PREFIX.unfinished.json`` records the progress: up to which block of the corpus, and how many tokens, sequences and
documents. A later run of the same job cuts the files to that and continues with the next block, so its output is that
of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TextIO

from megatron_zpp.data.indexed_dataset import FILES, IndexedDatasetWriter, best_dtype, finish_finalizing, upload
from megatron_zpp.data.text.corpus import Block, CorpusFile, Position, Reading, find_files, read_blocks
from megatron_zpp.data.text.description import describe_tokenizer, refuse_conflict
from megatron_zpp.data.text.encoding import EncodedBlock, encode_blocks
from megatron_zpp.data.text.tokenizers import build_tokenizer, chat_tokenizer, huggingface_path
from megatron_zpp.errors import attempt
from megatron_zpp.files import open_lock, read_json_object

PRINTED_BAD_RECORDS = 10  # the others are only in the file


@dataclass(frozen=True)
class Job:
    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: dict[str, Any]  # arguments of build_tokenizer
    input_format: str | None = None  # None: by suffix
    reading: Reading = field(default_factory=Reading)
    append_eod: bool = False
    workers: int = 1
    skip_bad: bool = False
    restart: bool = False
    save_seconds: float = 10.0
    url: str | None = None  # an output prefix in a bucket, where all goes in the end

    def prefix(self, key: str, output: str | None = None) -> str:
        return f"{output or self.output_prefix}_{key}_{'chat' if self.reading.chats else 'document'}"

    @property
    def state_file(self) -> Path:
        return Path(f"{self.output_prefix}.unfinished.json")

    @property
    def bad_file(self) -> Path:
        return Path(f"{self.output_prefix}.bad_lines.txt")


@dataclass
class State:
    """The progress of a job."""

    position: Position = field(default_factory=Position)  # everything before it is written
    written: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # key -> tokens, sequences, documents
    documents: int = 0
    num_bytes: int = 0  # uncompressed size of the corpus
    disk_bytes: int = 0
    bad: int = 0
    bad_file_bytes: int = 0
    eods_in_text: int = 0
    tokenizer: dict[str, Any] = field(default_factory=dict)  # described, at the end
    complete: bool = False  # it only remains to move the files into place


def preprocess(job: Job, report: Callable[[State, int], None], note: Callable[[str], None]) -> State:
    """Run the job to its end; ``report`` gets the state and the bytes of all files after each block.

    Raises ValueError, OSError (ChildProcessError where a worker died) or ImportError; the next run goes on from there.
    """
    files = find_files(job.inputs, job.input_format)
    if len(job.reading.keys) > 1 and any(file.format == "text" for file in files):
        raise ValueError("text files have one key: give one with --json-keys")
    identity = _identity(job, files)  # builds the tokenizer, before any process starts
    made_with = identity["tokenizer"]["description"]
    dtype = best_dtype(made_with["vocab_size"])
    Path(job.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with _lock(job.output_prefix), attempt("tokenize into", job.output_prefix):
        state = State() if job.restart else _load(job, identity)
        if state.written:
            note(f"continuing after {state.documents:,} documents of an earlier run")
        else:
            job.state_file.unlink(missing_ok=True)
        writers = {
            key: IndexedDatasetWriter(job.prefix(key), dtype, state.written.get(key), job.reading.chats, made_with)
            for key in job.reading.keys
            if not (state.complete and finish_finalizing(job.prefix(key)))
        }
        if not state.complete:
            with open(job.bad_file, "a", encoding="utf-8") as bad_file:
                bad_file.seek(bad_file.truncate(state.bad_file_bytes))
                output = _Output(job, identity, state, writers, bad_file, note)
                try:
                    _write_tokens(output, files, report)
                except BaseException:
                    output.stop()
                    raise
        for writer in writers.values():
            writer.finalize()
        for key in job.reading.keys if job.url else ():  # where this fails, the next run does it alone
            upload(job.prefix(key), job.prefix(key, job.url))
        job.state_file.unlink()
        for key, suffix in product(job.reading.keys if job.url else (), FILES):
            Path(f"{job.prefix(key)}{suffix}").unlink(missing_ok=True)
        if not state.bad:
            job.bad_file.unlink(missing_ok=True)
    state.tokenizer = made_with
    return state


def _write_tokens(output: _Output, files: list[CorpusFile], report: Callable[[State, int], None]) -> None:
    job, state = output.job, output.state
    total = sum(file.num_bytes for file in files)
    saved_at = time.monotonic()
    blocks = read_blocks(files, job.reading, state.position)
    for block, encoded in encode_blocks(blocks, job.tokenizer, job.reading, job.append_eod, job.workers):
        if encoded.bad_records and not job.skip_bad:
            raise ValueError(f"{encoded.bad_records[0]} (--skip-bad-lines skips such lines)")
        output.write(block, encoded)
        report(state, total)
        if time.monotonic() - saved_at >= job.save_seconds:
            output.save()
            saved_at = time.monotonic()
    for key, writer in output.writers.items():
        if writer.num_tokens == 0:
            state.documents = 0  # there is nothing to continue
            raise ValueError(f"{', '.join(job.inputs)} holds no text under {key!r}: nothing to write")
    state.complete = True
    output.save()


@dataclass
class _Output:
    """A job's unfinished files, and the state that records their progress."""

    job: Job
    identity: dict[str, Any]
    state: State
    writers: dict[str, IndexedDatasetWriter]
    bad_file: TextIO
    note: Callable[[str], None]
    is_whole: bool = True  # no block is half written

    def write(self, block: Block, encoded: EncodedBlock) -> None:
        """Append a block's documents, and record that in the state."""
        self.is_whole, state = False, self.state
        for record in encoded.bad_records[: max(0, PRINTED_BAD_RECORDS - state.bad)]:
            self.note(f"skipped {record}")
        self.bad_file.write("".join(f"{record}\n" for record in encoded.bad_records))
        for key, column in encoded.columns.items():
            self.writers[key].add_documents(*column)
        state.documents += encoded.num_documents
        state.num_bytes += block.num_bytes
        state.disk_bytes += block.disk_bytes
        state.bad += len(encoded.bad_records)
        state.eods_in_text += encoded.num_eods
        state.position = block.end
        self.is_whole = True

    def save(self) -> None:
        """Bring the files to the disk, and then, atomically, the state that describes them."""
        self.bad_file.flush()
        os.fsync(self.bad_file.fileno())
        state = self.state
        state.bad_file_bytes = self.bad_file.tell()
        state.written = {key: writer.sync() for key, writer in self.writers.items()}
        new = Path(f"{self.job.state_file}.new")
        with open(new, "w", encoding="utf-8") as file:
            json.dump({"job": self.identity, "state": dataclasses.asdict(state)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.job.state_file)

    def stop(self) -> None:
        """After an error, leave what a later run can continue; as after a kill, it cuts off a half written block."""
        with contextlib.suppress(OSError):  # the disk may be full
            if self.is_whole and self.state.documents:
                self.save()
        is_kept = self.state.documents and self.job.state_file.exists()
        for writer in self.writers.values():
            with contextlib.suppress(OSError):
                writer.close() if is_kept else writer.abort()
        if not is_kept:
            self.job.state_file.unlink(missing_ok=True)
            self.job.bad_file.unlink(missing_ok=True)


def _identity(job: Job, files: list[CorpusFile]) -> dict[str, Any]:
    """Describe everything that the output depends on. An unfinished output is only continued if all of it is equal."""
    corpus = hashlib.sha256()
    for file in files:
        corpus.update(f"{file.path.resolve()}\0{file.format}\0{file.num_bytes}\0{file.mtime_ns}\n".encode())
    flags = job.tokenizer
    tokenizer = build_tokenizer(**flags)
    refuse_conflict(tokenizer)
    digest = hashlib.sha256()
    if job.reading.chats:
        template = chat_tokenizer(tokenizer, flags["tokenizer_type"]).training_template()
        digest.update(template.encode())
    for name in (flags.get("tokenizer_model"), flags.get("vocab_file"), flags.get("merge_file")):
        if name:
            path = Path(name) if Path(name).exists() else huggingface_path(name)
            for file_path in sorted(path.glob("tokenizer*.json")) if path.is_dir() else [path]:
                digest.update(file_path.read_bytes())
    return {
        "corpus": corpus.hexdigest(),
        "tokenizer": {
            "description": describe_tokenizer(flags["tokenizer_type"], tokenizer),
            "files": digest.hexdigest(),
            "pattern": flags.get("tiktoken_pattern"),
        },
        "json_keys": list(job.reading.keys),
        "text_documents": job.reading.text_documents,
        "append_eod": job.append_eod,
        "chats": job.reading.chats,
    }


def _load(job: Job, identity: dict[str, Any]) -> State:
    if not job.state_file.exists():
        return State()
    saved = read_json_object(job.state_file)
    try:
        state = State(**saved["state"])
        state.position = Position(**saved["state"]["position"])
        state.written = {key: tuple(counts) for key, counts in state.written.items()}  # type: ignore[misc]
        differing = [name for name in identity if saved["job"].get(name) != identity[name]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{job.state_file} is damaged ({error!r}): give --restart to start over") from error
    if differing:
        other = f"{job.state_file} is from an unfinished job with another {', '.join(differing)}"
        raise ValueError(f"{other}: run that to its end, or give another --output-prefix, or --restart to start over")
    return state


@contextlib.contextmanager
def _lock(prefix: str) -> Iterator[None]:
    """Keep another run from writing the same files."""
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
