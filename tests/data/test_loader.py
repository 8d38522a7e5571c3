"""Batches: masks, positions, document boundaries, padding, workers, resuming."""

import json
import os
import shutil
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.loader import build_loader, cyclic_order, make_batch, stack_samples
from megatron_zpp.data.order import check_order
from megatron_zpp.optim.batch_size import BatchSchedule
from tests.data.small_data import A, B, train_data


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return train_data(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def long_dataset(tmp_path_factory):
    return train_data(tmp_path_factory.mktemp("cache"), num_samples=600)


def loader_of(dataset, consumed_samples=0, rank=0, ranks=1, micro_batch_size=2, num_workers=0, **options):
    return build_loader(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        dp_rank=rank,
        dp_size=ranks,
        num_workers=num_workers,
        device="cpu",
        **options,
    )


def batch_of(*samples, **options):
    length = max(map(len, samples))
    ids = stack_samples([np.array(sample) for sample in samples], length)
    return make_batch(ids, SampleOptions(seq_length=length - 1, seed=1, eod=9, **options))


def test_labels_are_the_next_tokens():
    batch = batch_of([1, 2, 9, 3], [4, 9, 9, 5])
    assert batch.keys() == {"tokens", "labels", "loss_mask"}
    assert batch["tokens"].tolist() == [[1, 2, 9], [4, 9, 9]]
    assert batch["labels"].tolist() == [[2, 9, 3], [9, 9, 5]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert (batch["tokens"].dtype, batch["loss_mask"].dtype) == (torch.int64, torch.float32)


def test_masks_restart_behind_an_end_of_document():
    batch = batch_of(
        [1, 2, 9, 3, 4], [9, 9, 5, 6, 9], eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True
    )
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 1], [0, 0, 1, 1]]  # predicting the end itself still counts
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 5, 6, 8]
    assert (batch["position_ids"].dtype, batch["cu_seqlens"].dtype) == (torch.int64, torch.int32)


