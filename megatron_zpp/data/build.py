"""From the data flags to datasets, and from a dataset to batches of one data-parallel rank."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_zpp.data.blended_dataset import BlendedDataset, normalize, shares
from megatron_zpp.data.gpt_dataset import GPTDataset, cache_folder
from megatron_zpp.data.index_cache import cached_arrays
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.samplers import MicroBatchSampler

DEFAULT_SPLIT = "969, 30, 1"
SPLIT_NAMES = ("train", "valid", "test")

Edges = tuple[float, float]  # where a split begins and ends, as shares of a file's sequences
Batch = dict[str, Tensor]  # tokens int64 [B, L], labels int64 [B, L], loss_mask float32 [B, L]


class Datasets(NamedTuple):
    """What the flags describe; None for a split that has no data or of which no samples are asked."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(
    *,
    data_path: Sequence[str] | None = None,
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
    split: str | None = None,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    vocab_size: int,
    cache_path: str | None = None,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    mock_data: bool = False,
) -> Datasets:
    """Train, validation and test datasets, deterministic and equal on every rank, with no need to communicate.

    Either ``data_path`` cut by ``split`` or the paths per split; each is a list of prefixes, or of
    weight prefix pairs. ``num_samples`` is what the run will read of each split; 0 of a split builds none of it.

    Raises FileNotFoundError or ValueError if data is missing, damaged, too little, or has ids beyond ``vocab_size``.
    """
    per_split = bool(train_data_path or valid_data_path or test_data_path)
    if mock_data and (data_path or per_split):
        raise ValueError("--mock-data and data paths exclude each other: leave one out")
    if data_path and per_split:
        raise ValueError("--data-path and --train/valid/test-data-path exclude each other: leave one out")
    if per_split and split is not None:
        raise ValueError("--split cuts --data-path; it has no meaning with --train/valid/test-data-path: leave it out")
    if mock_data:
        return Datasets(
            *(
                MockDataset(size, seq_length, vocab_size, seed=(seed, number)) if size else None
                for number, size in enumerate(num_samples)
            )
        )
    if not data_path and not per_split:
        raise ValueError("no data: give --data-path PREFIX (made by tools/preprocess_data.py), or --mock-data")

    files: dict[str, IndexedDataset] = {}

    def build_one(name: str, prefix: str, edges: Edges, size: int | None) -> GPTDataset:
        if prefix not in files:
            files[prefix] = IndexedDataset(prefix)
            check_vocabulary(files[prefix], vocab_size, cache_path)
        return GPTDataset(
            files[prefix],
            split_sequences(len(files[prefix]), edges),
            num_samples=size,
            seq_length=seq_length,
            seed=seed,
            name=name,
            eod=eod,
            eod_mask_loss=eod_mask_loss,
            cache_path=cache_path,
        )

    def build_split(name: str, paths: Sequence[str] | None, edges: Edges | None, size: int) -> Dataset | None:
        if not paths or edges is None or size == 0:
            return None
        prefixes, weights = parse_blend(paths)
        if weights is None and len(prefixes) == 1:
            return build_one(name, prefixes[0], edges, size)
        folder = cache_folder(prefixes[0], cache_path)
        if weights is None:
            parts = [build_one(name, prefix, edges, None) for prefix in prefixes]
            blend = BlendedDataset(parts, None, size, name=name, cache_folder=folder)
        else:
            weights = normalize(weights)
            targets, to_build = shares(weights, size)
            parts = [build_one(name, prefix, edges, count) for prefix, count in zip(prefixes, to_build, strict=True)]
            blend = BlendedDataset(parts, weights, sum(targets), name=name, cache_folder=folder)
        if len(blend) < size:
            raise ValueError(
                f"prefixes without weights are read once each: {len(blend)} samples in the {name} split, "
                f"but the run asks for {size}; give each prefix a weight, or shorten the run"
            )
        return blend

    paths = [data_path] * 3 if data_path else [train_data_path, valid_data_path, test_data_path]
    edges = split_edges(split or DEFAULT_SPLIT) if data_path else [(0.0, 1.0)] * 3
    train, valid, test = map(build_split, SPLIT_NAMES, paths, edges, num_samples)
    if train is None and num_samples[0]:
        raise ValueError("no training data: give the train split a share in --split, or --train-data-path")
    return Datasets(train, valid, test)


