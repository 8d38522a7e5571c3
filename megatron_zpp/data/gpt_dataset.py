"""Megatron's GPT dataset: fixed-length samples cut from shuffled documents, in Megatron's exact order.

A split's sequences, repeated for as many epochs as needed and shuffled, form one stream of tokens; sample k is the
stream's tokens k * L to (k + 1) * L inclusive (consecutive samples share one token, the label of one and the input
of the next), and samples are served in shuffled order. Three arrays say so:

- document index int32: the shuffled sequence numbers, all epochs;
- sample index [M + 1, 2]: row k = (row of the document index, token offset there) at which sample k begins;
- shuffle index [M]: which sample is served i-th.

Order and dtypes equal Megatron-LM's to the bit, in NumPy alone. Like Megatron's, the order depends on the number of
epochs, thus on the length of the run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_zpp.data.index_cache import Arrays, cached_arrays
from megatron_zpp.data.indexed_dataset import IndexedDataset

SEARCH_ROWS = 1 << 22  # rows of the sample index that are computed at a time
INDEX_VERSION = 1  # part of the cache key: raise it when the indices change


class GPTDataset(Dataset):
    """Samples of ``seq_length`` tokens from the sequences ``sequences`` of ``indexed``.

    Item: ``tokens`` int64 [L], ``labels`` int64 [L], ``loss_mask`` float32 [L]. ``loss_mask`` is one everywhere, or
    zero where the *input* is ``eod`` with ``eod_mask_loss``. ``num_samples`` None means one epoch; otherwise the
    dataset holds at least that many, normally more (all samples of all epochs that were needed).

    Raises ValueError if the range holds no tokens, or one epoch no sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        name: str = "train",
        eod: int | None = None,
        eod_mask_loss: bool = False,
        cache_path: str | None = None,
    ) -> None:
        if eod_mask_loss and eod is None:
            raise ValueError("--eod-mask-loss needs a tokenizer: give --tokenizer-type, or leave the flag out")
        self.indexed = indexed
        self.seq_length = seq_length
        self.masked_token = eod if eod_mask_loss else None

        num_tokens = int(indexed.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        if num_tokens == 0:
            raise ValueError(
                f"the {name} split of {indexed.prefix} is empty ({len(sequences)} of {len(indexed)} documents), but "
                f"{num_samples or 'some'} samples are asked of it: give it a larger share with --split, more data, or "
                f"ask for none (--eval-iters 0 for valid and test)"
            )
        self.epochs, separate = count_epochs(num_tokens, num_samples, seq_length)
        if _samples_in(self.epochs, num_tokens, seq_length) == 0:
            raise ValueError(
                f"the {name} split of {indexed.prefix} holds {num_tokens} tokens, less than one sample of "
                f"{seq_length} + 1: give more data, or a smaller --seq-length"
            )
        key = {  # all that the order depends on; of num_samples, this is only the epochs it takes
            "indices": ["GPTDataset", INDEX_VERSION],
            **indexed.fingerprint,
            "sequences": [sequences.start, sequences.stop],
            "epochs": self.epochs,
            "separate_last_epoch": separate,
            "seq_length": seq_length,
            "seed": seed,
        }
        arrays = cached_arrays(
            cache_folder(indexed.prefix, cache_path),
            f"{Path(indexed.prefix).name}-{name}",
            key,
            lambda: build_indices(indexed.sequence_lengths, sequences, self.epochs, separate, seq_length, seed),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.sample(index))  # [L + 1]
        inputs = tokens[:-1]
        loss_mask = torch.ones(self.seq_length)
        if self.masked_token is not None:
            loss_mask[inputs == self.masked_token] = 0.0
        return {"tokens": inputs, "labels": tokens[1:], "loss_mask": loss_mask}

    def sample(self, index: int) -> NDArray[np.int64]:
        """The L + 1 token ids of sample ``index``, a new array."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        k = int(self.shuffle_index[index])
        (first_row, first_offset), (last_row, last_offset) = self.sample_index[k : k + 2].tolist()
        tokens = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        for row in range(first_row, last_row + 1):
            offset = first_offset if row == first_row else 0
            length = last_offset + 1 - offset if row == last_row else None
            part = self.indexed.get(int(self.document_index[row]), offset, length)
            tokens[filled : filled + len(part)] = part
            filled += len(part)
        return tokens


def cache_folder(prefix: str, cache_path: str | None) -> Path:
    """Where the indices of a dataset are cached: ``--data-cache-path``, or a folder beside the data."""
    return Path(cache_path) if cache_path else Path(prefix).parent / "index_cache"


def count_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> tuple[int, bool]:
    """Epochs that ``num_samples`` take (None: one), and whether the last one is shuffled by itself.

    It is when less than 80 % of it will be used: mixed with the others, its documents would displace theirs.
    """
    if num_samples is None:
        return 1, False
    # The smallest number whose stream holds the samples and the one label token after the last of them.
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    if epochs == 1:
        return 1, False
    of_last_epoch = num_samples - _samples_in(epochs - 1, tokens_per_epoch, seq_length)
    return epochs, of_last_epoch < int(0.80 * _samples_in(1, tokens_per_epoch, seq_length))


def build_indices(
    sequence_lengths: NDArray[np.int32],
    sequences: range,
    epochs: int,
    separate_last_epoch: bool,
    seq_length: int,
    seed: int,
) -> Arrays:
    """Document, sample and shuffle index by Megatron's rules. The sequences must hold at least one token."""
    lengths = np.array(sequence_lengths)  # out of the file, where they are not aligned
    random = np.random.RandomState(seed)  # one generator for all shuffles, in this order
    document_index = _build_document_index(sequences, epochs, separate_last_epoch, random)
    sample_index = build_sample_index(lengths, document_index, seq_length)
    first_part = total = len(sample_index) - 1
    if separate_last_epoch:
        tokens_per_epoch = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        first_part = _samples_in(epochs - 1, tokens_per_epoch, seq_length)
    shuffle_index = _build_shuffle_index(first_part, total, random)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def build_sample_index(lengths: NDArray[np.int32], document_index: NDArray[np.int32], seq_length: int) -> NDArray:
    """Sample index [M + 1, 2] of the stream that ``document_index`` spells out.

    Row k is where stream position k * L lies: sample k's first token, and sample k - 1's last. A document that ends
    just before that position is not the row; empty ones never are (but row 0 is always (0, 0)).
    """
    document_lengths = lengths[document_index]
    ends = np.cumsum(document_lengths, dtype=np.int64)
    num_samples = (int(ends[-1]) - 1) // seq_length
    fits_int32 = max(len(document_index), int(lengths.max())) <= np.iinfo(np.int32).max
    sample_index = np.empty((num_samples + 1, 2), dtype=np.int32 if fits_int32 else np.int64)
    sample_index[0] = 0
    for first in range(1, num_samples + 1, SEARCH_ROWS):
        last = min(first + SEARCH_ROWS, num_samples + 1)
        positions = np.arange(first, last, dtype=np.int64) * seq_length
        rows = np.searchsorted(ends, positions, side="right")
        sample_index[first:last, 0] = rows
        sample_index[first:last, 1] = positions - (ends[rows] - document_lengths[rows])
    return sample_index


def _samples_in(epochs: int, tokens_per_epoch: int, seq_length: int) -> int:
    return (epochs * tokens_per_epoch - 1) // seq_length


def _build_document_index(
    sequences: range, epochs: int, separate_last_epoch: bool, random: np.random.RandomState
) -> NDArray[np.int32]:
    epoch = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    if not separate_last_epoch:
        document_index = np.tile(epoch, epochs)
        random.shuffle(document_index)  # across epochs, as Megatron does
        return document_index
    earlier = np.tile(epoch, epochs - 1)
    random.shuffle(earlier)
    random.shuffle(epoch)
    return np.concatenate([earlier, epoch])


def _build_shuffle_index(first_part: int, total: int, random: np.random.RandomState) -> NDArray:
    """A permutation of ``range(first_part)``, followed by one of ``range(first_part, total)``."""
    shuffle_index = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(shuffle_index[:first_part])
    if first_part < total:
        random.shuffle(shuffle_index[first_part:])
    return shuffle_index
