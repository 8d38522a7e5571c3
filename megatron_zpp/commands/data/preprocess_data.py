"""Turns text into the token files that the trainer reads.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod --workers 8 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

writes ``data/corpus_text_document.bin`` and ``.idx``; the trainer takes ``--data-path data/corpus_text_document``.

Input is JSON lines (plain, .gz, .zst), Parquet, text files, or folders of them. Of a JSON object or a Parquet row, the
value of each key of ``--json-keys`` is one document: a text, or a list of texts that become its sequences. An empty
text leaves a document without tokens, as in Megatron. All is read, tokenized and written in a stream. The output takes
its final name when it is complete; a run that was killed goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megatron_zpp.commands.common import report_errors
from megatron_zpp.data.text.corpus import FORMATS, Reading, find_files, read_blocks
from megatron_zpp.data.text.encoding import encode_blocks
from megatron_zpp.data.text.preprocessing import Job, State, preprocess
from megatron_zpp.data.text.tokenizers import TOKENIZER_TYPES, TokenizerFlags, build_tokenizer
from megatron_zpp.metrics.lines import format_duration
from megatron_zpp.settings.flags import number

# Megatron's flags that ask for what is always so here, or for what GPT and Llama have no use for.
NOT_NEEDED = {
    "partitions": "--partitions has no effect: the corpus is read as one stream, by as many --workers as you like",
    "chunk_size": "--chunk-size has no effect: workers get pieces of a quarter of a megabyte",
    "keep_sequential_samples": "--keep-sequential-samples has no effect: documents keep their order anyway",
    "lang": "--lang has no effect: --split-sentences has the same rules for all languages",
    "dataset_impl": "--dataset-impl has no effect: the output is always of the kind mmap",
}


def summary(job: Job, state: State, seconds: float) -> str:
    tokens = ", ".join(f"{counts[0]:,} tokens in {job.prefix(key)}.bin" for key, counts in state.written.items())
    skipped = f"{state.bad:,} bad lines skipped" + (f", listed in {job.bad_file}" if state.bad else "")
    return f"{state.documents:,} documents, {tokens}; {skipped}; {format_duration(seconds)}"


class Speed:
    """Rates since the program began, which may have been amid the corpus."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first: tuple[int, int, int] | None = None

    def text(self, state: State, total_bytes: int) -> str:
        now = (state.documents, state.num_bytes, state.disk_bytes)
        seconds = max(time.monotonic() - self.began, 1e-9)
        if self.first is None:  # the beginning's cost of starting workers is no measure of what follows
            self.first, self.began = now, time.monotonic()
            return "starting"
        documents, num_bytes, disk_bytes = (b - a for a, b in zip(self.first, now, strict=True))
        left = max(0, total_bytes - state.disk_bytes) / max(disk_bytes, 1) * seconds
        rates = f"{documents / seconds:,.0f} documents/s, {num_bytes / seconds / 1e6:,.2f} MB/s"
        return f"{rates}, {format_duration(left)} left"