def build_loader(
    dataset: Dataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int,
    device: torch.device | str,
) -> Iterator[Batch]:
    """Batches of one data-parallel rank from ``consumed_samples`` on, in pinned memory where ``device`` is CUDA.

    The iterator does not stop: it raises ValueError when the dataset has no further full batch.
    """
    total = len(dataset)  # type: ignore[arg-type]
    loader = DataLoader(
        dataset,
        batch_sampler=MicroBatchSampler(total, consumed_samples, micro_batch_size, dp_rank, dp_size),
        num_workers=num_workers,
        pin_memory=torch.device(device).type == "cuda",
        # The loader draws a seed for its workers: from a generator of its own, so that dropout's does not move.
        generator=torch.Generator(),
        worker_init_fn=_outlive_sigterm,
    )

    def batches() -> Iterator[Batch]:
        yield from loader  # its workers start with the first batch
        raise ValueError(
            f"out of data: the dataset has {total} samples and the run asks for more, "
            f"having started from sample {consumed_samples}; shorten the run or give more data"
        )

    return batches()


def _outlive_sigterm(worker: int) -> None:
    """SIGTERM to a whole job asks its ranks to save and exit; a rank still reads until then, and ends its workers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def parse_blend(paths: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of ``w1 p1 w2 p2 ...``; weights None if these are prefixes only (or an odd number)."""
    if len(paths) % 2 == 0 and all(_is_number(path) for path in paths[::2]):
        weights = [float(path) for path in paths[::2]]
        for weight in weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"weights of a blend must be positive, not {weight:g}: leave that dataset out")
        return list(paths[1::2]), weights
    misplaced = [path for path in paths if _is_number(path) and not Path(f"{path}.idx").exists()]
    if misplaced:
        raise ValueError(f"{misplaced[0]} is not a dataset; a blend is `weight prefix weight prefix ...`, in pairs")
    return list(paths), None


def split_edges(split: str) -> list[Edges | None]:
    """Where train, valid and test begin and end, of ``969, 30, 1`` or the like; None for a share of 0."""
    parts = [float(number) for number in re.findall(r"[.0-9]+", split)]
    if not 1 <= len(parts) <= 3 or sum(parts) == 0:
        raise ValueError(f"--split {split!r} must be up to three shares of train, valid and test, such as 969,30,1")
    fractions = normalize(parts + [0.0] * (3 - len(parts)))
    edges: list[Edges | None] = []
    begin = 0.0
    for fraction in fractions:
        edges.append((begin, begin + fraction) if fraction else None)
        begin += fraction
    return edges


def split_sequences(num_sequences: int, edges: Edges) -> range:
    """The sequences of a split: contiguous, in file order, ends rounded half to even."""
    return range(round(edges[0] * num_sequences), round(edges[1] * num_sequences))


def check_vocabulary(indexed: IndexedDataset, vocab_size: int, cache_path: str | None = None) -> None:
    """Raises ValueError if ``indexed`` holds ids that a vocabulary of ``vocab_size`` has not.

    The files are scanned once and the result is cached.
    """
    if indexed.dtype.kind == "u" and np.iinfo(indexed.dtype).max < vocab_size:
        return
    status = indexed.token_path.stat()
    key = {**indexed.fingerprint, "bin_bytes": status.st_size, "bin_mtime_ns": status.st_mtime_ns}
    name = f"{Path(indexed.prefix).name}-token-range"
    folder = cache_folder(indexed.prefix, cache_path)
    smallest, largest = cached_arrays(folder, name, key, lambda: {"range": np.array(indexed.token_range())})["range"]
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"{indexed.token_path} holds token {smallest if smallest < 0 else largest}, but the vocabulary has "
            f"{vocab_size}: use the tokenizer that the data was made with"
        )


class MockDataset(Dataset):
    """Random tokens in place of data, the same for every rank and run, to measure speed."""

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: tuple[int, ...]) -> None:
        self.num_samples, self.seq_length, self.vocab_size, self.seed = num_samples, seq_length, vocab_size, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng((*self.seed, index))
        tokens = torch.from_numpy(random.integers(self.vocab_size, size=self.seq_length + 1, dtype=np.int64))
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(self.seq_length)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
