"""Which samples a data-parallel rank reads, in which order (``--dataloader-type`` single and cyclic).

Each function yields one rank's micro-batches as lists of sample numbers, from ``consumed_samples`` on. A block is the
``micro_batch_size * num_ranks`` samples that all ranks read at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch


def single_order(
    total_samples: int, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Read the dataset once, in its order: rank r takes the r-th part of each block. An incomplete block is dropped.

    Global batch k holds samples k * G to (k + 1) * G for any number of ranks, micro-batch size and accumulation, so a
    run resumes from the number of consumed samples alone.
    """
    block = micro_batch_size * num_ranks
    for first in range(consumed_samples, total_samples - block + 1, block):
        yield list(range(first + micro_batch_size * rank, first + micro_batch_size * (rank + 1)))


def cyclic_order(
    total_samples: int, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Read the dataset without end, each epoch in another random order.

    As in Megatron the epoch's number seeds ``torch.randperm``, and rank r takes every n-th sample of a block. Unlike
    Megatron's, an epoch holds every sample for any layout; a block may span two epochs. Where the dataset is a multiple
    of the block both are the same.
    """
    permutation = functools.lru_cache(maxsize=1)(functools.partial(_permutation, total_samples))
    positions = itertools.count(consumed_samples + rank, num_ranks)
    while total_samples:
        places = (divmod(position, total_samples) for position in itertools.islice(positions, micro_batch_size))
        yield [int(permutation(epoch)[place]) for epoch, place in places]


def sharded_cyclic_order(
    total_samples: int, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """As ``cyclic_order``, but each rank keeps to its own contiguous part of the dataset (``--data-sharding``).

    Megatron's rule to the bit, for those who need a rank's data in one place: batches depend on the number of ranks,
    and samples that fill no block are never read.
    """
    per_rank = total_samples // (micro_batch_size * num_ranks) * micro_batch_size
    epoch, consumed = divmod(consumed_samples, max(1, per_rank * num_ranks))
    first = consumed // num_ranks
    while per_rank:
        order = _permutation(per_rank, epoch) + rank * per_rank
        for start in range(first, per_rank - micro_batch_size + 1, micro_batch_size):
            yield order[start : start + micro_batch_size].tolist()
        epoch, first = epoch + 1, 0


def _permutation(size: int, epoch: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
