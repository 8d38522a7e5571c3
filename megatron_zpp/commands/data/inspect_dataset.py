"""Shows what is in a dataset, and in which order a run reads it.

    python tools/inspect_dataset.py data/corpus_text_document --tokenizer-type SentencePieceTokenizer \\
        --tokenizer-model tokenizer.model
    python tools/inspect_dataset.py --digest --data-path 0.3 data/a 0.7 data/b --split 90,8,2 --seed 1234 \\
        --seq-length 128 --num-samples 400,20,3

The second prints, as JSON, digests of the indices and of the first samples that a run with these flags reads: equal
digests mean the same samples in the same order, here and in Megatron-LM. ``gpt`` holds the splits of one dataset,
``blend_SPLIT`` those of a blend, with one of ``parts`` for each of its datasets.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.commands.common import add_number, add_tokenizer_flags, given_tokenizer
from megatron_zpp.data.blended_dataset import BlendedDataset
from megatron_zpp.data.build import AnyDataset, NumSamples, build_datasets
from megatron_zpp.data.gpt_dataset import GPTDataset, SampleOptions
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.loader import make_batch, stack_samples
from megatron_zpp.data.text.description import format_description
from megatron_zpp.data.text.sources import SPLIT_NAMES
from megatron_zpp.data.text.tokenizers import Tokenizer, build_tokenizer
from megatron_zpp.errors import reports_errors
from megatron_zpp.metrics.progress import progress
from megatron_zpp.settings.flags import local_path, number

PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")  # each takes several prefixes
FIRST_SAMPLES = 3
BAR_WIDTH = 40
SHOWN_TOKENS = 64


def describe(indexed: IndexedDataset, tokenizer: Tokenizer | None, num_shown: int) -> str:
    """Format what is in a dataset."""
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


def digests(args: argparse.Namespace) -> dict[str, Any]:
    """Return the digests of every split that has data and samples to read."""
    options = SampleOptions(seq_length=args.seq_length, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        datasets = build_datasets(
            options,
            **{name: getattr(args, name) for name in (*PATHS, "split", "num_samples")},
            cache_path=args.data_cache_path or folder,
            progress=partial(progress, line_every=10.0),
            note=lambda text: print(f"note: {text}", file=sys.stderr),
        )
        files: dict[str, Any] = {}
        found: dict[str, Any] = {"seed": args.seed, "seq_len": args.seq_length, "datasets": files}
        for name, dataset in zip(SPLIT_NAMES, datasets, strict=True):
            if isinstance(dataset, BlendedDataset):
                found[f"blend_{name}"], parts = digest_dataset(dataset), dataset.datasets
            elif isinstance(dataset, GPTDataset):
                found.setdefault("gpt", {})[name], parts = digest_dataset(dataset), [dataset]
            else:
                continue
            for part in parts:
                files[part.indexed.prefix] = {
                    "documents": part.indexed.num_documents,
                    "tokens": part.indexed.num_tokens,
                    "idx_sha256": part.indexed.fingerprint["idx_sha256"],
                }
        return found


def digest_dataset(dataset: AnyDataset) -> dict[str, Any]:
    names = [name for name in vars(dataset) if name.endswith("_index")]
    found: dict[str, Any] = {"length": len(dataset)} | {name: digest_array(getattr(dataset, name)) for name in names}
    if isinstance(dataset, BlendedDataset):
        found["first_12_datasets"] = dataset.dataset_index[:12].tolist()
        found["parts"] = [digest_dataset(part) for part in dataset.datasets]
    return found | digest_samples(dataset)


def digest_samples(dataset: AnyDataset) -> dict[str, Any]:
    """Digest the first samples: all ids int64 [n, L + 1], the first 8 of each, and the labels that have a loss."""
    first = [dataset[i] for i in range(min(FIRST_SAMPLES, len(dataset)))]
    ids = stack_samples(first, dataset.options.seq_length + 1)
    return {
        "first_samples_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "first_samples_first_8_ids": ids[:, :8].tolist(),
        "loss_mask_sum": make_batch(ids, dataset.options)["loss_mask"].sum(dim=1).tolist(),
    }


def digest_array(array: NDArray) -> dict[str, Any]:
    digest = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
    return {"sha256": digest, "dtype": array.dtype.name, "shape": list(array.shape)}


def num_samples(text: str) -> NumSamples:
    """Read the samples of train, valid and test: ``400,20,3``; ``all`` means one epoch, a missing split has none."""
    read = number(int, at_least=0)
    counts = [None if part.strip() == "all" else read(part) for part in text.split(",")]
    if len(counts) > 3:
        raise argparse.ArgumentTypeError(f"are at most 3, got {text}")
    train, valid, test = counts + [0] * (3 - len(counts))
    return train, valid, test


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Look into a dataset.", allow_abbrev=False)
    path, described = local_path(str), "dataset to describe: path without .bin or .idx"
    parser.add_argument("prefix", nargs="?", type=path, metavar="PREFIX", help=described)
    add_number(parser, "--show", 3, "documents to print the beginning of", at_least=0)
    add_tokenizer_flags(parser, "tokenizer, to print text instead of ids")
    group = parser.add_argument_group("--digest, instead of a PREFIX; flags as in training")
    add = group.add_argument
    add("--digest", action="store_true", help="digests of the order in which a run reads its data")
    for name in PATHS:
        pairs = "prefixes, or weight prefix pairs"
        add(f"--{name.replace('_', '-')}", nargs="+", type=path, metavar="PREFIX", help=pairs)
    add("--split", metavar="A,B,C", help="shares of train, valid, test; default 969, 30, 1")
    add_number(group, "--seed", 1234, "seed of the order", at_least=0, at_most=2**32 - 1)
    add("--seq-length", type=number(int, at_least=1), metavar="N", help="tokens per sample")
    epochs = "samples of train, valid, test; all = one epoch of each dataset, the default"
    add("--num-samples", type=num_samples, default=(None, None, None), metavar="A,B,C", help=epochs)
    add("--data-cache-path", type=path, metavar="DIR", help="keep the indices here; default nowhere")
    args = parser.parse_args(argv)
    if args.digest == (args.prefix is not None):
        parser.error("give a PREFIX to describe, or --digest with --data-path")
    if args.digest and args.seq_length is None:
        parser.error("--digest requires --seq-length")
    return args


def run(args: argparse.Namespace) -> str:
    """Return what to print. Raises ValueError, OSError or ImportError on a user's mistake."""
    if args.digest:
        return json.dumps(digests(args), indent=1)
    tokenizer = None if args.tokenizer_type is None else build_tokenizer(**given_tokenizer(args))
    return describe(IndexedDataset(args.prefix), tokenizer, args.show)


@reports_errors
def main() -> None:
    print(run(parse_arguments()))
