"""What happens to a job when a rank dies, hangs, or computes NaN: real processes, real signals."""

import io
import os
import re
import signal
import socket
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.checkpoint import read_meta
from megatron_zpp.commands.diagnose import why_hung
from megatron_zpp.metrics.history import METRICS, read_run
from megatron_zpp.parallel.distributed import FailedTogether
from megatron_zpp.training.nonfinite import NotFiniteError
from tests.ranks import run_ranks
from tests.training.small_run import (
    NO_DROPOUT,
    call_pretrain,
    ended,
    flags,
    ranks_of,
    start,
    torchrun,
    train_each,
    train_quietly,
    wait_for_iteration,
)

# A rank dies


HAS_A_BUG = """
import os
from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.optim.batch_size import BatchSchedule

def broken(self, consumed):
    raise AssertionError("planted")

if os.environ["RANK"] == "1":
    BatchSchedule.num_micro_batches = broken
main(GPT)
"""


def test_a_bug_on_one_rank_is_named_with_its_traceback(data, tmp_path):
    (script := tmp_path / "train.py").write_text(HAS_A_BUG)
    _, err = ended(torchrun(2, flags(data), str(script)), status=1)
    report = err[err.index("Root Cause (first observed failure)") :]
    assert "rank      : 1 (local_rank: 1)" in report and f"rank 1 on {socket.gethostname()} failed" in report
    assert "in broken" in report and "AssertionError: planted" in report  # the traceback


@pytest.mark.long
def test_torchrun_brings_the_job_back_from_its_last_checkpoint(data, tmp_path):
    argv = flags(data, "--eval-iters 0", length="--train-iters 30")
    expected = run_ranks(2, train_each, {"": argv})[0][""]["lm loss"]
    save = f"--save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-interval 3 --tensorboard-dir {tmp_path / 'log'}"
    process = torchrun(2, [*argv, *save.split()], launcher=["--max-restarts", "3"])
    wait_for_iteration(process, 7)
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    out, _ = ended(process)
    assert re.search(r"successfully loaded checkpoint \S+ at iteration [369]", out)
    read = "".join(f"iteration {step}/" for step in range(1, 8))  # by ``wait_for_iteration``
    assert 0 < steps_lost(read + out) <= 6  # the interval's steps, and the unfinished save's
    last = re.findall(r"iteration +30/ +30 .* lm loss: (\S+)", out)
    assert last == [f"{expected[-1]:.6E}"]
    assert read_run("run", tmp_path / "log" / METRICS).metrics["lm loss"] == dict(enumerate(expected, start=1))


def steps_lost(out: str) -> int:
    """Count the steps that a job logged twice, because it had to do them again."""
    times = Counter(re.findall(r"iteration +(\d+)/", out))
    return len([number for number, count in times.items() if count > 1])


# A rank hangs


@pytest.mark.long
@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2"])
def test_a_stuck_collective_is_named(data, tmp_path, capsys, monkeypatch, layout):
    argv = flags(
        data,
        f"{layout} --distributed-timeout-minutes 0.1 --save {tmp_path} --save-interval 10000",
        length="--train-iters 100000",
    )
    process = torchrun(2, argv, warm=False)
    wait_for_iteration(process, 3)
    stopped = ranks_of(process)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        lines = iter(process.stderr.readline, "")
        error = next(line for line in lines if line.startswith("error: rank 0"))
    finally:
        os.kill(stopped, signal.SIGKILL)
    ended(process, status=1)
    assert re.search(
        r"failed in (the (all-gather|reduce-scatter) of (layers\.\d|the root module)|\w+ of \w+ \(\w+.py)", error
    )
    assert "imed out" in error
    monkeypatch.setattr(sys, "argv", ["why-hung", str(tmp_path)])
    assert why_hung.main() == 0
    said = capsys.readouterr().out
    assert re.search(r"^rank 0 waited in gloo:\w+, .*, of \[.*\]: number \d+ of ranks 0, 1$", said, re.MULTILINE)
    assert "  rank 1 is missing, and left no record: it was stopped, or died, before" in said


# NaN and Inf


def _train_with_nan(argv: list[str], plant) -> tuple[str, str, int]:
    """Return the output, the error, and the number of steps; ``plant`` spoils the model or the data of a rank."""
    run, metrics = start(argv)
    plant(run)
    out, error = io.StringIO(), ""
    try:
        train_quietly(run, out)
    except (NotFiniteError, FailedTogether) as caught:
        error = str(caught)
    return out.getvalue(), error, len(metrics.get("lm loss", []))


def _spoil_parameter(run) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            run.model.layers[1].mlp.linear_fc1.weight.to_local()[0, 0] = float("nan")


def _spoil_output(run) -> None:
    """Inf in one sample of rank 1, from the second block on."""
    if dist.get_rank() == 1:
        run.model.layers[1].mlp.linear_fc2.register_forward_hook(lambda module, inputs, output: output / 0)


