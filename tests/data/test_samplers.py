"""Global batches must not depend on how many ranks share them."""

from itertools import islice

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.loader import cyclic_order, sharded_cyclic_order, single_order


def flat(micro_batches):
    return [sample for micro_batch in micro_batches for sample in micro_batch]


@settings(max_examples=60, deadline=None)
@given(
    micro_batch_size=st.integers(1, 4),
    ranks=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    consumed=st.integers(0, 30),
    total=st.integers(0, 200),
)
def test_global_batches_are_consecutive_samples(micro_batch_size, ranks, accumulation, consumed, total):
    per_rank = [list(single_order(total, consumed, micro_batch_size, rank, ranks)) for rank in range(ranks)]
    global_batch_size = micro_batch_size * ranks * accumulation
    num_steps = len(per_rank[0]) // accumulation
    assert num_steps == max(0, total - consumed) // (micro_batch_size * ranks) // accumulation
    for step in range(num_steps):
        batch = flat(flat(part[step * accumulation : (step + 1) * accumulation] for part in per_rank))
        start = consumed + step * global_batch_size
        assert sorted(batch) == list(range(start, start + global_batch_size))


def test_each_rank_takes_its_contiguous_part():
    assert list(single_order(17, 1, 2, 1, 3)) == [[3, 4], [9, 10]]


def permutation(size, epoch):
    """Megatron's: seeded with the number of the epoch."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()


@settings(max_examples=60, deadline=None)
@given(
    micro_batch_size=st.integers(1, 4),
    ranks=st.integers(1, 6),
    consumed=st.integers(0, 90),
    total=st.integers(1, 40),
)
def test_cyclic_order_is_one_permutation_after_the_other(micro_batch_size, ranks, consumed, total):
    endless = flat(permutation(total, epoch) for epoch in range(8 + 90 // total + 400 // total))
    block = micro_batch_size * ranks
    samplers = [cyclic_order(total, consumed, micro_batch_size, rank, ranks) for rank in range(ranks)]
    for number, parts in enumerate(zip(*(islice(sampler, 5) for sampler in samplers), strict=True)):
        expected = endless[consumed + number * block : consumed + (number + 1) * block]
        assert list(parts) == [expected[rank::ranks] for rank in range(ranks)]


def test_sharded_cyclic_order_keeps_ranks_to_their_part():
    """Megatron's rule with --data-sharding: 23 samples, 2 ranks of 3: 3 blocks, buckets of 9, and 5 never read."""
    orders = [permutation(9, epoch) for epoch in range(3)]
    for rank in range(2):
        batches = list(islice(sharded_cyclic_order(23, 0, 3, rank, 2), 7))
        assert flat(batches) == [9 * rank + i for i in orders[0] + orders[1] + orders[2][:3]]
        resumed = sharded_cyclic_order(23, 18 + 6, 3, rank, 2)  # one block into the second epoch
        assert list(islice(resumed, 3)) == batches[4:7]
    assert [*sharded_cyclic_order(5, 0, 3, 0, 2), *cyclic_order(0, 0, 3, 0, 2)] == []
