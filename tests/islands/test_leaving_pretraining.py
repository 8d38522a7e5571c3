"""--islands-may-leave: jobs of the trainer, one of which is killed, stopped or asked to end, and returns."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_zpp.checkpoint import iterate_parameters, read_meta
from megatron_zpp.metrics.tensorboard_reader import find_runs, read_run
from tests.conftest import ROOT
from tests.islands.leaving_jobs import lighthouse, run_commands_of_page, secret_file
from tests.training.small_run import RUN, SHAPE, flags, ranks_of, torchrun, write_text

pytestmark = pytest.mark.long
SCRIPT = "tests/islands/recorded_pretraining.py"
PATIENT = "--island-timeout-seconds 30 --island-patience-seconds 200"
SEED, VOCABULARY, LENGTH = 1234, 100, 32
AGREE = "--island-sync-interval 3 --island-bits 4 --island-block-size 32"
PATIENCE = 240  # seconds


class Job:
    """A job of torchrun whose output is read all the time, so that it never waits for a reader."""

    def __init__(self, ranks: int, argv: list[str], warm: bool = True, **environment: str) -> None:
        self.process = torchrun(ranks, argv, script=SCRIPT, warm=warm, **environment)
        self.out, self.err = list[str](), list[str]()
        self._news = threading.Condition()
        pairs = (self.process.stdout, self.out), (self.process.stderr, self.err)
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines: list[str]) -> None:
        for line in stream:
            with self._news:
                lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Until so many lines of the log have it; an error where the job ends before."""

        def is_there() -> bool:
            return sum(re.search(pattern, line) is not None for line in self.out) >= times

        with self._news:
            has_ended = lambda: not any(reader.is_alive() for reader in self._readers)  # noqa: E731
            assert self._news.wait_for(lambda: is_there() or has_ended(), PATIENCE), f"no {pattern} in {self.out}"
            assert is_there(), "".join(self.err)

    def end(self) -> int:
        status = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join()
        return status

    def ends_well(self) -> None:
        assert self.end() == 0, "".join(self.err)

    def signal_ranks(self, number: int) -> None:
        for rank in ranks_of(self.process):
            os.kill(rank, number)

    def kill(self) -> None:
        """All that the island has, at once, as where its power fails."""
        ranks = ranks_of(self.process)
        for process in (self.process.pid, *ranks):
            os.kill(process, signal.SIGKILL)
        self.end()

    def losses(self, name: str = "lm loss") -> dict[int, float]:
        """Of the log's lines about training, by iteration."""
        found = (re.search(rf"iteration +(\d+)/.* \| {name}: (\S+) \|", line) for line in self.out)
        return {int(match[1]): float(match[2]) for match in found if match}

    def of_all(self) -> dict[int, tuple[int, str]]:
        """How many agreed, and the loss over all, by iteration."""
        pattern = r"agreed at iteration (\d+) \| islands there: (\d+) \| lm loss of all islands: (\S+) \|"
        found = (re.search(pattern, line) for line in self.out)
        return {int(match[1]): (int(match[2]), match[3]) for match in found if match}

    def evaluations(self) -> dict[str, str]:
        """The losses on the validation and test sets, as printed, by where."""
        found = (re.search(r"loss at (iteration .*?) \| lm loss value: (\S+) \|", line) for line in self.out)
        return {match[1]: match[2] for match in found if match}


class Cluster:
    """Starts jobs, and knows what they read; none outlives its block."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self.record, self._argv, self._jobs = folder / "record", argv, list[Job]()
        self.record.mkdir()

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            at = stack.enter_context(lighthouse())
            self._trust = ["--island-lighthouse", at, "--island-secret-file", secret_file()]
            self._environment = {"RECORD": str(self.record)}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            if job.process.poll() is None:
                job.kill()
        self._stack.close()

    def start(self, *more: str, ranks: int, warm: bool = True, **environment: str) -> Job:
        self._jobs.append(Job(ranks, [*self._argv, *more], warm, **self._environment | environment))
        return self._jobs[-1]

    def island(self, number: int, of: int, *more: str, ranks: int = 1, warm: bool = True, **environment: str) -> Job:
        who = f"--islands {of} --islands-may-leave --island-number {number} {PATIENT} {AGREE}"
        return self.start(*who.split(), *self._trust, *more, ranks=ranks, warm=warm, **environment)

    def read(self, name: str = "[0-9]") -> dict[int, Counter[str]]:
        """How often each sample was trained on, by iteration."""
        found: dict[int, Counter[str]] = {}
        for file in self.record.glob(f"{name}.*"):
            for line in file.read_text().splitlines():
                iteration, samples = json.loads(line)
                found.setdefault(iteration, Counter()).update(samples)
        return found

    def steps_of(self, island: int, of: int) -> list[int]:
        """Those that it took, with a sample each: its own of the step's batch of mock data."""
        steps = []
        for line in (self.record / f"{island}.0").read_text().splitlines():
            step, samples = json.loads(line)
            ids = np.random.default_rng((SEED, 0, (step - 1) * of + island)).integers(VOCABULARY + 1, size=LENGTH + 1)
            assert samples == [hashlib.sha256(ids[:-1].tobytes()).hexdigest()]
            steps.append(step)
        return steps