def _spoil_gradient(run) -> None:
    if dist.get_rank() == 0:

        def hook(module, inputs, output):
            output.register_hook(lambda gradient: gradient * float("inf"))

        run.model.layers[0].mlp.linear_fc1.register_forward_hook(hook)


def _spoil_parameter_in_last_step(run) -> None:
    """Its loss is finite, and so are its gradients."""

    def hook(optimizer, args, kwargs):
        if run.counters.iteration == run.train_iters - 1:
            _spoil_parameter(run)

    run.optimizer.register_step_post_hook(hook)


def _spoil_evaluation(run) -> None:
    run.model.register_forward_hook(lambda model, inputs, output: output if model.training else output / 0)


def _spoil_nothing(run) -> None:
    pass


def _spoil_loss_scale(run) -> None:
    run.scaler.scale = float("inf")


def _spoil_steps_2_and_4(run) -> None:
    calls = []

    def hook(module, inputs, output):
        calls.append(1)
        return output * float("nan") if len(calls) in (2, 5) and dist.get_rank() == 0 else None

    run.model.layers[0].register_forward_hook(hook)


ORIGINS = {
    _spoil_parameter: "it began in the parameter layers.1.mlp.linear_fc1.weight (the part of rank 1 on",
    _spoil_output: "it began in the output of layers.1.mlp.linear_fc2 on rank 1 on",
    _spoil_gradient: "it began in the gradient that reached the output of layers.0.mlp.linear_fc1 on rank 0 on",
}


def _train_each_with_nan(cases):
    return [_train_with_nan(argv, plant) for argv, plant in cases]


def test_nan_stops_after_some_steps_with_a_saved_state_and_its_origin(data, tmp_path):
    common = "--global-batch-size 2 --max-nonfinite-steps 3 --save-interval 100 --save"
    cases = [(flags(data, common, f"{tmp_path / plant.__name__}"), plant) for plant in ORIGINS]
    results = run_ranks(2, _train_each_with_nan, cases)[0]
    for (plant, where), (out, error, steps) in zip(ORIGINS.items(), results, strict=True):
        assert steps == 3 and "3 steps in a row, up to iteration 3, had NaN or Inf" in error and where in error
        assert f"saved in {tmp_path / plant.__name__}" in error
        assert out.count("the step was skipped") == 1
        meta = read_meta(tmp_path / plant.__name__ / "iter_0000003")
        assert ("the loss" not in meta["nonfinite"]) == (plant is _spoil_gradient) == (meta["loss"] is not None)
        counters = meta["counters"]
        assert counters["skipped_iterations"] == 3 and counters["consumed_train_samples"] == 6
        assert counters["scheduled_samples"] == 0


def _spoil_attention(run) -> None:
    """Between two layers: no layer of this model computes it."""
    if dist.get_rank() == 0:
        run.model.layers[0].self_attention.register_forward_hook(lambda module, inputs, output: output * float("nan"))


def _spoil_half_a_matrix(run) -> None:
    """On the first rank of two that share a matrix; the other one gets what both add up."""
    if dist.get_rank() == 0:
        run.model.layers[0].mlp.linear_fc1.register_forward_hook(lambda module, inputs, output: output * float("nan"))


def _spoil_sum_of_gradients(run) -> None:
    """As an overflow does: gradients of outputs stay finite."""

    def hook(module, inputs):  # here the weight is the gathered one
        module.weight.register_hook(lambda gradient: gradient * float("inf"))

    if dist.get_rank() == 0:
        run.model.layers[1].mlp.linear_fc1.register_forward_pre_hook(hook)


def _spoil_at_first_loss_scale(run) -> None:
    first = run.scaler.scale

    def hook(module, inputs, output):
        output.register_hook(lambda gradient: gradient / (run.scaler.scale != first))

    if dist.get_rank() == 0:
        run.model.layers[0].mlp.linear_fc1.register_forward_hook(hook)


def test_where_nan_began_no_clean_place_is_blamed(data):
    """Neither the layer that came after, nor a rank that received it, nor a passing fault of the machine."""
    fc1 = "layers.0.mlp.linear_fc1 on rank 0 on"
    rows = [
        (_spoil_attention, "", "it began in the input of layers.0."),
        (_spoil_half_a_matrix, "--tensor-model-parallel-size 2", f"it began in the output of {fc1}"),
        (_spoil_sum_of_gradients, "", "it began in the gradient of the parameter layers.1.mlp.linear_fc1"),
        (
            _spoil_at_first_loss_scale,
            "--fp16 --hysteresis 1 --initial-loss-scale 256",
            f"it began in the gradient that reached the output of {fc1}",
        ),
    ]
    common = "--global-batch-size 2 --max-nonfinite-steps 1 --no-save-optim"
    cases = [(flags(data, common, more), plant) for plant, more, _ in rows]
    for (plant, _, began), (_, error, steps) in zip(rows, run_ranks(2, _train_each_with_nan, cases)[0], strict=True):
        assert steps == 1 and began in error and "rank 1" not in error, (plant, error)


