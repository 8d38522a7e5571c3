"""Log lines, as published tools read Megatron's, and of several steps against single ones; profiles; the monitor."""

import contextlib
import gzip
import io
import json
import math
import re
import time
from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest

from megatron_zpp.checkpoint import CheckpointSaver
from megatron_zpp.commands.pretrain import describe
from megatron_zpp.training import reporter
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import call_pretrain, flags, log_lines, start, take_step, train_quietly

STEPS, SEQ_LENGTH, RANKS = 10, 32, 2
NAN, SPIKE = 5, 7  # steps
IN_EVALUATION, IN_STEP = 0.5, 0.02  # seconds of sleep, at least


def _logged(argvs: dict[str, list[str]]):
    """What each run printed and wrote, and how long it took."""
    results = {}
    for name, argv in argvs.items():
        run, metrics = start(argv)

        def hook(model, inputs, losses, run=run):
            time.sleep(IN_STEP if model.training else IN_EVALUATION)
            step = run.counters.iteration + 1
            return losses * ({NAN: math.nan, SPIKE: 4.0}.get(step, 1.0) if model.training else 1.0)

        run.model.register_forward_hook(hook)
        begin = time.monotonic()
        lines = log_lines(train_quietly(run))
        flops = run.architecture.flops_per_token(run.model.config, SEQ_LENGTH)
        results[name] = lines, metrics, time.monotonic() - begin, flops
    return results


def _logged_seconds(argv: list[str]) -> list[float]:
    """Return the logged seconds of each step, on a clock that only forward passes and saves move."""
    run, _ = start(argv)
    clock, save = [0.0], CheckpointSaver.save

    def hook(model, inputs, losses):
        clock[0] += 1.0 if model.training else 100.0

    def slow_save(*arguments):
        clock[0] += 1000.0
        save(*arguments)

    run.model.register_forward_hook(hook)
    now = patch.object(reporter, "perf_counter", lambda: clock[0])
    with now, patch.object(CheckpointSaver, "save", slow_save):
        lines = log_lines(train_quietly(run))
    return [line["elapsed time per iteration (ms)"] / 1000 for line in lines]


def test_evaluations_and_saves_are_no_time_of_training(data, tmp_path):
    argv = flags(data, f"--eval-interval 1 --split 9,1,0 --save {tmp_path} --save-interval 2 --train-iters 4")
    argv += ["--global-batch-size", "2"]
    assert run_ranks(1, _logged_seconds, argv)[0] == [2.0] * 4  # micro-batches of a step


def _described(argv: list[str]) -> str:
    """What a run prints on this rank, with its description."""
    run, _ = start(argv)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        describe(run)
    return out.getvalue() + train_quietly(run)


def test_a_run_on_one_node_says_what_two_nodes_would_send(data):
    argv = flags(data, "--train-iters 2")
    (one, _), (_, two) = run_in_turn(
        2, {nodes: partial(_described, [*argv, "--zeropp-ranks-per-node", nodes]) for nodes in "21"}
    ).values()
    (said,) = re.findall(r"^nothing crosses nodes: .*nodes of 1 ranks would send about ([\d.]+) MB", one, re.MULTILINE)
    assert float(said) == log_lines(two)[-1]["sent between nodes per step (MB)"] > 0


@pytest.mark.long
def test_a_line_over_several_steps_is_made_of_theirs(data):
    common = (
        "--zero-quantized-weights --zero-quantized-gradients --zeropp-ranks-per-node 1 --rampup-batch-size 2 2 24 "
        "--eval-interval 4 --eval-iters 1 --split 9,1,0 --loss-spike-factor 2 --log-params-norm "
        "--log-num-zeros-in-grad --log-throughput --peak-tflops 2"
    )
    argvs = {name: flags(data, common, f"--log-interval {name}", length=f"--train-iters {STEPS}") for name in "13"}
    results = run_ranks(RANKS, _logged, argvs)
    assert all(of_rank["3"][0] == [] for of_rank in results[:-1])  # the last rank prints
    (single, single_metrics, _, _), (lines, metrics, seconds, flops) = (results[-1][name] for name in "13")
    assert [line["iteration"] for line in single] == [*range(1, STEPS + 1)]
    assert [line["iteration"] for line in lines] == [1, 3, 6, 9]
    sizes = [2, 2, 2, 2, 4, 4, 6, 6, 8, 8]

    def column(of_lines, name):
        return [line[name] for line in of_lines]

    assert column(single, "global batch size") == sizes == single_metrics["batch-size"] == metrics["batch-size"]
    assert column(single, "number of skipped iterations") == [float(n in (NAN, SPIKE)) for n in range(1, STEPS + 1)]
    assert column(single, "number of nan iterations") == [float(n == NAN) for n in range(1, STEPS + 1)]
    losses = single_metrics["lm loss"]  # each step's own, in both runs
    assert math.isnan(losses[NAN - 1]) and losses[SPIKE - 1] > 2 * losses[0]
    assert metrics["lm loss"] == pytest.approx(losses, rel=0, nan_ok=True)
    assert metrics["world-size"] == [RANKS] * STEPS

    begin = 0
    for i, line in enumerate(lines):
        end = int(line["iteration"])
        steps, taken = range(begin, end), [step for step in range(begin, end) if step + 1 not in (NAN, SPIKE)]
        assert line["lm loss"] == pytest.approx(sum(losses[step] for step in taken) / len(taken), rel=1e-6)
        assert line["number of skipped iterations"] == len(steps) - len(taken)
        assert line["number of nan iterations"] == (NAN - 1 in steps)
        for name in ("learning rate", "global batch size", "consumed samples", "grad norm", "params norm", "num zeros"):
            assert line[name] == pytest.approx(single[end - 1][name], nan_ok=True), name
        for where in ("between", "within"):
            name, key = f"sent {where} nodes per step (MB)", f"comm/bytes-{where}-nodes"
            sent = sum(single_metrics[key][begin:end]) / len(steps)
            assert metrics[key][i] == pytest.approx(sent)
            assert line[name] == pytest.approx(sent / 1e6, abs=6e-4)
        # Times are each run's own, but belong together.
        per_step, per_second = metrics["iteration-time"][i], metrics["tokens-per-second"][i]
        assert per_second * per_step * len(steps) == pytest.approx(sum(sizes[begin:end]) * SEQ_LENGTH)
        assert per_step * len(steps) >= IN_STEP * sum(sizes[begin:end]) / RANKS
        assert line["elapsed time per iteration (ms)"] == pytest.approx(1000 * per_step, abs=0.06)
        assert line["tokens per second"] == pytest.approx(per_second, abs=0.6)
        assert metrics["throughput"][i] == pytest.approx(per_second / RANKS * flops / 1e12)
        assert metrics["mfu"][i] == pytest.approx(metrics["throughput"][i] / 2)
        begin = end
    assert single[0]["sent between nodes per step (MB)"] > 0
    # Evaluations, two between the lines and one after them, are in no line.
    logged = sum(time * count for time, count in zip(metrics["iteration-time"], (1, 2, 3, 3), strict=True))
    assert logged < seconds - 3 * IN_EVALUATION


