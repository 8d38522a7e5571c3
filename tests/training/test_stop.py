"""Signals that ask a run to save and stop, wherever it is: real ones, to one of several ranks."""

import contextlib
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.checkpoint import read_meta
from megatron_zpp.checkpoint.folder import complete_checkpoints, iteration_of
from megatron_zpp.parallel.distributed import SECONDS_OF_ONE_CTRL_C
from tests.ranks import run_ranks
from tests.training.small_run import ROOT, ended, flags, start, torchrun, train_quietly

EVAL_ITERS = 3


IMPORT = "from megatron_zpp.zeropp.fsdp.topology import gather_objects"
CTRL_C = """
import multiprocessing, os, signal
from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.parallel.distributed import STOP_SIGNALS
from megatron_zpp.training import pretrain

def interrupted(run, *args, **kwargs):
    if run.counters.iteration == 3 and os.environ["RANK"] == "1":
        workers = multiprocessing.active_children()
        assert workers
        for worker in workers:  # which a terminal and Slurm signal, too
            for number in STOP_SIGNALS:
                os.kill(worker.pid, number)
        os.kill(os.getpid(), signal.SIGINT)
    return train_step(run, *args, **kwargs)

train_step, pretrain.train_step = pretrain.train_step, interrupted
main(GPT)
"""


def test_ctrl_c_on_one_rank_saves_and_ends_all(data, tmp_path):
    (script := tmp_path / "train.py").write_text(CTRL_C)
    asked = f"--exit-signal-handler --save {tmp_path} --save-interval 100000 --num-workers 1 --train-iters 100000"
    out, _ = ended(torchrun(2, flags(data, asked), str(script)))
    iteration = int(re.search(r"exiting program at iteration (\d+), saved in", out)[1])
    assert iteration in (4, 5)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == f"{iteration}\n"


TERMINAL = """
import time
from megatron_zpp.commands.pretrain import main
from megatron_zpp.families import GPT
from megatron_zpp.training import pretrain

def slow_save(self):
    print("the save begins", flush=True)
    time.sleep({seconds})
    save(self)

save, pretrain.CheckpointManager.on_save = pretrain.CheckpointManager.on_save, slow_save
main(GPT)
"""


def at_a_terminal(ranks: int, script: Path, argv: list[str], typed: list[tuple[str, float]]) -> str:
    """Train from a shell; type Ctrl-C that long after each text is shown; return the screen. ranks 0: no torchrun."""
    shell = 'trap : INT; "$@"; sleep 2'  # as an interactive one, it outlives torchrun
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execvp("sh", ["sh", "-c", shell, "sh", sys.executable, *launcher, str(script), *argv])
    screen, seen = "", 0
    with contextlib.suppress(OSError):  # the terminal's end
        while shown := os.read(terminal, 1 << 16).decode(errors="replace"):
            screen += shown
            while typed and typed[0][0] in screen[seen:]:
                text, seconds = typed.pop(0)
                seen = screen.index(text, seen) + len(text)
                time.sleep(seconds)
                os.write(terminal, b"\x03")
    os.close(terminal)
    os.waitpid(child, 0)
    return " ".join(screen.split())


@pytest.mark.parametrize(("ranks", "more"), [(2, ""), pytest.param(0, "--local-ranks 2", marks=pytest.mark.long)])
def test_ctrl_c_at_a_terminal_saves_before_the_run_ends(data, tmp_path, ranks, more):
    (script := tmp_path / "train.py").write_text(TERMINAL.format(seconds=0))
    argv = flags(data, f"--save {tmp_path} --save-interval 100000 --train-iters 100000", more)
    screen = at_a_terminal(ranks, script, argv, [("     3/100000", 0)])
    assert screen.count("Ctrl-C: saving and stopping, after the step at hand") == 1 and "interrupted" not in screen
    iteration = int(re.search(rf"exiting program at iteration (\d+), saved in {tmp_path}", screen)[1])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == f"{iteration}\n"


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_second_ctrl_c_at_a_terminal_ends_a_run_that_still_saves(data, tmp_path, ranks):
    (script := tmp_path / "train.py").write_text(TERMINAL.format(seconds=1000))
    argv = flags(data, f"--save {tmp_path} --save-interval 100000 --train-iters 100000 --exit-signal-handler")
    typed = [("     3/100000", 0), ("the save begins", SECONDS_OF_ONE_CTRL_C + 0.5)]
    screen = at_a_terminal(ranks, script, argv, typed)
    assert "exiting program" not in screen and not [*tmp_path.glob("iter_*")]
    if ranks:
        assert "forcefully" not in screen  # as torchrun ends ranks 30 seconds later
    else:
        assert f"not saved: {tmp_path} holds no checkpoint yet" in screen


def test_ctrl_c_without_save_is_one_line_that_says_so(data, tmp_path):
    every = CTRL_C.replace("    if run.", "    ranks = gather_objects(os.getpid())\n    if run.")
    every = every.replace("os.kill(os.getpid(), signal.SIGINT)", "[os.kill(rank, signal.SIGINT) for rank in ranks]")
    (script := tmp_path / "train.py").write_text(f"{IMPORT}{every}")
    _, err = ended(torchrun(2, flags(data, "--num-workers 1 --train-iters 100000"), str(script)), status=1)
    assert "Signal 2 (SIGINT)" in err
    (line,) = [line for line in err.splitlines() if line.startswith("interrupted")]
    assert line == "interrupted after iteration 3: nothing is saved, there is no --save"
    assert "KeyboardInterrupt" not in err and "error: rank" not in err and "[rank" not in err