def test_an_evaluation_of_nan_during_training_says_what_it_is_of(data):
    argv = flags(data, "--global-batch-size 2 --eval-interval 1 --eval-iters 1 --no-check-for-nan-in-loss-and-grad")
    cases = [([*argv, "--train-iters", "2"], plant) for plant in (_spoil_evaluation, _spoil_parameter)]
    (finite, _, _), (spoiled, _, _) = run_ranks(2, _train_each_with_nan, cases)[0]
    note = "note: the loss on the validation set is"
    assert f"{note} inf after iteration 1, and the parameters are finite: look at the data" in finite
    assert f"{note} nan after iteration 1, and NaN or Inf is in the parameter layers.1.mlp.linear_fc1" in spoiled


def test_single_nan_steps_are_skipped_and_counted(data):
    argv = flags(data, NO_DROPOUT, "--global-batch-size 2 --max-nonfinite-steps 2 --train-iters 6")
    (out, error, steps), _ = run_ranks(2, _train_with_nan, argv, _spoil_steps_2_and_4)
    assert steps == 6 and error == ""
    assert out.count("the step was skipped") == 2
    assert "computed again, the step is finite: a fault that passed" in out


def test_an_adapting_loss_scale_has_more_patience(data):
    argv = flags(data, "--fp16 --micro-batch-size 1 --global-batch-size 1 --train-iters 60")
    ((_, error, steps),) = run_ranks(1, _train_with_nan, argv, _spoil_parameter)
    assert steps == 50 and "the parameter layers.1.mlp.linear_fc1.weight" in error


def test_a_run_that_came_to_nothing_says_so_however_short_it_is_and_whatever_ended_it(data, tmp_path):
    two = "2 steps up to iteration 2 was without NaN or Inf"
    began = "it began in the gradient that reached the output of layers.0.mlp.linear_fc1 on rank 0 on"
    rows = [
        ("short", "--train-iters 2", _spoil_gradient, [f"not one of the {two}", began, "saved in"]),
        ("unchecked", "--train-iters 2 --no-check-for-nan-in-loss-and-grad", _spoil_gradient, [two, began]),
        ("interval", "--exit-interval 2", _spoil_gradient, [two, began]),
        (
            "parameter",
            "--train-iters 2",
            _spoil_parameter_in_last_step,
            ["NaN or Inf is in the parameter layers.1.mlp.linear_fc1.weight (the part of rank 1 on", "iteration 2"],
        ),
        (
            "validation",
            "--train-iters 2 --eval-iters 1",
            _spoil_evaluation,
            ["validation set is inf after", "the parameters are finite"],
        ),
        (
            "test",
            "--train-iters 2 --eval-iters 1 --split 9,0,1",
            _spoil_evaluation,
            ["the test set is inf after", "the parameters are finite"],
        ),
        (
            "skip train",
            "--skip-train --eval-iters 1",
            _spoil_parameter,
            ["validation set is nan after", "NaN or Inf is in the parameter layers.1.mlp.linear_fc1"],
        ),
        ("no scale", "--fp16 --exit-interval 2", _spoil_loss_scale, [f"{two} (loss scale inf)", "gradient"]),
        # Its loss scale has not come down yet, and goes on to when the run does.
        ("early", "--fp16 --exit-interval 2", _spoil_nothing, []),
        ("early and whole", "--fp16 --train-iters 2", _spoil_nothing, []),
        ("least scale", "--fp16 --initial-loss-scale 1 --train-iters 2", _spoil_gradient, [two]),
        ("early nan", "--fp16 --exit-interval 2", _spoil_parameter, [two, "it began in the parameter layers.1"]),
    ]
    common = "--global-batch-size 2 --eval-iters 0 --save-interval 100 --save"
    cases = [(flags(data, common, f"{tmp_path / name.replace(' ', '')}", more), plant) for name, more, plant, _ in rows]
    for of_rank in run_ranks(2, _train_each_with_nan, cases):
        for (name, _, _, expected), (_, error, _) in zip(rows, of_rank, strict=True):
            assert bool(error) == bool(expected), (name, error)
            assert all(text in error for text in expected), (name, error)
    for name in ("short", "interval", "parameter", "early"):  # only the gradients were spoilt
        assert "the loss" not in read_meta(tmp_path / name / "iter_0000002")["nonfinite"]


def test_status_3_and_what_was_written_before_it(data, tmp_path):
    # The loss scale overflows, and stays.
    argv = flags(
        data, f"--fp16 --loss-scale 4294967296 --eval-iters 0 --tensorboard-dir {tmp_path}", length="--train-iters 1"
    )
    ((code, _, error),) = run_ranks(1, call_pretrain, argv)[0]
    assert code == 3
    assert error.startswith("error: not one of the 1 steps") and "not saved: there is no --save" in error
    (events,) = tmp_path.glob("events.*")
    assert b"lm loss" in events.read_bytes()