def parameters_in(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    checkpoint = folder / f"iter_{iteration:07d}"
    return dict(iterate_parameters(checkpoint, read_meta(checkpoint)))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one and one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_islands_that_stay_train_as_those_of_one_job(tmp_path):
    """To the bit: samples, dropout, what is evaluated and saved. And if all end and begin again it is the same."""
    data, again, events = write_text(tmp_path), tmp_path / "again", tmp_path / "events"
    jobs = ["--save", str(tmp_path / "jobs"), "--tensorboard-dir", str(events)]
    common = "--train-iters 12 --eval-interval 4 --save-interval 6 --num-workers 1"
    with Cluster(tmp_path, flags(data, common)) as cluster:
        one = cluster.start("--islands", "2", *AGREE.split(), "--save", str(tmp_path / "one"), ranks=4)
        one.ends_well()
        islands = [cluster.island(number, 2, *jobs, ranks=2) for number in range(2)]
        for island in islands:
            island.ends_well()
        assert len(cluster.read()) == 12 and cluster.read() == cluster.read("all")
        folders = ["--save", str(again), "--load", str(again)]
        for ends in (["--exit-interval", "6"], []):
            resumed = [cluster.island(number, 2, *folders, *ends, ranks=2) for number in range(2)]
            for island in resumed:
                island.ends_well()
        # Islands go on from a run without, and the other way round; nothing is left to train.
        others = [cluster.island(number, 2, "--load", str(tmp_path / "one")) for number in range(2)]
        others.append(cluster.start("--load", str(tmp_path / "jobs" / "island_1"), ranks=1))
        for other in others:
            other.ends_well()
    for other in others:
        assert any("loaded checkpoint" in line and "iteration 12" in line for line in other.out)
        assert len(other.evaluations()) == 2
    for island in (*islands, *resumed, *others):
        for where, loss in island.evaluations().items():
            assert float(loss) == pytest.approx(float(one.evaluations()[where]), rel=1e-6)
    for iteration, loss in one.losses().items():
        mean = sum(island.losses()[iteration] for island in islands) / 2
        assert loss == pytest.approx(mean, rel=1e-6)
    for number, island in enumerate(islands):
        (files,) = find_runs([events / f"island_{number}"]).values()
        points = read_run(str(number), files).metrics["lm loss of all islands"]
        assert points == pytest.approx({step: float(loss) for step, (_, loss) in island.of_all().items()}, rel=1e-6)
        assert sorted(island.of_all()) == [3, 6, 9, 12]
        for iteration, (there, loss) in island.of_all().items():
            expected = sum(one.losses()[step] for step in range(iteration - 2, iteration + 1)) / 3
            assert there == 2 and float(loss) == pytest.approx(expected, rel=1e-6)
    expected = parameters_in(tmp_path / "one", 12)
    for folder in (tmp_path / "jobs", again):
        for island in range(2):
            assert_same(parameters_in(folder / f"island_{island}", 12), expected)


@pytest.mark.parametrize(
    "inside",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --fp16 --initial-loss-scale 1048576 --hysteresis 1",
        "--pipeline-model-parallel-size 2 --optimizer muon",
        "--context-parallel-size 2 --zero-quantized-gradients --zeropp-loco",
    ],
)
def test_what_is_divided_inside_islands_that_stay_trains_as_in_one_job(tmp_path, inside):
    """Two ranks each; then both end, and begin again."""
    common = "--train-iters 9 --eval-interval 9 --save-interval 6 --attention-dropout 0 --hidden-dropout 0"
    with Cluster(tmp_path, flags(write_text(tmp_path), common, inside)) as cluster:
        one = cluster.start("--islands", "2", *AGREE.split(), "--save", str(tmp_path / "one"), ranks=4)
        one.ends_well()
        folders = ["--save", str(tmp_path / "jobs"), "--load", str(tmp_path / "jobs")]
        for ends in (["--exit-interval", "6"], []):
            islands = [cluster.island(number, 2, *folders, *ends, ranks=2) for number in range(2)]
            for island in islands:
                island.ends_well()
    begun, expected = (parameters_in(tmp_path / "one", iteration) for iteration in (6, 9))
    assert all(not torch.equal(value, expected[name]) for name, value in begun.items() if "weight" in name)
    for number in range(2):
        assert_same(parameters_in(tmp_path / "jobs" / f"island_{number}", 9), expected)
    if "fp16" in inside:
        assert any(re.search("skipped iterations: +1 ", line) for line in one.out)


