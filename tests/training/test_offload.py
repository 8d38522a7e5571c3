"""What waits in host memory, where that is the memory of the device anyway: nothing else changes."""

from __future__ import annotations

from tests.ranks import run_ranks
from tests.training.small_run import flags, train_each, write_text

RUN = "--zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1 --bf16"
OFFLOADED = {
    "nothing": "",
    "parameters, gradients and optimizer": "--cpu-offload",
    "gradients' sums": "--zeropp-offload-gradient-sums",
    "both": "--cpu-offload --zeropp-offload-gradient-sums",
}


def test_offloading_changes_no_result(tmp_path):
    data = write_text(tmp_path)
    runs = {name: flags(data, RUN, more, length="--train-iters 3") for name, more in OFFLOADED.items()}
    for of_rank in run_ranks(2, train_each, runs):
        expected = of_rank["nothing"]
        assert len(expected["lm loss"]) == 3
        for name, metrics in of_rank.items():
            for key in ("lm loss", "grad-norm"):
                assert metrics[key] == expected[key], name
