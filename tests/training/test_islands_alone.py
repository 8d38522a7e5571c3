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

from megatron_zpp.checkpoint import read_meta
from megatron_zpp.islands import OuterSync
from megatron_zpp.training.nonfinite import NotFiniteError
from megatron_zpp.training.run import Checkpoints
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import NO_DROPOUT, flags, start, train_each, train_quietly

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


@pytest.mark.parametrize("more", ["", "--zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1"])
def test_an_island_trains_on_while_another_stands_still(data, more):
    """From one log line and synchronization to the next; any collective of both islands would never end."""
    argv = flags(data, ISLANDS, "--island-sync-interval 5 --log-interval 5 --tensorboard-log-interval 1", more)
    argv += ["--train-iters", "10", "--global-batch-size", "4"]
    assert run_ranks(4, _train_while_one_waits, argv, 6, 9) == [10] * 4


def test_what_is_written_of_each_step_does_not_depend_on_the_log_interval(data):
    """Points of all steps come at the next log line, and evaluation."""
    common = f"--islands 2 --island-sync-interval 4 --log-num-zeros-in-grad --train-iters 11 {NO_DROPOUT}"
    common += " --eval-interval 6 --global-batch-size 2"
    argv = {every: flags(data, common, f"--log-interval {every}") for every in ("1", "5")}
    metrics = run_ranks(2, train_each, argv)[-1]
    for key in ("lm loss", "grad-norm", "learning-rate", "num-zeros", "lm loss validation"):
        assert metrics["5"][key] == metrics["1"][key] and len(metrics["1"][key]) == (2 if "valid" in key else 11), key
    assert len(metrics["5"]["tokens-per-second"]) == 3  # of the first step, and of steps 5 and 10


def _train_spoilt(argv: list[str], island: int, bad_steps: Sequence[int]) -> SimpleNamespace:
    """Train with Inf in an island's gradients in some steps. ``steps`` and ``scales``: of each optimizer."""
    run, metrics = start(argv)
    number = island - run.mesh.island.get_local_rank()

    def hook(module, inputs, output):
        if run.counters.iteration + 1 in bad_steps:
            output.register_hook(lambda gradient: gradient * math.inf)

    if 0 <= number < len(run.states):
        run.states[number].model.layers[0].mlp.linear_fc1.register_forward_hook(hook)
    out = error = ""
    try:
        out = train_quietly(run)
    except NotFiniteError as caught:
        error = str(caught)
    steps = [int(next(iter(state.optimizer.state.values()))["step"]) for state in run.states if not error]
    scales = [state.scaler.scale for state in run.states]
    return SimpleNamespace(metrics=metrics, out=out, error=error, steps=steps, scales=scales)


FP16 = "--fp16 --initial-loss-scale 256 --hysteresis 1"


def test_an_island_skips_its_own_steps_alone(data):
    """The other one takes all steps, and with fp16 keeps its scale."""
    common = f"{ISLANDS} --island-sync-interval 3 --log-interval 4 --train-iters 6 --global-batch-size 4"
    spoilt = {
        precision: partial(_train_spoilt, flags(data, common, precision), 1, [2, 3, 5]) for precision in ("", FP16)
    }
    for precision, real in run_in_turn(4, spoilt).items():
        assert [rank.steps for rank in real] == [[6], [6], [3], [3]]
        scales = [256.0, 32.0] if precision else [1.0, 1.0]
        assert [rank.scales for rank in real] == [scales[:1], scales[:1], scales[1:], scales[1:]]
        assert not any(run.error for run in real)
        expected = real[3].metrics
        assert len(expected["lm loss"]) == 6 and all(map(math.isfinite, expected["lm loss"] + expected["grad-norm"]))
        if not precision:  # with fp16 an overflow is nothing to look into
            notes = [run.out.count("the step was skipped") for run in real]
            assert notes == [0, 0, 2, 0]  # of two in a row the first
        assert "number of skipped iterations:   2" in real[3].out  # steps 2 and 3, in the line of step 4


NAN = {
    # The third bad step in a row, found at the next log line.
    "--log-interval 5": (
        range(1, 100),
        "5 steps in a row, up to iteration 5, had NaN or Inf.*layers.0.mlp.linear_fc1 on rank 1 on",
    ),
    "--log-interval 8": ([2, 3, 4], "3 steps in a row, up to iteration 4, had NaN or Inf"),  # though good ones follow
    "--train-iters 3": ([1, 2, 3], "not one of the 3 steps up to iteration 3 was without NaN or Inf.* rank 1 on"),
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
    assert read_meta(tmp_path / "0" / "iter_0000005")["counters"]["skipped_iterations"] == 5


@pytest.mark.parametrize("spoilt", [1, pytest.param(0, marks=pytest.mark.long)])
def test_an_island_that_has_not_stepped_yet_resumes(data, tmp_path, spoilt):
    """Its optimizer has no state to save, where the other's has."""
    common = f"{ISLANDS} --island-sync-interval 3 --train-iters 5 --global-batch-size 4"
    argv = flags(data, common)
    folder = f"--save {tmp_path} --load {tmp_path} --save-interval 2".split()
    words = {"whole": argv, "begun": [*argv, *folder, "--exit-interval", "2"], "rest": [*argv, *folder]}
    found = run_in_turn(2, {name: partial(_train_spoilt, argv, spoilt, [1, 2]) for name, argv in words.items()})
    whole, begun, rest = ([rank.metrics["lm loss"] for rank in of_ranks] for of_ranks in found.values())
    assert [one + other for one, other in zip(begun, rest, strict=True)] == whole and len(whole[-1]) == 5


def _resumed_scales(argv: list[str]) -> list[float]:
    run, _ = start(argv)
    return [state.scaler.scale for state in run.states]


def test_a_checkpoint_keeps_the_loss_scale_of_each_island(data, tmp_path):
    argv = flags(data, ISLANDS, FP16, "--island-sync-interval 2")
    save = f"--save {tmp_path} --save-interval 2 --exit-interval 2".split()
    assert [rank.scales for rank in run_ranks(2, _train_spoilt, [*argv, *save], 1, [2])] == [[256.0], [128.0]]
    load = f"--load {tmp_path}".split()
    assert run_ranks(2, _resumed_scales, [*argv, *load]) == [[256.0], [128.0]]
    # Another number of islands gets the first one's.
    others = flags(data, FP16, "--islands 4 --eval-iters 0", *load)
    assert run_ranks(4, _resumed_scales, others) == [[256.0]] * 4


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


def _stop_amid_a_save(argv: list[str]) -> tuple[int, int]:
    """Return the last iteration, and how often the run left the others."""
    run, _ = start(argv)
    save, left = Checkpoints.save, []

    def save_and_ask(*arguments) -> None:
        save(*arguments)
        os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_ask)
        patch.setattr(OuterSync, "leave", lambda islands: left.append(islands))
        train_quietly(run)
    return run.counters.iteration, len(left)


def test_an_island_that_is_asked_to_end_amid_a_save_leaves_the_others(data, tmp_path):
    argv = flags(data, f"{NO_DROPOUT} --save {tmp_path} --save-interval 3 --exit-signal-handler")
    assert run_ranks(1, _stop_amid_a_save, argv) == [(3, 1)]