@contextlib.contextmanager
def display(log_interval: int) -> Iterator[tuple[Callable[[State, int], None], Callable[[str], None]]]:
    """Functions to report progress and to note something.

    Draws a bar if stderr is a terminal, and else prints a line at about every ``log_interval`` documents.
    """
    console = Console(stderr=True)
    speed = Speed()
    if not console.is_terminal:
        printed = 0

        def print_line(state: State, total_bytes: int) -> None:
            nonlocal printed
            rates = speed.text(state, total_bytes)
            if state.documents - printed >= log_interval:
                printed = state.documents
                share = 100 * state.disk_bytes / max(total_bytes, 1)
                print(f"{share:.1f} %, {state.documents:,} documents, {rates}", file=sys.stderr)

        yield print_line, lambda text: print(text, file=sys.stderr)
        return
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        TextColumn("{task.percentage:.1f} %  {task.fields[documents]:,} documents  {task.fields[rates]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None, documents=0, rates="")

        def draw(state: State, total_bytes: int) -> None:
            rates = speed.text(state, total_bytes)
            bar.update(task, total=total_bytes, completed=state.disk_bytes, documents=state.documents, rates=rates)

        yield draw, lambda text: console.print(text, markup=False, highlight=False)


def try_workers(job: Job, numbers: list[int], max_documents: int) -> None:
    """Prints the speed of each number of workers on the first documents."""
    build_tokenizer(**job.tokenizer)  # a bad one is named here
    files = find_files(job.inputs, job.input_format)
    for workers in numbers:
        blocks = read_blocks(files, job.reading)
        encoded = encode_blocks(blocks, job.tokenizer, job.reading, job.append_eod, workers, job.ordered)
        with contextlib.closing(encoded):
            next(encoded, None)  # workers have started
            began = time.monotonic()
            documents = num_bytes = 0
            for block, result in encoded:
                documents += result.num_documents
                num_bytes += block.num_bytes
                if documents >= max_documents:
                    break
            seconds = time.monotonic() - began
        if documents == 0:
            raise ValueError(f"{', '.join(job.inputs)} is too small to measure on: any number of workers will do")
        print(f"{workers} workers: {documents / seconds:,.0f} documents/s, {num_bytes / seconds / 1e6:,.2f} MB/s")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokenize text into PREFIX_KEY_document.bin and .idx.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, patterns of files, or folders")
    add("--input-format", choices=FORMATS, help="of all files; default: by suffix, JSON lines where that says nothing")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to tokenize; default text")
    add("--text-documents", choices=("file", "line"), default="file", help="documents of text files; default file")
    add("--append-eod", action="store_true", help="end each document with the end-of-document id")
    add("--split-sentences", action="store_true", help="make each sentence a sequence; writes PREFIX_KEY_sentence.bin")
    add("--keep-newlines", action="store_true", help="sentences keep the blanks and line breaks after them")
    add("--output-prefix", required=True, metavar="PREFIX", help="path of the output, without suffix")
    add(
        "--workers",
        type=number(int, at_least=1, at_most=1024),
        default=1,
        metavar="N",
        help="tokenizing processes; default 1",
    )
    add("--unordered", action="store_true", help="write documents as they are ready; a little faster")
    add("--skip-bad-lines", action="store_true", help="leave out lines that are no documents, and list them")
    add(
        "--max-document-megabytes",
        type=number(float, at_least=1, at_most=2**20),
        default=4.0,
        metavar="N",
        help="longer ones are bad lines; tokenizing takes up to 200 times a document's memory; default 4",
    )
    add(
        "--save-seconds",
        type=number(float, at_least=0),
        default=10.0,
        metavar="N",
        help="work that a kill may cost; default 10",
    )
    add("--restart", action="store_true", help="throw an unfinished output away")
    add(
        "--log-interval",
        type=number(int, at_least=1),
        default=1000,
        metavar="N",
        help="documents between progress lines; default 1000",
    )
    add("--find-optimal-num-workers", action="store_true", help="only measure --workers-to-check")
    add(
        "--workers-to-check",
        type=number(int, at_least=1, at_most=1024),
        nargs="+",
        default=[16, 32, 64],
        metavar="N",
        help="default 16 32 64",
    )
    add(
        "--max-documents",
        type=number(int, at_least=1),
        default=100_000,
        metavar="N",
        help="to measure on; default 100,000",
    )
    add("--dataset-impl", choices=("mmap",), help=argparse.SUPPRESS)
    add("--keep-sequential-samples", action="store_true", help=argparse.SUPPRESS)
    for flag in ("--partitions", "--chunk-size", "--lang"):
        add(flag, help=argparse.SUPPRESS)
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="SentencePiece model; .tiktoken file or JSON vocabulary; tokenizer.json, its folder, or its model's name "
        "in Hugging Face's cache",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument(
        "--vocab-size",
        type=number(int, at_least=1),
        metavar="N",
        help="number of ids of NullTokenizer, and of TikTokenizer with a JSON vocabulary: default 131072",
    )
    group.add_argument(
        "--tiktoken-pattern",
        metavar="P",
        help="how TikTokenizer cuts words: gpt2, cl100k_base, o200k_base, v1, v2, a regex",
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=number(int, at_least=3),
        metavar="N",
        help="ids before the tokens of TikTokenizer's JSON vocabulary; default 1000",
    )
    args = parser.parse_args(argv)
    if args.keep_newlines and not args.split_sentences:
        parser.error("--keep-newlines needs --split-sentences: whole texts keep their line breaks anyway")
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error("--json-keys names a key twice")
    return args


def job_of(args: argparse.Namespace) -> Job:
    tokenizer = TokenizerFlags(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
    )
    sentences = ("blanks" if args.keep_newlines else "alone") if args.split_sentences else None
    max_document_bytes = int(args.max_document_megabytes * 2**20)
    return Job(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        tokenizer=tokenizer,
        input_format=args.input_format,
        reading=Reading(tuple(args.json_keys), args.text_documents, max_document_bytes, sentences),
        append_eod=args.append_eod,
        workers=args.workers,
        ordered=not args.unordered,
        skip_bad=args.skip_bad_lines,
        restart=args.restart,
        save_seconds=args.save_seconds,
    )


def main() -> int:
    args = parse_arguments()
    job = job_of(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through what saves the state
    for name, message in NOT_NEEDED.items():
        if getattr(args, name):
            print(f"note: {message}", file=sys.stderr)
    try:
        return report_errors(lambda: run(args, job), (ValueError, OSError, ImportError, RuntimeError))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def run(args: argparse.Namespace, job: Job) -> None:
    began = time.monotonic()
    if args.find_optimal_num_workers:
        try_workers(job, args.workers_to_check, args.max_documents)
        return
    with display(args.log_interval) as (report, note):
        state = preprocess(job, report, note)
    print(summary(job, state, time.monotonic() - began))
    if state.eods_in_text:
        print(
            f"note: {state.eods_in_text:,} end-of-document ids are inside texts, which spell that token",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
