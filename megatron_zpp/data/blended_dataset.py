"""Serves several datasets as one, in Megatron's exact order.

The blend is a fixed interleaving, not a random draw: each sample comes from the dataset that lags most behind its
share. Each dataset is read in its (shuffled) order.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_zpp.data.chat_dataset import ChatDataset
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indices import Advance, Arrays

SURPLUS = 0.005  # Megatron builds this much more of each dataset than its share
CHUNK = 1 << 16  # samples between two reports of progress

Blend = tuple[NDArray[np.int16], NDArray[np.int64]]  # per sample: its dataset, and its number in that dataset


class BlendedDataset(Dataset):
    """Samples of ``datasets``, blended by ``weights`` to ``size`` samples, or every sample of each exactly once.

    ``weights`` None with a ``size`` weights the datasets by their lengths. Raises ValueError if a dataset holds fewer
    samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset | ChatDataset],
        weights: Sequence[float] | None,
        size: int | None,
        *,
        name: str,
        cache: IndexCache,
    ) -> None:
        if len(datasets) > np.iinfo(np.int16).max:
            raise ValueError(f"the {name} blend has {len(datasets)} datasets, more than Megatron's index can number")
        lengths = [len(dataset) for dataset in datasets]
        self.weights = None if weights is None and size is None else normalize(lengths if weights is None else weights)
        self.datasets = list(datasets)
        self.options = datasets[0].options
        if size is None:
            size = sum(lengths)
        elif weights is None:
            size = min(size, sum(lengths))

        def build(advance: Advance) -> Arrays:
            if self.weights is None:
                blend = exhaustive_blend(lengths, advance)
            else:
                blend = weighted_blend(self.weights, size, advance)
            return dict(zip(("dataset_index", "dataset_sample_index"), blend, strict=True))

        key = {"indices": ["BlendedDataset", 2], "weights": self.weights, "size": size, "lengths": lengths}
        arrays = cache.arrays(datasets[0].indexed.prefix, f"blend-{name}", key, build, size)
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        taken = np.bincount(self.dataset_index, minlength=len(lengths)).tolist()
        for dataset, count in zip(self.datasets, taken, strict=True):
            if count > len(dataset):
                wrong = f"the {name} blend takes {count} of the {len(dataset)} samples of {dataset.indexed.prefix}"
                raise ValueError(f"{wrong}: correct the weights")

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]

    @property
    def order(self) -> dict[str, Any]:
        """Everything that the order of the samples depends on, wherever the files are."""
        return {"weights": self.weights, "datasets": [dataset.order for dataset in self.datasets]}


def normalize(weights: Sequence[float]) -> list[float]:
    """Scale ``weights`` to the sum 1, in float64."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def shares(weights: Sequence[float], size: int) -> tuple[list[int], list[int]]:
    """Return how many samples a blend of about ``size`` takes of each dataset, and how many to build of it."""
    targets = [math.ceil(size * weight) for weight in weights]
    return targets, [math.ceil(target * (1 + SURPLUS)) for target in targets]


def weighted_blend(weights: Sequence[float], size: int, advance: Advance = lambda rows: None) -> Blend:
    """Choose the dataset of each of ``size`` samples.

    Sample k comes from the dataset with the largest weight * max(k, 1) - samples drawn so far (float64, ties to the
    first), where ``weights`` sum to 1. So a longer blend begins with the shorter one.
    """
    return _blend(weights, [math.inf] * len(weights), size, advance)


def exhaustive_blend(lengths: Sequence[int], advance: Advance = lambda rows: None) -> Blend:
    """``weighted_blend`` by length, leaving out used-up datasets: exactly ``lengths[i]`` samples of dataset i."""
    return _blend((np.array(lengths) / sum(lengths)).tolist(), lengths, sum(lengths), advance)


def _blend(weights: Sequence[float], limits: Sequence[float], size: int, advance: Advance) -> Blend:
    dataset_index = np.empty(size, dtype=np.int16)
    dataset_sample_index = np.empty(size, dtype=np.int64)
    counts = np.zeros(len(weights), dtype=np.int64)  # samples drawn of each dataset
    shares, lag, drawn = np.array(weights), np.empty(len(weights)), np.zeros(len(weights))
    drawn[np.array(limits) == 0] = np.inf  # used up: never chosen
    for first in range(0, size, CHUNK):
        chunk = dataset_index[first : first + CHUNK]
        for k in range(first, first + len(chunk)):  # each choice depends on all before it
            np.multiply(shares, k or 1, lag)
            np.subtract(lag, drawn, lag)
            choice = int(lag.argmax())
            chunk[k - first] = choice
            drawn[choice] = drawn[choice] + 1 if drawn[choice] + 1 < limits[choice] else np.inf
        # A sample's place when the chunk is sorted by dataset gives its number within its dataset.
        order = np.argsort(chunk, kind="stable")
        added = np.bincount(chunk, minlength=len(weights))
        offsets = np.repeat(counts - (np.cumsum(added) - added), added)
        dataset_sample_index[first + order] = np.arange(len(chunk)) + offsets
        counts += added
        advance(len(chunk))
    return dataset_index, dataset_sample_index