def _monitored(argv: list[str]):
    """This rank's sums of a step, and what the monitor makes of all ranks'."""
    run, _ = start(argv)
    take_step(run)
    sums = {(*key, unit.name): value.tolist() for unit in run.zeropp.units for key, value in unit.samples.items()}
    return sums, run.zeropp.quantization_errors()


def test_the_monitor_adds_up_the_parts_of_tensor_parallel_ranks(data):
    more = "--zero-quantized-weights --zero-quantized-gradients --zeropp-loco --zeropp-monitor-interval 1"
    argv = flags(data, more, "--tensor-model-parallel-size 2 --zeropp-ranks-per-node 1 --global-batch-size 4")
    results = run_ranks(4, _monitored, argv)
    sums, values = [of_rank[0] for of_rank in results], results[0][1]
    assert all(of_rank[1] == values for of_rank in results)
    assert len({str(of_rank) for of_rank in sums}) == 4  # each has a part of its own
    keys = {(statistic, what) for statistic, what, _ in sums[0]}
    assert {statistic for statistic, _ in keys} >= {"error", "largest-codes", "error-state", "nonfinite-blocks"}
    for statistic, what in keys:
        units = [key for key in sums[0] if key[:2] == (statistic, what)]
        rows = [("", units), *((f"/{key[2] or 'root'}", [key]) for key in units)]
        for name, chosen in rows:
            first, second = (sum(of_rank[key][i] for of_rank in sums for key in chosen) for i in (0, 1))
            expected = first if statistic == "nonfinite-blocks" else first / second
            expected = math.sqrt(expected) if statistic in ("error", "error-state") and second else expected
            assert values[f"{statistic}/{what}{name}"] == pytest.approx(expected, rel=1e-4), (statistic, what, name)


TWO_NODES = "--zero-quantized-weights --zero-quantized-gradients --zeropp-ranks-per-node 1 --log-interval 2"
PROFILED = "--profile --use-pytorch-profiler --profile-step-start 2"


def logged(argv: list[str]):
    """The lines and the points of a run."""
    run, metrics = start(argv)
    return log_lines(train_quietly(run)), metrics


def test_profiled_steps_have_a_trace_with_names(data, tmp_path):
    argv = flags(
        data, f"{TWO_NODES} {PROFILED} --profile-step-end 4 --profile-ranks 1 --tensorboard-dir {tmp_path}/traces",
        length="--train-iters 6",
    )  # fmt: skip
    lines, metrics = run_ranks(2, logged, argv)[1]
    (trace,) = (tmp_path / "traces").glob("rank*")
    assert trace.name == "rank00001.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = Counter(event["name"] for event in events if " nodes: " in event["name"])
    assert {name for name in names if "layers.0" in name} == {
        "gather between nodes: layers.0",
        "reduce between nodes: layers.0",  # and none within a node of one rank
    }
    assert names["reduce between nodes: layers.0"] == 2  # steps 3 and 4
    for link in ("between", "within"):
        waited = [line[f"waited {link} nodes per step (ms)"] for line in lines]
        points = metrics[f"comm/seconds-waited-{link}-nodes"]
        assert [1000 * seconds for seconds in points] == pytest.approx(waited, abs=0.051) and len(waited) == 4
    assert min(metrics["comm/seconds-waited-between-nodes"]) > 0


def test_a_profile_ends_with_the_run(data, tmp_path):
    run_ranks(1, logged, flags(data, f"{PROFILED} --save {tmp_path}/run --save-interval 3 --train-iters 3"))
    trace = tmp_path / "run" / "profile" / "rank00000.trace.json.gz"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def test_what_cannot_be_recorded_is_refused(data):
    argvs = [flags(data, PROFILED, length="--train-iters 3"), flags(data, "--profile", length="--train-iters 3")]
    (_, _, nowhere), (code, out, err) = run_ranks(1, call_pretrain, *argvs)[0]
    assert nowhere.startswith("error: --profile needs a place for its files: give --tensorboard-dir")
    assert code == 0 and "note: --profile alone is for Nsight Systems" in out + err
