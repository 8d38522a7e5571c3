"""Trains a SentencePiece tokenizer on JSON lines, Parquet or text.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.model

The model is BPE with a fallback to bytes that keeps every blank and line break, so texts and source code come back as
they were. Use it with ``--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model``; documents end with
its ``</s>``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path

import sentencepiece
from rich.console import Console

from megatron_zpp.commands.common import report_errors
from megatron_zpp.data.text.corpus import FORMATS, CorpusFile, Reading, find_files, read_blocks, records, texts_of
from megatron_zpp.settings.flags import number

CHUNK = 2000  # characters that the trainer sees as one sentence: it cuts at line breaks only if we do


def train(
    inputs: list[str],
    input_format: str | None,
    reading: Reading,
    vocab_size: int,
    model_type: str,
    output: Path,
    max_megabytes: float,
) -> int:
    """Trains on at most ``max_megabytes`` of the input, spread evenly over it, and returns the vocabulary size.

    Raises ValueError for bad input, or if the text does not support that many pieces.
    """
    if vocab_size < 300:
        raise ValueError(f"--vocab-size {vocab_size} leaves no room beside the 256 bytes; give at least 300")
    chunks = [
        text[start : start + CHUNK]
        for text in sample(find_files(inputs, input_format), reading, max_megabytes * 1e6)
        for start in range(0, len(text), CHUNK)
    ]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(chunks),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,  # no text is unknown
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # indentation is one token
            split_digits=True,
            max_sentence_length=16 * CHUNK,  # in bytes; longer ones would be left out
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"can't train {vocab_size} pieces on {', '.join(inputs)}: {error}") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    partial.write_bytes(model.getvalue())
    partial.replace(output)
    return sentencepiece.SentencePieceProcessor(model_file=str(output)).get_piece_size()


def sample(files: list[CorpusFile], reading: Reading, max_bytes: float) -> list[str]:
    """The texts of every n-th record, n the smallest power of 2 for which they fit; without those that are too long."""
    kept: list[list[str]] = []
    size = number = 0
    stride = 1
    for block in read_blocks(files, reading):
        for place, record in records(block):
            if number % stride == 0:
                try:
                    texts = texts_of(record, block.format, reading)[reading.keys[0]]
                except ValueError as error:
                    raise ValueError(f"{place}: {error}") from None
                kept.append(texts)
                size += sum(map(len, texts))
            number += 1
            while size > max_bytes and len(kept) > 1:
                kept, stride = kept[::2], 2 * stride
                size = sum(len(text) for texts in kept for text in texts)
    return [text for texts in kept for text in texts]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a SentencePiece tokenizer.", allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, or folders of files")
    add("--input-format", choices=FORMATS, help="of all files; default: by suffix, JSON lines where that says nothing")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text; default text")
    add("--text-documents", choices=("file", "line"), default="file", help="documents of text files; default file")
    add("--vocab-size", type=number(int, at_least=300), required=True, metavar="N", help="number of pieces")
    add("--model-type", choices=("bpe", "unigram"), default="bpe", help="default bpe")
    add("--output", type=Path, required=True, metavar="FILE", help="the model to write")
    add(
        "--max-megabytes", type=number(float, above=0), default=100.0, metavar="N", help="text to train on; default 100"
    )
    return parser.parse_args(argv)


def main() -> int:
    args = parse_arguments()
    return report_errors(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    reading = Reading((args.json_key,), args.text_documents)
    arguments = (
        args.input,
        args.input_format,
        reading,
        args.vocab_size,
        args.model_type,
        args.output,
        args.max_megabytes,
    )
    with Console(stderr=True).status("training a tokenizer"):  # drawn on a terminal only
        size = train(*arguments)
    print(f"{args.output}: {size:,} pieces")


if __name__ == "__main__":
    sys.exit(main())