def test_islands_that_agree_at_every_step_begin_again_where_they_ended(tmp_path):
    """Loading an optimizer, which torch has make a step to begin with, is no step of theirs."""
    common = flags(write_text(tmp_path), "--train-iters 8 --eval-iters 0 --save-interval 4")
    with Cluster(tmp_path, common) as cluster:
        runs = []
        for folder, *ends in (("whole",), ("begun", "--exit-interval", "4"), ("begun",)):
            save = ["--save", str(tmp_path / folder), "--load", str(tmp_path / folder), *ends]
            islands = [cluster.island(number, 2, "--island-sync-interval", "1", *save) for number in range(2)]
            for island in islands:
                island.ends_well()
            runs.append(islands[0].of_all())
    whole, begun, rest = runs
    assert sorted(rest) == [5, 6, 7, 8] and begun | rest == whole


def endless(more: str) -> list[str]:
    """A run that ends when it is asked to."""
    words = (
        f"{SHAPE} {RUN} --num-workers 0 --mock-data --vocab-size {VOCABULARY} --train-iters 1000000 --log-interval 3"
    )
    return f"{words} --exit-signal-handler {more}".split()


def test_a_killed_island_returns(tmp_path):
    """The others go on without it, also while it starts again from what it saved; then all are as one again."""
    save = tmp_path / "save"
    folders = f"--save {save} --load {save} --save-interval 6 --save-keep-last 2"
    with Cluster(tmp_path, endless(f"--global-batch-size 3 --eval-interval 9 {folders}")) as cluster:
        first, leaves, third = (cluster.island(number, 3) for number in range(3))
        leaves.wait_for("successfully saved")
        leaves.kill()
        first.wait_for("islands there: 2")
        returns = cluster.island(1, 3)
        returns.wait_for("islands agreed at .* islands there: 3", times=4)
        for island in (first, returns, third):
            island.signal_ranks(signal.SIGTERM)
            island.ends_well()
        steps = [cluster.steps_of(number, 3) for number in range(3)]
    (begins,) = (int(match[1]) for line in returns.out if (match := re.search(r"trains from iteration (\d+) on", line)))
    assert re.search(rf"loaded checkpoint {save}/island_1/iter_\d+ at iteration", returns.out[0])
    assert {there for there, _ in first.of_all().values()} >= {2, 3}
    assert_agreed(first, third, at_least=6)
    assert_agreed(first, returns, at_least=3)
    killed_at = max(leaves.losses())
    assert begins > killed_at and begins % 3 == 0
    for island in (0, 2):
        assert steps[island] == [*range(1, len(steps[island]) + 1)]
    before = [step for step in steps[1] if step <= begins]  # it may have begun one more than the log says
    assert before == [*range(1, len(before) + 1)] and len(before) - killed_at in range(9)
    assert steps[1][len(before) :] == [*range(begins + 1, steps[1][-1] + 1)] and steps[1][-1] > begins


def assert_agreed(one: Job, other: Job, at_least: int) -> None:
    """On the same islands, losses and evaluated parameters, wherever both were there."""
    both = one.of_all().keys() & other.of_all().keys()
    assert len(both) >= at_least
    for iteration in both:
        assert one.of_all()[iteration] == other.of_all()[iteration]
    for where in one.evaluations().keys() & other.evaluations().keys():
        assert one.evaluations()[where] == other.evaluations()[where]