def test_padding_has_no_loss_and_spoils_no_other_sample():
    batch = batch_of([1, 2, 3], [4, 5, 6, 7, 9])
    assert batch["tokens"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch["labels"].tolist() == [[2, 3, 0, 0], [5, 6, 7, 9]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    first, second = batch_of([1, 2, 3, 0, 0]), batch_of([1, 2, 3], [0] * 5)
    assert first["loss_mask"].tolist() == [[1, 1, 1, 1]]  # a real token 0 is no padding
    assert batch_of([-3, 2, -1])["tokens"].tolist() == [[-3, 2]]  # nor is what a file of signed integers may hold
    second["loss_mask"][0] = 7
    assert second["loss_mask"][1].tolist() == [1, 1, 1, 1]  # masks are not shared


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(1, 4),
    micro_batch_size=st.integers(1, 3),
    start=st.integers(1, 3),
    stages=st.integers(0, 3),
    consumed_steps=st.integers(0, 4),
    dataloader_type=st.sampled_from(["single", "cyclic"]),
)
def test_any_layout_and_ramp_up_serves_the_same_global_batches(
    long_dataset, ranks, micro_batch_size, start, stages, consumed_steps, dataloader_type
):
    """Batch sizes grow by units of 12 samples, which every layout divides; a resumed run begins anywhere."""
    unit = 12
    ramp = (start * unit, unit, stages * 3 * unit) if stages else None
    # 4 ranks of 2 or 3 samples take more than a unit at a time: then half or a third as many micro-batches of 1.
    micro_batch_size = micro_batch_size if unit % (ranks * micro_batch_size) == 0 else 1
    schedule = BatchSchedule((start + stages) * unit, micro_batch_size, ranks, ramp)
    alone = BatchSchedule((start + stages) * unit, unit, 1, ramp)
    first = schedule.samples_after(consumed_steps)
    assert first == alone.samples_after(consumed_steps)
    options = {"dataloader_type": dataloader_type}
    loaders = [loader_of(long_dataset, first, rank, ranks, micro_batch_size, **options) for rank in range(ranks)]
    whole = loader_of(long_dataset, 0, micro_batch_size=unit, **options)
    for _ in range(first // unit):
        next(whole)
    consumed = first
    for _ in range(2):
        expected = [next(whole)["tokens"] for _ in range(alone.num_micro_batches(consumed))]
        parts = [next(loader)["tokens"] for loader in loaders for _ in range(schedule.num_micro_batches(consumed))]
        assert sorted(torch.cat(parts).tolist()) == sorted(torch.cat(expected).tolist())
        consumed += schedule.global_batch_size(consumed)


def test_single_order_is_the_datasets(dataset):
    tokens = torch.cat([batch["tokens"] for batch in islice(loader_of(dataset), 12)])  # [24, 128]
    assert np.array_equal(tokens, np.stack([dataset[i][:-1] for i in range(24)]))
    parts = [next(loader_of(dataset, consumed_samples=8, rank=rank, ranks=4))["tokens"] for rank in range(4)]
    assert torch.equal(torch.cat(parts), tokens[8:16])


def test_workers_give_the_same_batches_and_leave_random_state_alone(dataset):
    state = torch.get_rng_state()
    with_workers = list(islice(loader_of(dataset, num_workers=2), 5))
    assert torch.equal(torch.get_rng_state(), state)  # or a resumed run would have other dropout
    for expected, batch in zip(loader_of(dataset), with_workers, strict=False):
        assert batch.keys() == {"tokens", "labels", "loss_mask"}
        assert all(torch.equal(batch[key], expected[key]) for key in batch)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_is_cut_is_named_in_one_line(tmp_path, num_workers):
    for suffix in (".bin", ".idx"):
        shutil.copy(A + suffix, tmp_path)
    dataset = train_data(tmp_path, path=[str(tmp_path / "a")])
    os.truncate(tmp_path / "a.bin", 1000)
    with pytest.raises(ValueError, match=r"^\S+/a\.bin holds 1000 bytes, and held 65930 when it was opened: [^\n]*$"):
        next(loader_of(dataset, num_workers=num_workers))


def test_running_out_of_samples_is_an_error(dataset):
    batches = loader_of(dataset, consumed_samples=250)  # 257 in all
    assert len(list(islice(batches, 3))) == 3
    with pytest.raises(ValueError, match="out of data: the dataset has 257 samples"):
        next(batches)


def flat(micro_batches):
    return [sample for micro_batch in micro_batches for sample in micro_batch]


def permutation(size, epoch):
    """Megatron's: seeded with the number of the epoch."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()


@settings(max_examples=30, deadline=None)
@given(
    micro_batch_size=st.integers(1, 4), ranks=st.integers(1, 6), consumed=st.integers(0, 90), total=st.integers(1, 40)
)
def test_cyclic_order_is_one_permutation_after_the_other(micro_batch_size, ranks, consumed, total):
    endless = flat(permutation(total, epoch) for epoch in range(8 + 90 // total + 400 // total))
    block = micro_batch_size * ranks
    samplers = [cyclic_order(total, consumed, micro_batch_size, rank, ranks) for rank in range(ranks)]
    for number, parts in enumerate(zip(*(islice(sampler, 5) for sampler in samplers), strict=True)):
        expected = endless[consumed + number * block : consumed + (number + 1) * block]
        assert list(parts) == [expected[rank::ranks] for rank in range(ranks)]


@pytest.fixture
def order(tmp_path):
    def order(num_samples, path=(A,), seed=1234):
        train = train_data(tmp_path, num_samples, path, seed=seed)
        return json.loads(json.dumps(train.order))

    return order


def test_the_same_order_is_accepted(order):
    check_order(order(100), order(257))
    check_order(order(480), order(510))
    check_order(order(257) | {"epochs": "any"}, order(100))  # saved when epochs could be shuffled alone
    blend = ("1", A, "2", B)
    check_order(order(100, blend), order(120, blend))


@pytest.mark.parametrize(("before", "after"), [(257, 258), (300, 500), (500, 900)])
def test_another_number_of_epochs_is_refused(order, before, after):
    with pytest.raises(ValueError, match="give --override-data"):
        check_order(order(before), order(after))
    with pytest.raises(ValueError, match="dataset 2 of the blend, not 1"):
        check_order(order(100, ("1", A, "9", B)), order(270, ("1", A, "9", B)))
    check_order(order(before), order(after), other_data=True)


def test_other_data_is_refused_unless_asked_for(order):
    with pytest.raises(ValueError, match="the training data is not the checkpoint's"):
        check_order(order(100), order(50, (B,)))
    with pytest.raises(ValueError, match="--seed differ"):
        check_order(order(100), order(100, seed=1))
    with pytest.raises(ValueError, match="weights of the blend differ"):
        check_order(order(100, ("1", A, "1", B)), order(100, ("1", A, "2", B)))
    with pytest.raises(ValueError, match=r"its files, .*\(bin_sampled_sha256 [0-9a-f]+ there, 0 here\)"):
        check_order(order(100), order(100) | {"bin_sampled_sha256": "0"})
    older = {name: value for name, value in order(100).items() if name != "bin_sampled_sha256"}
    check_order(older, order(100))
    check_order(order(100), order(50, (B,)), other_data=True)
    check_order(order(100, ("1", A, "1", B)), order(100, ("1", A, "2", B)), other_data=True)
    check_order(order(100), order(100, seed=1), other_data=True)
