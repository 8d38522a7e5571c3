"""Several datasets served as one, in Megatron's exact order.

The blend is a fixed interleaving, not a random draw: at every step the dataset is served that lags most behind its
share. Each dataset is read in its own (shuffled) order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.index_cache import Progress, cached_arrays, no_progress
from megatron_zpp.data.indices import Advance, Arrays

SURPLUS = 0.005  # Megatron builds this much more of each dataset than its share
CHUNK = 1 << 16  # samples between two reports of progress
FEW_DATASETS = 24  # up to this number, floats one by one are faster than an array


class BlendedDataset(Dataset):
    """Samples of ``datasets``, blended by ``weights`` to ``size`` samples, or every sample of each exactly once.

    ``weights`` None with a ``size`` weighs the datasets by their lengths. Raises ValueError if a dataset holds fewer
    samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float] | None,
        size: int | None,
        *,
        name: str,
        cache_folder: Path,
        progress: Progress = no_progress,
    ) -> None:
        if len(datasets) > np.iinfo(np.int16).max:
            raise ValueError(f"the {name} blend has {len(datasets)} datasets, more than Megatron's index can number")
        if weights is None and size is None:
            self.weights = None
        else:
            self.weights = normalize([len(dataset) for dataset in datasets] if weights is None else weights)
        self.datasets = list(datasets)
        self.options = datasets[0].options
        lengths = [len(dataset) for dataset in datasets]
        if size is None:
            size = sum(lengths)
        elif weights is None:
            size = min(size, sum(lengths))

        def build(advance: Advance) -> Arrays:
            if self.weights is None:
                dataset_index, dataset_sample_index = exhaustive_blend(lengths, advance)
            else:
                dataset_index, dataset_sample_index = weighted_blend(self.weights, size, advance)
            return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}

        key = {"indices": ["BlendedDataset", 2], "weights": self.weights, "size": size, "lengths": lengths}
        arrays = cached_arrays(cache_folder, f"blend-{name}", key, build, progress, rows=size)
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        taken = np.bincount(self.dataset_index, minlength=len(lengths)).tolist()
        for dataset, count in zip(self.datasets, taken, strict=True):
            if count > len(dataset):
                raise ValueError(
                    f"the {name} blend takes {count} samples of {dataset.indexed.prefix}, which holds {len(dataset)}: "
                    f"raise --mid-level-dataset-surplus or correct the weights"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]

    @property
    def order(self) -> dict[str, Any]:
        """What the order of the samples depends on, wherever the files lie."""
        return {"weights": self.weights, "datasets": [dataset.order for dataset in self.datasets]}


def normalize(weights: Sequence[float]) -> list[float]:
    """``weights`` scaled to the sum 1, in float64."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def shares(weights: Sequence[float], size: int, surplus: float = SURPLUS) -> tuple[list[int], list[int]]:
    """Samples of each dataset in a blend of about ``size``, and samples to build of it. The blend's size is the sum.

    ``weights`` are normalized ones.
    """
    targets = [math.ceil(size * weight) for weight in weights]
    return targets, [math.ceil(target * (1 + surplus)) for target in targets]


def weighted_blend(
    weights: Sequence[float], size: int, advance: Advance = lambda rows: None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Of each of ``size`` samples: its dataset int16, and its number in that dataset int64.

    Sample k comes from the dataset with the largest weight * max(k, 1) - samples drawn so far (float64, ties to the
    first), where ``weights`` have the sum 1. So a longer blend begins with the shorter one.
    """
    return _blend(weights, [math.inf] * len(weights), size, advance)


def exhaustive_blend(
    lengths: Sequence[int], advance: Advance = lambda rows: None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """``weighted_blend`` by length, leaving out used-up datasets: exactly ``lengths[i]`` samples of dataset i."""
    return _blend((np.array(lengths) / sum(lengths)).tolist(), lengths, sum(lengths), advance)


def _blend(
    weights: Sequence[float], limits: Sequence[float], size: int, advance: Advance
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    dataset_index = np.empty(size, dtype=np.int16)
    dataset_sample_index = np.empty(size, dtype=np.int64)
    drawn = [0.0] * len(weights)
    choose = _choose_one_by_one if len(weights) <= FEW_DATASETS else _choose_by_arrays
    for first in range(0, size, CHUNK):
        before = np.array(drawn, dtype=np.int64)
        chunk = np.array(choose(weights, limits, drawn, range(first, min(first + CHUNK, size))), dtype=np.int16)
        dataset_index[first : first + len(chunk)] = chunk
        # A sample's place when the chunk is sorted by dataset gives its number within its dataset.
        order = np.argsort(chunk, kind="stable")
        counts = np.bincount(chunk, minlength=len(weights))
        dataset_sample_index[first + order] = np.arange(len(chunk)) + np.repeat(
            before - (np.cumsum(counts) - counts), counts
        )
        advance(len(chunk))
    return dataset_index, dataset_sample_index


def _choose_one_by_one(
    weights: Sequence[float], limits: Sequence[float], drawn: list[float], steps: range
) -> list[int]:
    """The dataset of each step; ``drawn`` is brought up to date. Each choice depends on all before, hence the loop."""
    open_ones = [(i, weight) for i, weight in enumerate(weights) if drawn[i] < limits[i]]
    choices = []
    for k in steps:
        largest, choice = -math.inf, -1
        for i, weight in open_ones:
            lag = weight * (k or 1) - drawn[i]
            if lag > largest:
                largest, choice = lag, i
        choices.append(choice)
        drawn[choice] += 1.0
        if drawn[choice] == limits[choice]:
            open_ones = [(i, weight) for i, weight in open_ones if i != choice]
    return choices


def _choose_by_arrays(weights: Sequence[float], limits: Sequence[float], drawn: list[float], steps: range) -> list[int]:
    """The same for many datasets."""
    shares_, drawn_ = np.array(weights), np.array(drawn)
    drawn_[drawn_ == np.array(limits)] = np.inf  # used up: never chosen
    lag = np.empty(len(shares_))
    choices = []
    for k in steps:
        np.multiply(shares_, k or 1, lag)
        np.subtract(lag, drawn_, lag)
        choice = int(lag.argmax())
        choices.append(choice)
        drawn[choice] += 1.0
        drawn_[choice] = np.inf if drawn[choice] == limits[choice] else drawn[choice]
    return choices
