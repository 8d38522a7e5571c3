"""A resumed run must go on in the order that it began in."""

import json

import pytest

from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.order import check_order
from tests.data.small_data import A, B


@pytest.fixture
def order(tmp_path):
    def order(num_samples, path=(A,), seed=1234, stable_order=False):
        options = SampleOptions(seq_length=128, seed=seed, stable_order=stable_order)
        counts = (num_samples, 0, 0)
        train = build_datasets(options, data_path=path, split="1", num_samples=counts, cache_path=str(tmp_path)).train
        return json.loads(json.dumps(train.order))

    return order


def test_the_same_order_is_accepted(order):
    check_order(order(100), order(257))
    check_order(order(480), order(510))
    check_order(order(257), order(900, stable_order=True))  # one epoch
    check_order(order(900, stable_order=True), order(257))
    blend = ("1", A, "2", B)
    check_order(order(100, blend), order(120, blend))
    check_order(order(100, blend, stable_order=True), order(900, blend, stable_order=True))


@pytest.mark.parametrize(("before", "after"), [(257, 258), (300, 500), (500, 900)])
def test_another_number_of_epochs_is_refused(order, before, after):
    with pytest.raises(ValueError, match="--data-order-stable"):
        check_order(order(before), order(after))
    with pytest.raises(ValueError, match="dataset 2 of the blend, not 1"):
        check_order(order(100, ("1", A, "9", B)), order(270, ("1", A, "9", B)))
    with pytest.raises(ValueError, match="--data-order-stable"):
        check_order(order(before), order(after), other_data=True)
    if before > 257:
        with pytest.raises(ValueError, match="takes any epochs"):
            check_order(order(before), order(after, stable_order=True))
    check_order(order(before), order(after, stable_order=True), other_data=True)


def test_other_data_is_refused_unless_asked_for(order):
    with pytest.raises(ValueError, match="the training data is not the checkpoint's"):
        check_order(order(100), order(50, (B,)))
    with pytest.raises(ValueError, match="--seed differ"):
        check_order(order(100), order(100, seed=1))
    with pytest.raises(ValueError, match="weights of the blend differ"):
        check_order(order(100, ("1", A, "1", B)), order(100, ("1", A, "2", B)))
    with pytest.raises(ValueError, match=r"(?s).bin file.*\(bin_sampled_sha256 [0-9a-f]+ there, 0 here\)"):
        check_order(order(100), order(100) | {"bin_sampled_sha256": "0"})
    older = {name: value for name, value in order(100).items() if name != "bin_sampled_sha256"}
    check_order(older, order(100))
    check_order(order(100), order(50, (B,)), other_data=True)
    check_order(order(100, ("1", A, "1", B)), order(100, ("1", A, "2", B)), other_data=True)
    check_order(order(100), order(100, seed=1), other_data=True)
