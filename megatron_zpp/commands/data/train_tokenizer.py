"""Train a SentencePiece tokenizer on JSON lines, Parquet or text.

The model is BPE with a fallback to bytes that keeps every blank and line break, so texts and source code are restored
exactly. Documents end with its ``</s>``.
"""

import argparse
import io
import os
from pathlib import Path

import sentencepiece

from megatron_zpp.commands.common import add_number
from megatron_zpp.data.text.corpus import FORMATS, CorpusFile, Reading, extract_texts, find_files, read_blocks, records
from megatron_zpp.errors import attempt, reports_errors
from megatron_zpp.metrics.progress import progress
from megatron_zpp.settings.flags import local_path, number

CHUNK = 2000  # characters that the trainer sees as one sentence: it would not split at line breaks


def train(texts: list[str], vocab_size: int, model_type: str) -> bytes:
    """Return a model trained on ``texts``. Raises RuntimeError if they do not support that many pieces."""
    chunks = [text[start : start + CHUNK] for text in texts for start in range(0, len(text), CHUNK)]
    model = io.BytesIO()
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
    return model.getvalue()


def sample(files: list[CorpusFile], reading: Reading, max_bytes: float) -> list[str]:
    """Return the texts of every n-th record, n the smallest power of 2 for which they fit, without those too long."""
    kept: list[list[str]] = []
    size = number = 0
    stride = 1
    for block in read_blocks(files, reading):
        for place, record in records(block):
            if number % stride == 0:
                try:
                    texts = extract_texts(record, block.format, reading)[reading.keys[0]]
                    if not all(isinstance(text, str) for text in texts):
                        raise ValueError("token ids, and a tokenizer is trained on text")
                except ValueError as error:
                    raise ValueError(f"{place}: {error} (text is UTF-8: convert, mend or remove it)") from None
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
    add("--input", nargs="+", required=True, type=local_path(str), metavar="PATH", help="files, or folders of files")
    add("--input-format", choices=FORMATS, help="of all files; default: by suffix, else JSON lines")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text; default text")
    add("--text-documents", choices=("file", "line"), default="file", help="documents of text files; default file")
    # Beside the 256 bytes there must be room for other pieces.
    add("--vocab-size", type=number(int, at_least=300), required=True, metavar="N", help="number of pieces")
    add("--model-type", choices=("bpe", "unigram"), default="bpe", help="default bpe")
    add("--output", type=local_path(Path), required=True, metavar="FILE", help="the model to write")
    add_number(parser, "--max-megabytes", 100.0, "text to train on, spread evenly over the input", above=0)
    return parser.parse_args(argv)


@reports_errors
def main() -> None:
    args = parse_arguments()
    reading = Reading((args.json_key,), args.text_documents)
    with progress("training a tokenizer"):
        texts = sample(find_files(args.input, args.input_format), reading, args.max_megabytes * 1e6)
        if not any(texts):
            limit = f"of at most {reading.max_document_bytes / 2**20:g} MB under {args.json_key!r}"
            raise ValueError(f"{', '.join(args.input)} holds no text {limit}: cut long ones, or give --json-key")
        try:
            model = train(texts, args.vocab_size, args.model_type)
        except RuntimeError as error:
            raise ValueError(f"can't train {args.vocab_size} pieces on {', '.join(args.input)}: {error}") from error
    args.output.parent.mkdir(parents=True, exist_ok=True)
    partial = args.output.with_name(args.output.name + ".partial")
    with attempt("write the tokenizer to", args.output):
        try:
            partial.write_bytes(model)
            partial.replace(args.output)
        finally:
            partial.unlink(missing_ok=True)
    size = sentencepiece.SentencePieceProcessor(model_file=str(args.output)).get_piece_size()
    print(f"{args.output}: {size:,} pieces")