def test_a_stopped_island_wakes_and_one_that_is_asked_to_end_leaves(tmp_path):
    argv = endless(f"--global-batch-size 2 --eval-interval 5 --save {tmp_path / 'save'} --save-interval 999")
    with Cluster(tmp_path, argv) as cluster:
        stays, stops = cluster.island(0, 2), cluster.island(1, 2, warm=False)  # SIGSTOP would stop a client of it
        stops.wait_for("islands agreed at .* islands there: 2")
        stops.signal_ranks(signal.SIGSTOP)
        stays.wait_for("islands agreed at .* islands there: 1", times=3)
        stops.signal_ranks(signal.SIGCONT)
        stops.wait_for("was behind with its step")
        seen = sum("islands agreed at" in line for line in stops.out)
        stops.wait_for("islands agreed at", times=seen + 4)
        stops.signal_ranks(signal.SIGTERM)
        stops.ends_well()
        ended = max(stops.of_all())
        stays.wait_for(rf"agreed at iteration {ended + 9} \| islands there: 1")
        stays.signal_ranks(signal.SIGTERM)
        stays.ends_well()
        steps = [cluster.steps_of(number, 2) for number in range(2)]
    assert any("exiting program at iteration" in line for line in stops.out)
    woke = re.compile(r"behind with its step (\d+), and goes on with the others from iteration (\d+)")
    ((stopped_at, goes_on),) = (map(int, match.groups()) for line in stops.out if (match := woke.search(line)))
    assert_agreed(stays, stops, at_least=5)
    assert steps[0] == [*range(1, len(steps[0]) + 1)] and len(steps[0]) >= ended + 9
    assert steps[1] == [*range(1, stopped_at + 1), *range(goes_on + 1, steps[1][-1] + 1)] and goes_on >= stopped_at + 6


def test_an_island_with_too_many_infinite_steps_ends_alone_and_can_return(tmp_path):
    save = tmp_path / "save"
    folders = f"--save {save} --load {save} --save-interval 999 --max-nonfinite-steps 4"
    with Cluster(tmp_path, endless(f"--global-batch-size 2 {folders}")) as cluster:
        stays, ends = cluster.island(0, 2), cluster.island(1, 2, INFINITE_FROM="7")
        assert ends.end() == 1
        error = "".join(ends.err)
        assert "4 steps in a row, up to iteration 10, had NaN or Inf" in error
        assert f"saved in {save / 'island_1'}" in error
        stays.wait_for("agreed at .* islands there: 1")
        returns = cluster.island(1, 2)
        returns.wait_for("agreed at .* islands there: 2", times=2)
        for island in (stays, returns):
            island.signal_ranks(signal.SIGTERM)
            island.ends_well()
    assert any(f"loaded checkpoint {save}/island_1/iter_" in line for line in returns.out)
    assert_agreed(stays, ends, at_least=3)
    assert_agreed(stays, returns, at_least=2)
    assert all(np.isfinite(loss) for loss in stays.losses().values())


@pytest.mark.parametrize("flag, values", [("--seed", ["0", "1"]), ("--lr", ["1e-3", "1e-2"])])
def test_islands_with_other_data_or_steps_do_not_train(tmp_path, flag, values):
    with Cluster(tmp_path, endless("--global-batch-size 2")) as cluster:
        for island in [cluster.island(number, 2, flag, values[number]) for number in range(2)]:
            assert island.end() != 0
            assert "settings or data than the others: start all islands alike" in "".join(island.err)
        assert not cluster.read()


def test_the_commands_of_the_page_work(tmp_path):
    """Three islands of two ranks, as docs/islands.md starts them: all tell the same losses."""
    (tmp_path / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    out = run_commands_of_page(0, "wait %2 %3\nkill %1", tmp_path)
    told = re.findall(r"agreed at iteration (\d+) \| islands there: 3 \| lm loss of all islands: (\S+)", out)
    assert {int(iteration) for iteration, _ in told} == {5, 10, 15, 20} and len(set(told)) == 4 and len(told) == 12
    evaluated = re.findall(r"loss at iteration 20 on (\w+) set \| lm loss value: (\S+)", out)
    assert len(evaluated) == 6 and len(set(evaluated)) == 2
    assert sorted(path.name for path in (tmp_path / "runs" / "islands").iterdir()) == [f"island_{i}" for i in range(3)]
