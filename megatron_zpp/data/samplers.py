"""Which samples a data-parallel rank reads, in which order (``--dataloader-type`` single and cyclic)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


class MicroBatchSampler(Sampler[list[int]]):
    """Micro-batches of one data-parallel rank, as lists of sample numbers, in the dataset's order.

    From ``consumed_samples`` on, blocks of ``micro_batch_size * data_parallel_size`` consecutive samples; rank r takes
    the r-th part of each. So global batch k holds the samples k * G to (k + 1) * G whatever the number of ranks,
    the micro-batch size and the accumulation are, and a run resumes from the number of consumed samples
    alone. A block that is not full is dropped.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        if micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"micro-batch size {micro_batch_size} must be positive, "
                f"rank {data_parallel_rank} below {data_parallel_size}"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank, self.ranks = data_parallel_rank, data_parallel_size
        self.block = micro_batch_size * data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        offset = self.micro_batch_size * self.rank
        for first in range(self.consumed_samples, self.total_samples - self.block + 1, self.block):
            yield list(range(first + offset, first + offset + self.micro_batch_size))


class CyclicSampler(MicroBatchSampler):
    """Micro-batches that go round and round the dataset, each epoch in a random order of its own; without end.

    As in Megatron the epoch's number seeds ``torch.randperm``, and rank r takes every n-th sample of a block. Unlike
    Megatron's, an epoch holds every sample whatever the micro-batch size and the number of ranks are; a block may span
    two epochs. Where the dataset is a multiple of the block both are the same.
    """

    def __iter__(self) -> Iterator[list[int]]:
        if self.total_samples == 0:
            return
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        position = self.consumed_samples + self.rank
        while True:
            micro_batch = []
            for _ in range(self.micro_batch_size):
                if position // self.total_samples != epoch:
                    epoch = position // self.total_samples
                    order = _permutation(self.total_samples, epoch)
                micro_batch.append(int(order[position % self.total_samples]))
                position += self.ranks
            yield micro_batch


class ShardedCyclicSampler(MicroBatchSampler):
    """As ``CyclicSampler``, but each rank keeps to its own contiguous part of the dataset (``--data-sharding``).

    Megatron's rule to the bit, for those who need a rank's data in one place: batches depend on the number of ranks,
    and samples that fill no block are never read.
    """

    def __iter__(self) -> Iterator[list[int]]:
        bucket = self.total_samples // self.block * self.micro_batch_size  # samples of one rank
        if bucket == 0:
            return
        epoch, consumed = divmod(self.consumed_samples, bucket * self.ranks)
        first = consumed // self.ranks
        while True:
            order = _permutation(bucket, epoch)
            for start in range(first, bucket - self.micro_batch_size + 1, self.micro_batch_size):
                yield (order[start : start + self.micro_batch_size] + self.rank * bucket).tolist()
            epoch, first = epoch + 1, 0


class InTurn(Sampler[list[int]]):
    """A micro-batch of each of several ranks in turn, for one process that computes for all of them."""

    def __init__(self, samplers: Sequence[MicroBatchSampler]) -> None:
        self.samplers = samplers

    def __iter__(self) -> Iterator[list[int]]:
        for of_each_rank in zip(*self.samplers, strict=True):
            yield from of_each_rank


def _permutation(size: int, epoch: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
