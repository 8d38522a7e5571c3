"""--optimizer muon on several ranks, however they are divided, trains as on one."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags, train_each, write_text

LAYOUTS = {
    "pipeline": "--pipeline-model-parallel-size 2",
    "context": "--context-parallel-size 2",
    "replicas": "--num-distributed-optimizer-instances 2 --zeropp-ranks-per-node 2",
    "stage 1": "--zero-stage 1 --zeropp-ranks-per-node 2",
}


@pytest.mark.long
def test_training_equals_one_rank(tmp_path):
    data = write_text(tmp_path)
    common = f"{NO_DROPOUT} --optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2 --train-iters 4"
    whole = train_each_on(1, {"one rank": flags(data, common)})["one rank"]
    adamw = train_each_on(1, {"": flags(data, NO_DROPOUT, "--train-iters 4")})[""]
    results = train_each_on(4, {name: flags(data, common, layout) for name, layout in LAYOUTS.items()})
    # Sums are taken in another order, and orthogonalization rounds what that changes to bf16.
    tolerance = 2e-4
    for name, metrics in results.items():
        assert metrics["lm loss"] == pytest.approx(whole["lm loss"], abs=tolerance), name
    assert abs(adamw["lm loss"][-1] - whole["lm loss"][-1]) > 10 * tolerance


def train_each_on(ranks: int, runs: dict[str, list[str]]) -> dict[str, dict[str, list[float]]]:
    return run_ranks(ranks, train_each, runs, timeout=500)[-1]
