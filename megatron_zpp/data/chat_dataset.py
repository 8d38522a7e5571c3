"""Packs whole chats into samples of fixed length, for supervised fine-tuning.

Each epoch shuffles the chats by the seed and its number, puts them one after another into the first sample that has
room, and shuffles the samples. So the order is the same on any number of ranks, and in any longer run.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_zpp.data.gpt_dataset import SampleOptions, TooLittleDataError
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.indices import Advance, Arrays

INDEX_VERSION = 2  # part of the cache key: raise it when the indices change

# Bits of a sample's tokens, above all ids.
CHAT_BEGINS = 1 << 40
HAS_LOSS = 1 << 41  # the assistant says this token
ID = CHAT_BEGINS - 1


class ChatDataset(Dataset):
    """Samples of up to ``options.seq_length + 1`` tokens from the documents ``chats`` of ``indexed``.

    Each item is a new array, int64 [L + 1 or fewer], of ids with the bits ``CHAT_BEGINS`` and ``HAS_LOSS``, for
    ``loader.make_batch``. A longer chat loses its end, and one that loses all of its answers is left out. The dataset
    holds whole epochs, at least ``num_samples``; None: one. Raises ValueError if no chat is left.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        chats: range,
        options: SampleOptions,
        *,
        num_samples: int | None,
        name: str = "train",
        cache: IndexCache,
    ) -> None:
        if indexed.sequence_modes is None:
            raise ValueError(f"{indexed.prefix} does not mark the assistant's words: make it with --chat")
        if len(chats) == 0:
            none = f"the {name} split of {indexed.prefix} has none of its {indexed.num_documents} chats"
            raise TooLittleDataError(f"{none}: give a larger share with --split, more data, or --eval-iters 0")
        self.indexed, self.options, self.chats, self.modes = indexed, options, chats, indexed.sequence_modes
        capacity = options.seq_length + 1
        ends = np.concatenate([[0], np.cumsum(indexed.sequence_lengths, dtype=np.int64)])  # [sequences + 1]
        has_loss = _with_loss(indexed.document_indices, ends, self.modes, capacity)
        # Chats to train on, by their numbers in the file.
        self.kept = chats.start + np.flatnonzero(has_loss[chats.start : chats.stop])
        if len(self.kept) == 0:
            none = f"none of the {len(chats)} chats in the {name} split of {indexed.prefix} has an answer"
            raise TooLittleDataError(
                f"{none} within --seq-length {options.seq_length}: give a larger one, or shorter chats"
            )
        lengths = np.diff(ends[indexed.document_indices])[self.kept]  # tokens of each chat
        self.num_left_out = len(chats) - len(self.kept)
        self.num_truncated = int(np.count_nonzero(lengths > capacity))
        lengths = np.minimum(lengths, capacity)

        def build(advance: Advance) -> Arrays:
            return pack_epochs(lengths, capacity, num_samples or 1, options.seed, advance)

        key = {
            "indices": ["ChatDataset", INDEX_VERSION],
            **indexed.fingerprint,
            "chats": [chats.start, chats.stop],
            "num_samples": num_samples,
            "seq_length": options.seq_length,
            "seed": options.seed,
        }
        arrays = cache.arrays(indexed.prefix, f"{Path(indexed.prefix).name}-{name}", key, build, num_samples or 1)
        self.chat_index = arrays["chat_index"]
        self.sample_index = arrays["sample_index"]
        self._num_tokens = int(lengths.sum())  # per epoch

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        self.indexed.check_not_cut()
        first, last = self.sample_index[index : index + 2].tolist()
        return np.concatenate([self._chat(chat) for chat in self.kept[self.chat_index[first:last]].tolist()])

    def _chat(self, document: int) -> NDArray[np.int64]:
        first, last = self.indexed.document_indices[document : document + 2].tolist()
        parts = [self.indexed.get(part).astype(np.int64) for part in range(first, last)]
        for part, mode in zip(parts, self.modes[first:last].tolist(), strict=True):
            part |= HAS_LOSS if mode == 1 else 0
        tokens = np.concatenate(parts)[: self.options.seq_length + 1]
        tokens[0] |= CHAT_BEGINS
        return tokens

    def describe(self) -> str:
        """Say how the chats fill their samples, in one line."""
        num_samples, length = self.samples_per_epoch, self.options.seq_length
        left_out = f"; {self.num_left_out:,} more lose all of their answers and are left out"
        return (
            f"{len(self.kept):,} chats of {self.indexed.prefix} in {num_samples:,} samples an epoch, "
            f"{self._num_tokens / (num_samples * (length + 1)):.0%} full; {self.num_truncated:,} chats are longer than "
            f"--seq-length {length} and lose their end{left_out if self.num_left_out else ''}"
        )

    @property
    def samples_per_epoch(self) -> int:
        return int(np.searchsorted(self.sample_index, len(self.kept)))

    @property
    def order(self) -> dict[str, Any]:
        """Everything that the samples and their order depend on, wherever the files are."""
        return {
            "idx_sha256": self.indexed.fingerprint["idx_sha256"],
            "bin_sampled_sha256": self.indexed.sampled_sha256,
            "chats": [self.chats.start, self.chats.stop],
            "seq_length": self.options.seq_length,
            "seed": self.options.seed,
            "epochs": "any",  # more of them change nothing in what comes before
            # Older checkpoints left none out.
            **({"left_out": self.num_left_out} if self.num_left_out else {}),
        }


def _with_loss(
    chats: NDArray[np.int64], ends: NDArray[np.int64], modes: NDArray[np.uint8], capacity: int
) -> NDArray[np.bool_]:
    """Return for each chat whether an answer lies within its first ``capacity`` tokens, beyond the first, bool [C].

    chats: each one's first part, and the number of parts [C + 1]; ends: each part's first token, and the number of all
    tokens [P + 1]; modes: 1 for the parts that are answers [P].
    """
    answers = np.flatnonzero(modes == 1)
    chat_of_answer = np.searchsorted(chats, answers, side="right") - 1
    begin = ends[chats][chat_of_answer]  # nothing predicts the token there
    is_trained = np.maximum(ends[answers], begin + 1) < np.minimum(ends[answers + 1], begin + capacity)
    return np.isin(np.arange(len(chats) - 1), chat_of_answer[is_trained])


def pack_epochs(lengths: NDArray[np.int64], capacity: int, num_samples: int, seed: int, advance: Advance) -> Arrays:
    """Pack epochs of chats of ``lengths`` until there are ``num_samples``: all chats, and where samples begin."""
    chats: list[NDArray[np.int64]] = []  # one array per epoch
    sizes: list[NDArray[np.int64]] = []  # per epoch: the number of chats in each sample
    built = 0
    while built < num_samples:
        random = np.random.default_rng([seed, len(chats)])
        order = random.permutation(len(lengths))
        samples = first_fit(lengths[order], capacity)
        count = int(samples.max()) + 1
        samples = random.permutation(count)[samples]
        chats.append(order[np.argsort(samples, kind="stable")])
        sizes.append(np.bincount(samples, minlength=count))
        built += count
        advance(count)
    sample_index = np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)])
    return {"chat_index": np.concatenate(chats), "sample_index": sample_index}


def first_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return for each item, in their order, the first bin of ``capacity`` that still has room for it.

    Each item takes log2(items) steps: bins are the leaves of a tree whose nodes hold the largest room below them.
    """
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node i has the children 2 i and 2 i + 1; node 1 is the root
    bins = np.empty(len(lengths), np.int64)
    for item, length in enumerate(lengths.tolist()):
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        bins[item] = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins
