"""Turn text into the token files that the trainer reads.

``--output-prefix data/corpus`` writes ``data/corpus_text_document.bin`` and ``.idx``, of which the trainer takes
``--data-path data/corpus_text_document``. In a JSON object or a Parquet row, the value of each key of ``--json-keys``
is one document: a text, or a list of texts that become its sequences. Give the same command again to continue a run
that was killed.
"""

import argparse
import hashlib
import signal
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress

from megatron_zpp.commands.common import add_number, add_tokenizer_flags, given_tokenizer
from megatron_zpp.data.text.corpus import FORMATS, Reading
from megatron_zpp.data.text.description import format_description
from megatron_zpp.data.text.preprocessing import Job, State, preprocess
from megatron_zpp.errors import reports_errors
from megatron_zpp.files import as_path, cache_folder, is_url
from megatron_zpp.metrics.lines import format_duration
from megatron_zpp.settings.flags import local_path, path_or_url

# Megatron's flags for what is always so here, or for what GPT and Llama do not use.
NOT_NEEDED = {
    "--partitions": "the corpus is read as one stream, by as many --workers as you like",
    "--chunk-size": "workers get pieces of a quarter of a megabyte",
    "--keep-sequential-samples": "documents keep their order anyway",
    "--lang": "texts are not split into sentences",
    "--keep-newlines": "whole texts keep their line breaks",
    "--dataset-impl": "the output is always of the kind mmap",
}


class Display:
    """Reports progress: a bar if stderr is a terminal, else a line about every ``log_interval`` documents."""

    def __init__(self, log_interval: int) -> None:
        self.console, self.log_interval = Console(stderr=True), log_interval
        text = "{task.percentage:.1f} %  {task.fields[documents]:,} documents  {task.fields[rates]}"
        columns = ("tokenizing", BarColumn(), text)
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=None, documents=0, rates="")
        self.first: tuple[int, int, int] | None = None
        self.printed = 0  # documents

    def report(self, state: State, total_bytes: int) -> None:
        now = (state.documents, state.num_bytes, state.disk_bytes)
        if self.first is None:  # rates leave out the start of the workers, and what an earlier run did
            self.first, self.began, rates = now, time.monotonic(), "starting"
        else:
            seconds = max(time.monotonic() - self.began, 1e-9)
            documents, num_bytes, disk_bytes = (b - a for a, b in zip(self.first, now, strict=True))
            left = max(0, total_bytes - state.disk_bytes) / max(disk_bytes, 1) * seconds
            rates = f"{documents / seconds:,.0f} documents/s, {num_bytes / seconds / 1e6:,.2f} MB/s"
            rates += f", {format_duration(left)} left"
        done = state.disk_bytes
        self.bar.update(self.task, total=total_bytes, completed=done, documents=state.documents, rates=rates)
        if self.bar.disable and state.documents - self.printed >= self.log_interval:
            self.printed = state.documents
            self.note(f"{100 * done / max(total_bytes, 1):.1f} %, {state.documents:,} documents, {rates}")

    def note(self, text: str) -> None:
        if self.bar.disable:
            print(text, file=sys.stderr)
        else:
            self.console.print(text, markup=False, highlight=False)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokenize text into PREFIX_KEY_document.bin and .idx.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, type=local_path(str), metavar="PATH", help="files, patterns, folders")
    add("--input-format", choices=FORMATS, help="of all files; default: by suffix, else JSON lines")
    keys = "keys or columns to tokenize; default text, with --chat messages"
    add("--json-keys", nargs="+", metavar="KEY", help=keys)
    add("--chat", action="store_true", help="documents are chats, for the trainer's --sft; writes PREFIX_KEY_chat.bin")
    add("--text-documents", choices=("file", "line"), default="file", help="documents of text files; default file")
    add("--append-eod", action="store_true", help="end each document with the end-of-document id")
    add("--output-prefix", required=True, type=path_or_url, metavar="PREFIX|URL", help="output, without suffix")
    add_number(parser, "--workers", 1, "tokenizing processes", at_least=1, at_most=1024)
    add("--skip-bad-lines", action="store_true", help="leave out lines that are not documents, and list them")
    megabytes = "longer ones are bad lines; tokenizing takes up to 200 times a document's memory"
    add_number(parser, "--max-document-megabytes", 4.0, megabytes, at_least=1, at_most=2**20)
    add_number(parser, "--save-seconds", 10.0, "work that a kill may cost", at_least=0)
    add("--restart", action="store_true", help="discard an unfinished output")
    add_number(parser, "--log-interval", 1000, "documents between progress lines", at_least=1)
    add("--dataset-impl", choices=("mmap",), help=argparse.SUPPRESS)
    for flag in ("--keep-sequential-samples", "--keep-newlines", "--split-sentences"):
        add(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in ("--partitions", "--chunk-size", "--lang"):
        add(flag, help=argparse.SUPPRESS)
    add_tokenizer_flags(parser, "tokenizer", required=True)
    args = parser.parse_args(argv)
    args.json_keys = args.json_keys or ["messages" if args.chat else "text"]
    if args.split_sentences:
        parser.error("--split-sentences makes data for BERT and T5, and our models read whole documents: leave it out")
    if args.chat and args.append_eod:
        parser.error("--chat excludes --append-eod: the chat template says how a chat is written")
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error("--json-keys names a key twice")
    return args


def run(args: argparse.Namespace) -> None:
    max_document_bytes = int(args.max_document_megabytes * 2**20)
    url, prefix = args.output_prefix, args.output_prefix
    if is_url(url):
        probe = as_path(f"{url}.probe")  # a mistake shows now, not after all is tokenized
        with probe.open("wb") as file:
            file.write(b"a part")
        probe.unlink()
        prefix = str(cache_folder() / f"upload-{hashlib.sha256(url.encode()).hexdigest()[:16]}" / as_path(url).name)
    job = Job(
        inputs=tuple(args.input),
        output_prefix=prefix,
        tokenizer=given_tokenizer(args),
        input_format=args.input_format,
        reading=Reading(tuple(args.json_keys), args.text_documents, max_document_bytes, args.chat),
        append_eod=args.append_eod,
        workers=args.workers,
        skip_bad=args.skip_bad_lines,
        restart=args.restart,
        save_seconds=args.save_seconds,
        url=url if url != prefix else None,
    )
    began = time.monotonic()
    display = Display(args.log_interval)
    with display.bar:
        state = preprocess(job, display.report, display.note)
        display.bar.update(display.task, completed=display.bar.tasks[0].total)  # bytes read from a disk are an estimate
    tokens = ", ".join(f"{counts[0]:,} tokens in {job.prefix(key, url)}.bin" for key, counts in state.written.items())
    skipped = f"{state.bad:,} bad lines skipped" + (f", listed in {job.bad_file}" if state.bad else "")
    print(f"{state.documents:,} documents, {tokens}; {skipped}; {format_duration(time.monotonic() - began)}")
    print(f"tokenizer: {format_description(state.tokenizer)}")
    if state.eods_in_text:
        print(f"note: texts spell the end-of-document token {state.eods_in_text:,} times", file=sys.stderr)


@reports_errors
def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # saves the state on the way out
    for flag, reason in NOT_NEEDED.items():
        if getattr(args, flag[2:].replace("-", "_")):
            print(f"note: {flag} has no effect: {reason}", file=sys.stderr)
    try:
        run(args)
        return 0
    except KeyboardInterrupt:
        print("interrupted; give the same command again to continue", file=sys.stderr)
        return 130
