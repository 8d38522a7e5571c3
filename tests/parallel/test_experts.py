"""Mixtures of experts in every layout that takes them: training equals one rank's, and goes on after a resume."""

from __future__ import annotations

import pytest

from tests.parallel.layouts import EPS, assert_same, results_on
from tests.training.small_run import flags, write_text

SHAPE = (
    "--num-layers 4 --num-experts 4 --moe-ffn-hidden-size 40 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.001 "
    "--micro-batch-size 2"
)
SHARED = "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 24"
CAPACITY = "--moe-expert-capacity-factor 1.0"
UNQUANTIZED = "--zero-quantized-gradients --zero-gradient-bits 0 --zero-gradient-intra-bits 0"
QUANTIZED = (
    "--bf16 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco "
    "--zero-weight-difference-bits 4"
)
ON_ONE = {"": "", "recomputed": "--recompute-granularity full", "emulated": "--emulate-ranks 4 --emulate-nodes 2"}
ON_FOUR = {
    "dp 4": "",
    "stage 1, per token": "--zero-stage 1 --calculate-per-token-loss",
    "hierarchy": f"--zero-hpz-partition-size 2 {UNQUANTIZED}",
}
ON_TWO = {
    "pp": "--pipeline-model-parallel-size 2",
    "pp, recomputed": "--pipeline-model-parallel-size 2 --recompute-granularity full",
    "zero-bubble": "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble "
    "--num-layers-per-virtual-pipeline-stage 1",
}
LOSSES = ("load balancing loss", "router z-loss")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def runs(data: str, of: dict[str, str], length: str = "--train-iters 6") -> dict:
    common = f"{SHAPE} {EPS} --log-params-norm --lr-decay-style constant"
    return {name: ("llama", flags(data, common, more, length=length)) for name, more in of.items()}


@pytest.mark.long
def test_training_equals_one_rank(data):
    of_one = results_on(1, runs(data, ON_ONE))
    expected = of_one[""]
    for name, result in {**of_one, **results_on(2, runs(data, ON_TWO)), **results_on(4, runs(data, ON_FOUR))}.items():
        assert_same(result, expected, name)
        for key in (*LOSSES, "router entropy"):
            assert result[0][key] == pytest.approx(expected[0][key], rel=1e-5), f"{name}, {key}"
        assert result[0]["expert load (max/mean)"] == pytest.approx(expected[0]["expert load (max/mean)"], rel=1e-6)


def test_quantized_ranks_equal_emulated_ones(data):
    real = results_on(4, runs(data, {"": f"{QUANTIZED} {SHARED} {CAPACITY}"}))[""]
    emulated = results_on(1, runs(data, {"": f"{QUANTIZED} {SHARED} {CAPACITY} --emulate-ranks 4 --emulate-nodes 2"}))[
        ""
    ]
    assert real[0]["lm loss"] == emulated[0]["lm loss"]
    assert all(0 < share < 0.5 for share in real[0]["dropped tokens (share)"])


def test_a_resume_on_other_ranks_goes_on(data, tmp_path):
    save, load = f"--save {tmp_path} --save-interval 3 --no-async-save", f"--load {tmp_path}"
    whole = results_on(1, runs(data, {"": SHARED}))[""]
    results_on(2, runs(data, {"": f"{SHARED} {save}"}, length="--train-iters 3"))
    resumed = results_on(4, runs(data, {"": f"{SHARED} {load} --override-data"}))[""]
    assert len(resumed[0]["lm loss"]) == 3
    assert_same(resumed, whole, "resumed")
