"""--emulate-ranks through the trainer: the same command line in one process and on real ranks."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from tests.training.small_run import call_pretrain, flags, start, train_each, write_text

EMULATE = "--emulate-ranks 4 --emulate-nodes 2"
ALL_FLAGS = (
    "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco "
    "--zero-weight-block-size 64 --zero-gradient-block-size 32 --zero-monitor-interval 1"
)
NOISE = "--zero-weight-rounding stochastic --zero-gradient-rounding stochastic --zero-weight-difference-bits 4"
# Eight steps of two micro-batches a rank, an evaluation in between; without clipping, whose norm is added up otherwise.
RUNS = {
    "all flags": f"{ALL_FLAGS} --eval-interval 3",
    "noise": f"{ALL_FLAGS} {NOISE} --recompute-activations --dataloader-type cyclic",
    "fp16": f"{ALL_FLAGS} --fp16 --initial-loss-scale 67108864 --hysteresis 1",
    "stage 2": "--zero-stage 2 --zero-quantized-gradients --zero-ranks-per-node 2 --bf16 --calculate-per-token-loss",
}
METRICS = ("lm loss", "lm loss validation", "bytes between nodes", "bytes within nodes", "loss-scale")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data"))


def both(data, runs, architecture):
    argv = {name: flags(data, "--clip-grad 0", more) for name, more in runs.items()}
    real = run_ranks(4, train_each, argv, architecture)[3]
    emulated = run_ranks(1, train_each, {name: [*one, *EMULATE.split()] for name, one in argv.items()}, architecture)[0]
    return real, emulated


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_logs_what_real_ranks_log(data, architecture):
    real, emulated = both(data, RUNS, architecture)
    for name in RUNS:
        assert len(real[name]["lm loss"]) == 8
        for key in sorted(real[name]):
            print(name, key, real[name][key][:3], emulated[name].get(key, [])[:3])
        assert emulated[name]["lm loss"] == real[name]["lm loss"], name
        assert emulated[name]["lm loss validation"] == real[name]["lm loss validation"], name
