"""Show what is in a dataset."""

import argparse

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.commands.common import add_number, add_tokenizer_flags, given_tokenizer
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.text.description import format_description
from megatron_zpp.data.text.tokenizers import Tokenizer, build_tokenizer
from megatron_zpp.errors import reports_errors
from megatron_zpp.metrics.progress import progress
from megatron_zpp.settings.flags import local_path

BAR_WIDTH = 40
SHOWN_TOKENS = 64


def describe(indexed: IndexedDataset, tokenizer: Tokenizer | None, num_shown: int) -> str:
    begins = np.concatenate([[0], np.cumsum(indexed.sequence_lengths, dtype=np.int64)])[indexed.document_indices]
    lengths = np.diff(begins)  # tokens of each document
    size = indexed.token_path.stat().st_size
    with progress(f"reading {indexed.token_path}", indexed.num_tokens) as advance:
        smallest, largest = indexed.token_range(advance)
    lines = [
        f"{indexed.prefix}: {len(lengths):,} documents, {len(indexed):,} sequences, {indexed.num_tokens:,} tokens "
        f"({indexed.dtype.name}, {size / 1e6:,.1f} MB), ids {smallest} to {largest}"
    ]
    if indexed.tokenizer is not None:
        lines.append(f"tokenizer: {format_description(indexed.tokenizer)}")
    if len(lengths) == 0:
        return "\n".join(lines)
    lines += [
        f"tokens per document: mean {lengths.mean():,.1f}, median {np.median(lengths):,.0f}, "
        f"from {lengths.min():,} to {lengths.max():,}",
        *histogram(lengths),
    ]
    for document in np.unique(np.linspace(0, len(lengths) - 1, num_shown, dtype=np.int64)).tolist():
        first, last = indexed.document_indices[document : document + 2].tolist()
        sequences = (indexed[i][:SHOWN_TOKENS].tolist() for i in range(first, last))
        ids = [token for sequence in sequences for token in sequence][:SHOWN_TOKENS]
        text = " ".join(map(str, ids)) if tokenizer is None else repr(tokenizer.detokenize(ids))
        lines.append(f"document {document:,}, {lengths[document]:,} tokens: {text}")
    return "\n".join(lines)


def histogram(lengths: NDArray[np.int64]) -> list[str]:
    """Draw a bar for each power of two of tokens per document."""
    classes = np.bincount(np.ceil(np.log2(lengths + 1)).astype(np.int64))  # 0: empty, k: 2^(k-1) to 2^k - 1 tokens
    lines = []
    for k, count in enumerate(classes.tolist()):
        tokens = f"{2 ** (k - 1):,} to {2**k - 1:,} tokens" if k else "empty"
        bar = "#" * -(-count * BAR_WIDTH // int(classes.max()))
        lines.append(f"{tokens:>32} {count:>12,} {bar}".rstrip())
    return lines[int(np.flatnonzero(classes)[0]) :]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Look into a dataset.", allow_abbrev=False)
    path, described = local_path(str), "dataset to describe: path without .bin or .idx"
    parser.add_argument("prefix", type=path, metavar="PREFIX", help=described)
    add_number(parser, "--show", 3, "documents to print the beginning of", at_least=0)
    add_tokenizer_flags(parser, "tokenizer, to print text instead of ids")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> str:
    tokenizer = None if args.tokenizer_type is None else build_tokenizer(**given_tokenizer(args))
    return describe(IndexedDataset(args.prefix), tokenizer, args.show)


@reports_errors
def main() -> None:
    print(run(parse_arguments()))
