"""What islands do by themselves between two log lines: train, and skip steps with NaN or Inf."""

import math
import os
import re
import signal
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_zpp.training.nonfinite import NotFiniteError
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import NO_DROPOUT, flags, log_lines, start, train_quietly

ISLANDS = f"--islands 2 {NO_DROPOUT} --eval-iters 0"


def _train_while_one_waits(argv: list[str], halts: int, until: int) -> int:
    """The second island does not begin step ``halts`` + 1 before the first has ended step ``until``."""
    run, _ = start(argv)
    store, steps = dist.distributed_c10d._get_default_store(), []

    def hook(*_) -> None:
        steps.append(1)
        if run.mesh.island.get_local_rank() == 0 and len(steps) == until:
            store.set(f"done{dist.get_rank()}", "")
        if run.mesh.island.get_local_rank() == 1 and len(steps) == halts:
            store.wait([f"done{rank}" for rank in range(dist.get_world_size() // 2)])

    run.optimizer.register_step_post_hook(hook)
    train_quietly(run)
    return len(steps)


@pytest.mark.parametrize(
    "more",
    [pytest.param("", marks=pytest.mark.long), "--zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1"],
)
def test_an_island_trains_on_while_another_stands_still(data, more):
    """From one log line and synchronization to the next; any collective of both islands would never end."""
    argv = flags(data, ISLANDS, "--island-sync-interval 5 --log-interval 5", more)
    argv += ["--train-iters", "10", "--global-batch-size", "4"]
    assert run_ranks(4, _train_while_one_waits, argv, 6, 9) == [10] * 4


def _log_and_points(argv: list[str]) -> tuple[list[dict[str, float]], list[float]]:
    """Return the lines of the log, and the losses that this rank would write to TensorBoard."""
    run, metrics = start(argv)
    return log_lines(train_quietly(run)), metrics["lm loss"]


def test_a_log_line_has_the_mean_loss_of_all_islands_and_points_have_the_last_ones(data):
    argv = flags(data, f"--islands 2 --island-sync-interval 4 --log-interval 3 --train-iters 6 {NO_DROPOUT}")
    (_, first), (lines, last) = run_ranks(2, _log_and_points, argv)
    assert len(first) == len(last) == 6 and first != last
    for line, steps in zip(lines, (slice(1), slice(1, 3), slice(3, 6)), strict=True):
        losses = [*first[steps], *last[steps]]
        assert line["lm loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def _train_spoilt(argv: list[str], island: int, bad_steps: Sequence[int]) -> SimpleNamespace:
    """Train with Inf in an island's gradients in some steps. ``steps``: of the optimizer."""
    run, metrics = start(argv)

    def hook(module, inputs, output):
        if run.counters.iteration + 1 in bad_steps:
            output.register_hook(lambda gradient: gradient * math.inf)

    if run.mesh.island.get_local_rank() == island:
        run.model.layers[0].mlp.linear_fc1.register_forward_hook(hook)
    out = error = ""
    try:
        out = train_quietly(run)
    except NotFiniteError as caught:
        error = str(caught)
    steps = None if error else int(next(iter(run.optimizer.state.values()))["step"])
    return SimpleNamespace(metrics=metrics, out=out, error=error, steps=steps, scale=run.scaler.scale)


FP16 = "--fp16 --initial-loss-scale 256 --hysteresis 1"


def test_an_island_skips_its_own_steps_alone(data):
    """The other one takes all steps, and with fp16 keeps its scale."""
    common = f"{ISLANDS} --island-sync-interval 3 --log-interval 4 --train-iters 6 --global-batch-size 4"
    calls = {
        precision: partial(_train_spoilt, flags(data, common, precision), 1, [2, 3, 5]) for precision in ("", FP16)
    }
    for precision, ranks in run_in_turn(4, calls).items():
        assert [rank.steps for rank in ranks] == [6, 6, 3, 3] and not any(rank.error for rank in ranks)
        scale = 256.0 if precision else 1.0
        assert [rank.scale for rank in ranks] == [scale, scale, *[32.0 if precision else 1.0] * 2]
        assert ranks[0].metrics["learning-rate"] == ranks[3].metrics["learning-rate"]
        if not precision:  # with fp16 an overflow is nothing to look into
            counts = [rank.out.count("the step was skipped") for rank in ranks]
            assert counts == [0, 0, 2, 0]  # the first of two in a row
        (_, _, _, last) = ranks
        assert "number of skipped iterations:   2" in last.out  # steps 2 and 3, in the line of step 4
        assert all(math.isfinite(line["lm loss"]) for line in log_lines(last.out))


NAN = {
    # The third bad step in a row, found at the next log line.
    "--log-interval 5": (
        range(1, 100),
        "5 steps in a row, up to iteration 5, had NaN or Inf.*layers.0.mlp.linear_fc1 on rank 1 on",
    ),
    "--log-interval 8": ([2, 3, 4], "3 steps in a row, up to iteration 4, had NaN or Inf"),  # though good ones follow
    "--train-iters 3": ([1, 2, 3], "not one of the 3 steps up to iteration 3 was without NaN or Inf.* rank 1 on"),
    "--train-iters 3 --no-check-for-nan-in-loss-and-grad": (
        [1, 2, 3],
        "the parameters were replaced after the last step",
    ),
}


def test_nan_in_one_island_ends_all_with_its_origin(data, tmp_path):
    common = f"{ISLANDS} --island-sync-interval 2 --global-batch-size 2 --save-interval 100"
    calls = {}
    for number, (more, (bad_steps, _)) in enumerate(NAN.items()):
        allowed = f"--max-nonfinite-steps {4 if 'iters' in more else 3} --save {tmp_path / str(number)}"
        calls[more] = partial(_train_spoilt, flags(data, common, more, allowed), 1, bad_steps)
    for number, (more, ranks) in enumerate(run_in_turn(2, calls).items()):
        for rank in ranks:
            assert re.search(f"{NAN[more][1]}.* saved in {tmp_path / str(number)}", rank.error, re.DOTALL), rank.error


@pytest.mark.parametrize("spoilt", [1, pytest.param(0, marks=pytest.mark.long)])
def test_an_island_that_has_not_stepped_yet_resumes(data, tmp_path, spoilt):
    """Its optimizer has no state to save, where the other's has."""
    argv = flags(data, f"{ISLANDS} --island-sync-interval 3 --train-iters 5 --global-batch-size 4")
    folder = f"--save {tmp_path} --load {tmp_path} --save-interval 2".split()
    words = {"whole": argv, "begun": [*argv, *folder, "--exit-interval", "2"], "rest": [*argv, *folder]}
    found = run_in_turn(2, {name: partial(_train_spoilt, argv, spoilt, [1, 2]) for name, argv in words.items()})
    whole, begun, rest = ([rank.metrics["lm loss"] for rank in of_ranks] for of_ranks in found.values())
    assert [one + other for one, other in zip(begun, rest, strict=True)] == whole and len(whole[-1]) == 5


def _stop_in_one_island(argv: list[str]) -> int:
    """The second island gets a signal in step 2."""
    run, _ = start(argv)

    def hook(*_) -> None:
        if dist.get_rank() == 1 and run.counters.iteration == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    run.optimizer.register_step_post_hook(hook)
    train_quietly(run)
    return run.counters.iteration


def test_a_signal_ends_all_islands_at_the_next_log_line(data, tmp_path):
    save = f"--save {tmp_path} --save-interval 100"
    argv = flags(data, ISLANDS, f"--island-sync-interval 2 --log-interval 5 --exit-signal-handler {save}")
    assert run_ranks(2, _stop_in_one_island, argv) == [5, 5]
