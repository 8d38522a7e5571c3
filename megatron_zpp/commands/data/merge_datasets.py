"""Join datasets of one tokenizer into one, piece by piece: a folder's, sorted by name, or named ones in order."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_zpp.data.text.description import check_same_tokenizer
from megatron_zpp.errors import attempt, reports_errors
from megatron_zpp.metrics.progress import progress
from megatron_zpp.settings.flags import local_path

PIECE = 16 << 20  # bytes of tokens that are copied at a time, if no document is larger
MAX_DOCUMENTS = 1 << 16


def find_prefixes(inputs: list[str], output_prefix: str) -> list[str]:
    """Return the prefixes that are named, and those in the folders that are named."""
    prefixes = []
    for name in inputs:
        found = [name]
        if Path(name).is_dir():
            found = sorted(str(path.with_suffix("")) for path in Path(name).glob("*.idx"))
            if not found:
                raise FileNotFoundError(f"--input {name} holds no .idx file")
        prefixes += found
    if os.path.realpath(output_prefix) in map(os.path.realpath, prefixes):
        raise ValueError(f"--output-prefix {output_prefix} is one of the datasets to merge")
    return prefixes


def merge(prefixes: list[str], output_prefix: str) -> tuple[int, int]:
    """Return the documents and tokens of the merged dataset. Raises ValueError if datasets don't fit together."""
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    for dataset in datasets:
        if dataset.dtype != datasets[0].dtype:
            two = f"{datasets[0].prefix} holds {datasets[0].dtype}, {dataset.prefix} {dataset.dtype}"
            raise ValueError(f"{two}: they are from different tokenizers; preprocess their text again with one")
        if (dataset.sequence_modes is None) != (datasets[0].sequence_modes is None):
            raise ValueError(f"of {datasets[0].prefix} and {dataset.prefix}, one holds chats: merge them separately")
        if dataset.tokenizer is not None:
            remedy = f"Preprocess {dataset.prefix} again with it, or leave one out"
            check_same_tokenizer(datasets[0].prefix, datasets[0].tokenizer, dataset.tokenizer, remedy)
    total = sum(dataset.num_tokens for dataset in datasets) * datasets[0].dtype.itemsize
    has_modes = datasets[0].sequence_modes is not None
    made_with = datasets[0].tokenizer if all(dataset.tokenizer for dataset in datasets) else None
    with (
        progress("merging", total) as advance,
        attempt("write the dataset", output_prefix),
        IndexedDatasetWriter(output_prefix, datasets[0].dtype, None, has_modes, made_with) as writer,
    ):
        for dataset in datasets:
            for num_bytes in copy(dataset, writer):
                advance(num_bytes)
    return writer.num_documents, writer.num_tokens


def copy(dataset: IndexedDataset, writer: IndexedDatasetWriter) -> Iterator[int]:
    """Add all documents; yield the bytes of each step."""
    ends, itemsize, modes = dataset.document_indices, dataset.dtype.itemsize, dataset.sequence_modes
    first = 0  # document
    with open(dataset.token_path, "rb") as tokens:
        while first < dataset.num_documents:
            last = min(first + MAX_DOCUMENTS, dataset.num_documents)
            lengths = dataset.sequence_lengths[ends[first] : ends[last]]
            bytes_before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * itemsize  # each sequence
            document_ends = bytes_before[ends[first + 1 : last + 1] - ends[first]]
            last = first + max(1, int(np.searchsorted(document_ends, PIECE, side="right")))
            lengths = lengths[: ends[last] - ends[first]]
            num_bytes = int(document_ends[last - first - 1])
            piece = np.frombuffer(tokens.read(num_bytes), dataset.dtype)
            modes_of_piece = None if modes is None else modes[ends[first] : ends[last]]
            writer.add_documents(piece, lengths, np.diff(ends[first : last + 1]), modes_of_piece)
            yield num_bytes
            first = last


@reports_errors
def main() -> None:
    parser = argparse.ArgumentParser(description="Join datasets of one tokenizer into one.", allow_abbrev=False)
    add, path = parser.add_argument, local_path(str)
    add("--input", nargs="+", required=True, type=path, metavar="PATH", help="folders of datasets, or prefixes")
    add("--output-prefix", required=True, type=path, metavar="PREFIX", help="path of the output, without suffix")
    args = parser.parse_args()
    prefixes = find_prefixes(args.input, args.output_prefix)
    documents, tokens = merge(prefixes, args.output_prefix)
    print(f"{args.output_prefix}: {documents:,} documents, {tokens:,} tokens of {len(prefixes)} datasets")