def _signal_in_evaluation(run, evaluations: list[bool], number: int) -> None:
    """Rank 1 is signalled in the second batch of evaluation ``number``. ``evaluations``: an entry per batch."""

    def hook(module, inputs, output):
        if not module.training:
            evaluations.append(True)
            if len(evaluations) == number * EVAL_ITERS + 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    run.model.register_forward_hook(hook)


def _signal_while_saving(run, evaluations: list[bool], number: int) -> None:
    meta = run.meta

    def signalled():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return meta()

    run.meta = signalled


def _stopped(cases):
    """What each case printed, and how many steps, evaluations and batches of evaluation it made."""
    results = {}
    for name, (argv, plant, number) in cases.items():
        run, metrics = start(argv)
        evaluations: list[bool] = []
        if plant is not None:
            plant(run, evaluations, number)
        out = train_quietly(run)
        losses = metrics.get("lm loss validation", [])
        results[name] = out, len(metrics["lm loss"]), losses, len(evaluations)
    return results


def test_a_signal_to_one_rank_saves_once_and_stops_wherever_the_run_is(data, tmp_path):
    common = f"--exit-signal-handler --global-batch-size 2 --eval-interval 2 --eval-iters {EVAL_ITERS}"

    def case(name, plant, number=0, more="--save-interval 100"):
        return flags(data, common, f"--save {tmp_path / name}", more, length="--train-iters 4"), plant, number

    cases = {
        "undisturbed": case("undisturbed", None),
        "evaluation": case("evaluation", _signal_in_evaluation, 0),
        "validation": case("validation", _signal_in_evaluation, 1),
        "test": case("test", _signal_in_evaluation, 2),
        "async": case("async", _signal_while_saving, more="--save-interval 1"),
        "sync": case("sync", _signal_while_saving, more="--save-interval 1 --no-async-save"),
        "resumed": case("evaluation", None, more=f"--save-interval 100 --load {tmp_path / 'evaluation'}"),
    }
    results = run_ranks(2, _stopped, cases)
    saved = {name: [iteration_of(path) for path in complete_checkpoints(tmp_path / name)] for name in cases}
    steps = {name: result[1] for name, result in results[1].items()}
    batches = [{name: result[3] for name, result in of_rank.items()} for of_rank in results]
    out = {name: result[0] for name, result in results[0].items()}
    assert saved == {
        "undisturbed": [4],
        "evaluation": [2, 4],
        "validation": [4],
        "test": [4],
        "async": [1],
        "sync": [1],
        "resumed": [],
    }
    assert steps == {"undisturbed": 4, "evaluation": 2, "validation": 4, "test": 4, "async": 1, "sync": 1, "resumed": 2}
    assert batches[0] == batches[1]  # the ranks agreed, before the third batch
    assert [batches[0][name] for name in ("evaluation", "validation", "test", "async")] == [2, 5, 8, 0]
    assert "note: the evaluation at iteration 2 was cut short: a signal asked to stop" in out["evaluation"]
    assert f"exiting program at iteration 2, saved in {tmp_path / 'evaluation'}" in out["evaluation"]
    assert "the evaluation on the validation set was cut short" in out["validation"]
    assert "the evaluation on the test set was cut short" in out["test"]
    assert "exiting program at iteration 1, saved in" in out["async"]
    # The evaluations that follow see what they would have seen.
    losses = {name: result[2] for name, result in results[1].items()}
    assert losses["evaluation"] == [] and losses["resumed"] == losses["undisturbed"][1:] == losses["test"][1:]
    meta = read_meta(tmp_path / "evaluation" / "iter_0000002")
    assert meta["counters"]["consumed_valid_samples"] == EVAL_ITERS * 2
    assert meta["tokens"] == meta["counters"]["consumed_train_samples"] * 32 == 2 * 2 * 32


SCRIPT = """
import os, signal
from megatron_zpp.families import GPT
from megatron_zpp.training import {module}

def signalled(*args, **kwargs):
    os.kill(os.getpid(), signal.{number})
    return real(*args, **kwargs)

real, {module}.{function} = {module}.{function}, signalled
from megatron_zpp.commands.pretrain import main

main(GPT)
"""


def test_before_the_first_step_is_done_a_signal_ends_a_run_at_once(data, tmp_path):
    processes = {}
    for number, module, function in (
        (signal.SIGINT, "data", "chosen_sources"),
        (signal.SIGTERM, "pretrain", "train_step"),
    ):
        script = tmp_path / f"{function}.py"
        script.write_text(SCRIPT.format(module=module, number=number.name, function=function))
        argv = flags(data, f"--exit-signal-handler --save {tmp_path / function} --save-interval 1")
        processes[number] = torchrun(0, argv, str(script))
    for number, process in processes.items():
        _, err = ended(process, status=-number)
        assert "Traceback" not in err and "error" not in err
        assert ("interrupted before the run began: nothing is saved" in err) == (number == signal.SIGINT)
    assert not [*tmp_path.glob("*/iter_*")]
