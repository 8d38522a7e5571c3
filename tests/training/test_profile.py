"""Profiles of a run's steps, and the time that its log says was waited for links."""

import gzip
import json
from collections import Counter

import pytest

from tests.ranks import run_ranks
from tests.training.small_run import call_pretrain, flags, log_lines, start, train_quietly

TWO_NODES = "--zero-quantized-weights --zero-quantized-gradients --zeropp-ranks-per-node 1 --log-interval 2"
PROFILED = "--profile --use-pytorch-profiler --profile-step-start 2"


def logged(argv: list[str]):
    """The lines and the points of a run."""
    run, metrics = start(argv)
    return log_lines(train_quietly(run)), metrics


def test_profiled_steps_have_a_trace_with_names(data, tmp_path):
    argv = flags(
        data, f"{TWO_NODES} {PROFILED} --profile-step-end 4 --profile-ranks 1 --profile-dir {tmp_path}/traces",
        length="--train-iters 6",
    )  # fmt: skip
    lines, metrics = run_ranks(2, logged, argv)[1]
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "rank00001.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = Counter(event["name"] for event in events if " nodes: " in event["name"])
    assert {name for name in names if "layers.0" in name} == {
        "gather between nodes: layers.0",
        "reduce between nodes: layers.0",
        "reduce within nodes: layers.0",
    }
    assert names["reduce between nodes: layers.0"] == 2  # steps 3 and 4
    for link in ("between", "within"):
        waited = [line[f"waited {link} nodes per step (ms)"] for line in lines]
        points = metrics[f"comm/seconds-waited-{link}-nodes"]
        assert [1000 * seconds for seconds in points] == pytest.approx(waited, abs=0.051) and len(waited) == 4
    assert min(metrics["comm/seconds-waited-between-nodes"]) > 0


def test_a_profile_ends_with_the_run(data, tmp_path):
    run_ranks(1, logged, flags(data, f"{PROFILED} --save {tmp_path}/run --save-interval 3", length="--train-iters 3"))
    trace = tmp_path / "run" / "profile" / "rank00000.trace.json.gz"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_what_cannot_be_recorded_is_refused(data):
    argvs = [
        flags(data, PROFILED, length="--train-iters 3"),
        flags(data, "--profile --record-memory-history --profile-dir x", length="--train-iters 3"),
        flags(data, "--profile", length="--train-iters 3"),
    ]
    (_, _, nowhere), (_, _, history), (code, out, err) = run_ranks(1, call_pretrain, *argvs)[0]
    assert nowhere.startswith("error: --profile needs a place for its files: give --profile-dir")
    assert history.startswith("error: --record-memory-history needs a GPU")
    assert code == 0 and "note: --profile alone is for Nsight Systems" in out + err
