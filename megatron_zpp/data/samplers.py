"""Which samples a data-parallel rank reads, in which order (Megatron's ``--dataloader-type single``)."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler


class MicroBatchSampler(Sampler[list[int]]):
    """Micro-batches of one data-parallel rank, as lists of sample numbers.

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
        self.block = micro_batch_size * data_parallel_size
        self.offset = micro_batch_size * data_parallel_rank

    def __len__(self) -> int:
        return max(0, self.total_samples - self.consumed_samples) // self.block

    def __iter__(self) -> Iterator[list[int]]:
        for micro_batch in range(len(self)):
            first = self.consumed_samples + micro_batch * self.block + self.offset
            yield list(range(first, first + self.micro_batch_size))
