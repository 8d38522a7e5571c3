"""Several datasets served as one, in Megatron's exact order.

The blend is a fixed interleaving, not a random draw: at every step the dataset is served that lags most behind its
share. Each dataset is read in its own (shuffled) order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.index_cache import Arrays, cached_arrays

SURPLUS = 0.005  # Megatron builds this much more of each dataset than its share


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
    ) -> None:
        self.datasets = list(datasets)
        lengths = [len(dataset) for dataset in datasets]
        if size is not None and weights is None:
            weights, size = lengths, min(size, sum(lengths))
        key = {"indices": ["BlendedDataset", 1], "weights": weights, "size": size, "lengths": lengths}

        def build() -> Arrays:
            if weights is None or size is None:
                dataset_index, dataset_sample_index = exhaustive_blend(lengths)
            else:
                dataset_index, dataset_sample_index = weighted_blend(weights, size)
            return {"dataset_index": dataset_index, "dataset_sample_index": dataset_sample_index}

        arrays = cached_arrays(cache_folder, f"blend-{name}", key, build)
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        for number, dataset in enumerate(self.datasets):
            taken = int(np.count_nonzero(self.dataset_index == number))
            if taken > len(dataset):
                raise ValueError(
                    f"the {name} blend takes {taken} samples of {dataset.indexed.prefix}, "
                    f"which holds {len(dataset)}: correct the weights of the blend"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]


def normalize(weights: Sequence[float]) -> list[float]:
    """``weights`` scaled to the sum 1, in float64."""
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def shares(weights: Sequence[float], size: int) -> tuple[list[int], list[int]]:
    """Samples of each dataset in a blend of about ``size``, and samples to build of it. The blend's size is the sum.

    ``weights`` are normalized ones.
    """
    targets = [math.ceil(size * weight) for weight in weights]
    return targets, [math.ceil(target * (1 + SURPLUS)) for target in targets]


def weighted_blend(weights: Sequence[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Of each of ``size`` samples: its dataset int16, and its number in that dataset int64.

    Sample k comes from the dataset with the largest weight * max(k, 1) - samples drawn so far (float64, ties to the
    first). Each choice depends on all earlier ones, hence the loop: about 2 microseconds a sample.
    """
    normalized = np.array(normalize(weights))
    drawn = np.zeros(len(normalized))
    lag = np.empty(len(normalized))
    dataset_index = np.empty(size, dtype=np.int16)
    dataset_sample_index = np.empty(size, dtype=np.int64)
    for k in range(size):
        np.multiply(normalized, max(k, 1), out=lag)
        np.subtract(lag, drawn, out=lag)
        choice = int(lag.argmax())
        dataset_index[k] = choice
        dataset_sample_index[k] = drawn[choice]
        drawn[choice] += 1
    return dataset_index, dataset_sample_index


def exhaustive_blend(lengths: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """``weighted_blend`` by length, leaving out used-up datasets: exactly ``lengths[i]`` samples of dataset i."""
    normalized = np.array(lengths, dtype=np.float64) / sum(lengths)
    drawn = np.zeros(len(lengths))
    lag = np.empty(len(lengths))
    used_up = np.array(lengths) == 0
    dataset_index = np.empty(sum(lengths), dtype=np.int16)
    dataset_sample_index = np.empty(sum(lengths), dtype=np.int64)
    for k in range(sum(lengths)):
        np.multiply(normalized, max(k, 1), out=lag)
        np.subtract(lag, drawn, out=lag)
        lag[used_up] = -np.inf
        choice = int(lag.argmax())
        dataset_index[k] = choice
        dataset_sample_index[k] = drawn[choice]
        drawn[choice] += 1
        used_up[choice] = drawn[choice] == lengths[choice]
    return dataset_index, dataset_sample_index
