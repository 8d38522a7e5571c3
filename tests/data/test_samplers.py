"""Global batches must not depend on how many ranks share them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.samplers import MicroBatchSampler


@settings(max_examples=60, deadline=None)
@given(
    micro_batch_size=st.integers(1, 4),
    ranks=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    consumed=st.integers(0, 30),
    total=st.integers(0, 200),
)
def test_global_batches_are_consecutive_samples(micro_batch_size, ranks, accumulation, consumed, total):
    per_rank = [list(MicroBatchSampler(total, consumed, micro_batch_size, rank, ranks)) for rank in range(ranks)]
    global_batch_size = micro_batch_size * ranks * accumulation
    num_steps = len(per_rank[0]) // accumulation
    assert num_steps == max(0, total - consumed) // (micro_batch_size * ranks) // accumulation
    for step in range(num_steps):
        batch = [
            sample
            for micro_batches in per_rank
            for micro_batch in micro_batches[step * accumulation : (step + 1) * accumulation]
            for sample in micro_batch
        ]
        start = consumed + step * global_batch_size
        assert sorted(batch) == list(range(start, start + global_batch_size))


def test_each_rank_takes_its_contiguous_part():
    assert list(MicroBatchSampler(17, 1, 2, 1, 3)) == [[3, 4], [9, 10]]


def test_impossible_ranks_are_refused():
    with pytest.raises(ValueError, match="rank 3 below 3"):
        MicroBatchSampler(10, 0, 1, 3, 3)
