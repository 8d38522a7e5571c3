"""Trains a SentencePiece tokenizer on JSON lines.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output tokenizer.model

The model is byte-level safe BPE that keeps every blank and line break, so texts and source code come back as they
were. Use it with ``--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model``; documents end with its
``</s>``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
from rich.console import Console

CHUNK = 2000  # characters that the trainer sees as one sentence: it cuts at line breaks only if we do


def train(input_path: Path, json_key: str, vocab_size: int, output: Path, max_megabytes: float) -> int:
    """Trains on at most about ``max_megabytes`` of the input, spread evenly over it, and returns the vocabulary size.

    Raises ValueError for bad input, or if the text does not support that many pieces.
    """
    if not input_path.is_file():
        raise FileNotFoundError(f"--input {input_path} does not exist")
    if vocab_size < 300:
        raise ValueError(f"--vocab-size {vocab_size} leaves no room beside the 256 bytes; give at least 300")
    stride = max(1, round(input_path.stat().st_size / (max_megabytes * 1e6)))
    chunks = list(read_chunks(input_path, json_key, stride))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(chunks),
            model_writer=model,
            model_type="bpe",
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
        raise ValueError(f"can't train {vocab_size} pieces on {input_path}: {error}") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    partial.write_bytes(model.getvalue())
    partial.replace(output)
    return sentencepiece.SentencePieceProcessor(model_file=str(output)).get_piece_size()


def read_chunks(path: Path, json_key: str, stride: int) -> Iterator[str]:
    """The texts of every ``stride``-th line, in pieces."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if (number - 1) % stride or line.isspace():
                continue
            try:
                value = json.loads(line)[json_key]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}:{number}: not a JSON object with a key {json_key!r}") from None
            for text in value if isinstance(value, list) else [value]:
                for start in range(0, len(text), CHUNK):
                    yield text[start : start + CHUNK]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a SentencePiece tokenizer on JSON lines.", allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="file of JSON objects, one a line")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text; default text")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of pieces")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the model to write")
    parser.add_argument("--max-megabytes", type=float, default=100.0, metavar="N", help="text to train on; default 100")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_arguments()
    try:
        with Console(stderr=True).status(f"training a tokenizer on {args.input}"):  # drawn on a terminal only
            size = train(args.input, args.json_key, args.vocab_size, args.output, args.max_megabytes)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {size:,} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
