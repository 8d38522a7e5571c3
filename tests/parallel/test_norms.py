"""The trainer's norms and zeros in every layout: those of one rank."""

from __future__ import annotations

import pytest

from tests.parallel.layouts import results_on
from tests.training.small_run import NO_DROPOUT, flags, write_text

KEYS = ("lm loss", "grad-norm", "params-norm", "num-zeros")
UNTIED = "--untie-embeddings-and-output-weights"  # tokens that do not occur have gradients of zero then
LAYOUTS = {
    "tensor parallelism": "--tensor-model-parallel-size 2",
    "sequence parallelism": f"--tensor-model-parallel-size 2 --sequence-parallel {UNTIED}",
    "pipeline with tied embeddings": "--pipeline-model-parallel-size 2",
    "pipeline": f"--pipeline-model-parallel-size 2 {UNTIED}",
    "context parallelism": "--context-parallel-size 2",
    "replicas": f"--zero-stage 0 {UNTIED}",
    "shards": f"--zero-stage 3 {UNTIED}",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    data = write_text(tmp_path_factory.mktemp("data"))
    run = flags(data, NO_DROPOUT, "--log-params-norm --log-num-zeros-in-grad", length="--train-iters 1")
    one = results_on(1, {"tied": ("gpt", run), "untied": ("gpt", [*run, UNTIED])})
    runs = {name: ("gpt", [*run, *layout.split()]) for name, layout in LAYOUTS.items()}
    return one, results_on(2, runs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_are_those_of_one_rank(results, name):
    one, in_layouts = results
    expected = one["untied" if UNTIED in LAYOUTS[name] else "tied"][0]
    for key in KEYS:
        assert in_layouts[name][0][key] == pytest.approx(expected[key], rel=1e-6), key
    assert expected["grad-norm"][0] > 1.0 and (expected["num-zeros"][0] > 1000) == (UNTIED in LAYOUTS[name])
