"""Cuts shuffled documents into samples of fixed length, in the order of ``indices``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.indices import Advance, Arrays, count_epochs, megatron_order, samples_in

INDEX_VERSION = 2  # part of the cache key: raise it when the indices change


class TooLittleDataError(ValueError):
    """A split does not fill one sample."""


@dataclass(frozen=True)
class SampleOptions:
    """How a run cuts, orders and masks samples, whatever its data."""

    seq_length: int
    seed: int
    eod: int | None = None  # id that ends a document
    eod_mask_loss: bool = False  # no loss where the input is eod
    reset_position_ids: bool = False  # positions restart after eod
    reset_attention_mask: bool = False  # tokens attend to their document alone
    sft: bool = False  # samples are whole chats, which say where they begin and what has loss


class GPTDataset(Dataset):
    """Samples of ``options.seq_length`` tokens from the sequences ``sequences`` of ``indexed``.

    Each item is a new array of ids, int64 [L + 1], for ``loader.make_batch``. ``num_samples`` None means one epoch;
    otherwise the dataset holds all samples of the epochs that they take.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        options: SampleOptions,
        *,
        num_samples: int | None,
        name: str = "train",
        cache: IndexCache,
    ) -> None:
        if indexed.sequence_modes is not None and indexed.sequence_modes.any():
            raise ValueError(f"{indexed.prefix} holds chats, or several modes of data: train on chats with --sft")
        self.indexed, self.options, self.sequences = indexed, options, sequences
        num_tokens = int(indexed.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        if num_tokens == 0:
            empty = f"the {name} split of {indexed.prefix} is empty ({len(sequences)} of {len(indexed)} documents)"
            raise TooLittleDataError(f"{empty}: give a larger share with --split, more data, or --eval-iters 0")
        seq_length, seed = options.seq_length, options.seed
        samples_per_epoch = samples_in(1, num_tokens, seq_length)
        if samples_per_epoch == 0:  # in Megatron a sample repeats the data within itself
            few = f"the {name} split of {indexed.prefix} holds {num_tokens} tokens, less than {seq_length} + 1"
            raise TooLittleDataError(f"{few}: give more data, or a smaller --seq-length")
        self.samples_per_epoch = num_tokens / seq_length  # samples may span epochs
        self.epochs, self.separate_last_epoch = count_epochs(num_tokens, num_samples, seq_length)

        def build(advance: Advance) -> Arrays:
            lengths, last = indexed.sequence_lengths, self.separate_last_epoch
            return megatron_order(lengths, sequences, self.epochs, last, seq_length, seed, advance)

        key = {  # everything that the order depends on; num_samples matters only by the epochs it takes
            "indices": ["GPTDataset", INDEX_VERSION],
            **indexed.fingerprint,
            "sequences": [sequences.start, sequences.stop],
            "epochs": self.epochs,
            "separate_last_epoch": self.separate_last_epoch,
            "seq_length": seq_length,
            "seed": seed,
        }
        rows = self.epochs * (len(sequences) + 2 * samples_per_epoch)
        arrays = cache.arrays(indexed.prefix, f"{Path(indexed.prefix).name}-{name}", key, build, rows)
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        self.indexed.check_not_cut()  # once a sample: a file's size costs as much to ask for as a document to read
        k = int(self.shuffle_index[index])
        (first_row, first_offset), (last_row, last_offset) = self.sample_index[k : k + 2].tolist()
        sequence_numbers = self.document_index[first_row : last_row + 1].tolist()
        offsets = [first_offset] + [0] * (last_row - first_row)
        lengths = [None] * (last_row - first_row) + [last_offset + 1 - offsets[-1]]
        parts = list(map(self.indexed.get, sequence_numbers, offsets, lengths))
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")

    @property
    def order(self) -> dict[str, Any]:
        """Everything that the samples and their order depend on, wherever the files are."""
        return {
            "idx_sha256": self.indexed.fingerprint["idx_sha256"],
            "bin_sampled_sha256": self.indexed.sampled_sha256,
            "sequences": [self.sequences.start, self.sequences.stop],
            "seq_length": self.options.seq_length,
            "seed": self.options.seed,
            "epochs": self.epochs,
            "separate_last_epoch": self.separate_last_epoch,
        }
