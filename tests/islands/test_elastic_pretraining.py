"""--islands-may-leave: jobs of the trainer, one of which is killed, stopped or asked to end, and returns."""

import hashlib
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_zpp.checkpoint import iterate_parameters, read_meta
from megatron_zpp.metrics.tensorboard_reader import find_runs, read_run
from tests.conftest import ROOT
from tests.islands.elastic_jobs import lighthouse, run_commands_of_page, secret_file
from tests.training.small_run import RUN, SHAPE, flags, ranks_of, torchrun

pytestmark = pytest.mark.long
SCRIPT = "tests/islands/recorded_pretraining.py"
PATIENT = "--island-timeout-seconds 30 --island-patience-seconds 200"
SEED, VOCABULARY, LENGTH = 1234, 100, 32
SYNC = "--island-sync-interval 3 --island-bits 4 --island-block-size 32"
PATIENCE = 240  # seconds


class Job:
    """A job of torchrun whose output is read all the time, so that it never waits for a reader."""

    def __init__(self, ranks: int, argv: list[str], warm: bool = True, **environment: str) -> None:
        self.process = torchrun(ranks, argv, script=SCRIPT, warm=warm, **environment)
        self.out, self.err = list[str](), list[str]()
        pairs = (self.out, self.process.stdout), (self.err, self.process.stderr)
        self._readers = [threading.Thread(target=lines.extend, args=[stream], daemon=True) for lines, stream in pairs]
        for reader in self._readers:
            reader.start()

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Wait until this many lines of the log match; fail if the job ends before."""
        deadline = time.monotonic() + PATIENCE
        has_ended = False
        while sum(re.search(pattern, line) is not None for line in self.out) < times:
            assert not has_ended and time.monotonic() < deadline, f"no {pattern} in {self.out}: {''.join(self.err)}"
            has_ended = not any(reader.is_alive() for reader in self._readers)
            time.sleep(0.05)

    def end(self) -> int:
        status = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join()
        return status

    def signal_ranks(self, number: int) -> None:
        for rank in ranks_of(self.process):
            os.kill(rank, number)

    def kill(self) -> None:
        """Kill all processes of the island, as when its power fails."""
        for process in (*ranks_of(self.process), self.process.pid):
            os.kill(process, signal.SIGKILL)
        self.end()

    def find(self, pattern: str) -> list[tuple[str, ...]]:
        """Return the groups of each line of the log that matches."""
        return [match.groups() for line in self.out if (match := re.search(pattern, line))]

    def losses(self) -> dict[int, float]:
        """Return the island's training losses by iteration."""
        return {int(step): float(loss) for step, loss in self.find(r"iteration +(\d+)/.* \| lm loss: (\S+) \|")}

    def losses_of_all(self) -> dict[int, tuple[int, str]]:
        """Return how many synchronized, and the loss over all, by iteration."""
        pattern = r"synchronized at iteration (\d+) \| islands there: (\d+) \| lm loss of all islands: (\S+) \|"
        return {int(step): (int(there), loss) for step, there, loss in self.find(pattern)}

    def evaluations(self) -> dict[str, str]:
        """Return the losses on the validation and test sets, as printed, by iteration and set."""
        return dict(self.find(r"loss at (iteration .*?) \| lm loss value: (\S+) \|"))


class Cluster:
    """Starts jobs, and knows what they read."""

    def __init__(self, folder: Path, argv: list[str], at: str) -> None:
        self.record, self._argv, self.jobs = folder / "record", argv, list[Job]()
        self.record.mkdir()
        self._trust = ["--island-lighthouse", at, "--island-secret-file", secret_file()]

    def start(self, *more: str, ranks: int, **options: Any) -> Job:
        self.jobs.append(Job(ranks, [*self._argv, *more], RECORD=str(self.record), **options))
        return self.jobs[-1]

    def island(self, number: int, of: int, *more: str, ranks: int = 1, **options: Any) -> Job:
        who = f"--islands {of} --islands-may-leave --island-number {number} {PATIENT} {SYNC}"
        return self.start(*who.split(), *self._trust, *more, ranks=ranks, **options)

    def run_both(self, *more: str, ranks: int = 1) -> list[Job]:
        """Run two islands to their end."""
        return end_well(*[self.island(number, 2, *more, ranks=ranks) for number in range(2)])

    def read(self, name: str = "[0-9]") -> dict[int, Counter[str]]:
        """Return how often each sample was trained on, by iteration."""
        found: dict[int, Counter[str]] = {}
        for file in self.record.glob(f"{name}.*"):
            for line in file.read_text().splitlines():
                iteration, samples = json.loads(line)
                found.setdefault(iteration, Counter()).update(samples)
        return found

    def steps_of(self, island: int, of: int) -> list[int]:
        """Return an island's steps, and check that it read its own sample of mock data in each."""
        steps = []
        for line in (self.record / f"{island}.0").read_text().splitlines():
            step, samples = json.loads(line)
            ids = np.random.default_rng((SEED, 0, (step - 1) * of + island)).integers(VOCABULARY + 1, size=LENGTH + 1)
            assert samples == [hashlib.sha256(ids[:-1].tobytes()).hexdigest()]
            steps.append(step)
        return steps


@contextmanager
def cluster_of(folder: Path, argv: list[str]) -> Iterator[Cluster]:
    """Run a lighthouse, and kill the jobs that are left at the end."""
    with lighthouse() as at:
        cluster = Cluster(folder, argv, at)
        try:
            yield cluster
        finally:
            for job in cluster.jobs:
                if job.process.poll() is None:
                    job.kill()


def end_well(*jobs: Job) -> list[Job]:
    for job in jobs:
        assert job.end() == 0, "".join(job.err)
    return [*jobs]


def stop(*jobs: Job) -> None:
    for job in jobs:
        job.signal_ranks(signal.SIGTERM)
        end_well(job)


def parameters_in(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    checkpoint = folder / f"iter_{iteration:07d}"
    return dict(iterate_parameters(checkpoint, read_meta(checkpoint)))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one and one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_islands_that_stay_train_as_those_of_one_job(data, tmp_path):
    """To the bit: samples, dropout, what is evaluated and saved. It is the same if all end and resume."""
    again, events = tmp_path / "again", tmp_path / "events"
    common = "--train-iters 12 --eval-interval 4 --save-interval 6 --num-workers 1"
    with cluster_of(tmp_path, flags(data, common)) as cluster:
        one = cluster.start("--islands", "2", *SYNC.split(), "--save", str(tmp_path / "one"), ranks=4)
        end_well(one)
        islands = cluster.run_both("--save", str(tmp_path / "jobs"), "--tensorboard-dir", str(events), ranks=2)
        assert len(cluster.read()) == 12 and cluster.read() == cluster.read("all")
        folders = ["--save", str(again), "--load", str(again)]
        cluster.run_both(*folders, "--exit-interval", "6", ranks=2)
        resumed = cluster.run_both(*folders, ranks=2)
        # Islands resume a run without, and the other way round; nothing is left to train.
        others = cluster.run_both("--load", str(tmp_path / "one"))
        others += end_well(cluster.start("--load", str(tmp_path / "jobs" / "island_1"), ranks=1))
    for other in others:
        assert any("loaded checkpoint" in line and "iteration 12" in line for line in other.out)
        assert len(other.evaluations()) == 2
    for island in (*islands, *resumed, *others):
        for where, loss in island.evaluations().items():
            assert float(loss) == pytest.approx(float(one.evaluations()[where]), rel=1e-6)
    for iteration, loss in one.losses().items():
        assert loss == pytest.approx(sum(island.losses()[iteration] for island in islands) / 2, rel=1e-6)
    for number, island in enumerate(islands):
        (files,) = find_runs([events / f"island_{number}"]).values()
        points = read_run(str(number), files).metrics["lm loss of all islands"]
        assert points == pytest.approx(
            {step: float(loss) for step, (_, loss) in island.losses_of_all().items()}, rel=1e-6
        )
        assert sorted(island.losses_of_all()) == [3, 6, 9, 12]
        for iteration, (there, loss) in island.losses_of_all().items():
            expected = sum(one.losses()[step] for step in range(iteration - 2, iteration + 1)) / 3
            assert there == 2 and float(loss) == pytest.approx(expected, rel=1e-6)
    for folder in (tmp_path / "jobs", again):
        for island in range(2):
            assert_same(parameters_in(folder / f"island_{island}", 12), parameters_in(tmp_path / "one", 12))


@pytest.mark.parametrize(
    "inside",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --fp16 --initial-loss-scale 1048576 --hysteresis 1",
        "--context-parallel-size 2 --zero-quantized-gradients --zeropp-loco --island-sync-interval 1",
    ],
)
def test_what_is_divided_inside_islands_that_stay_trains_as_in_one_job(data, tmp_path, inside):
    """Two ranks each; then both end, and resume.

    Torch steps an optimizer before it loads its state, which islands that synchronize at every step do not count.
    """
    common = "--train-iters 9 --eval-interval 9 --save-interval 6 --attention-dropout 0 --hidden-dropout 0"
    with cluster_of(tmp_path, flags(data, common)) as cluster:
        words = [*SYNC.split(), *inside.split()]
        one = cluster.start("--islands", "2", *words, "--save", str(tmp_path / "one"), ranks=4)
        end_well(one)
        words += ["--save", str(tmp_path / "jobs"), "--load", str(tmp_path / "jobs")]
        cluster.run_both(*words, "--exit-interval", "6", ranks=2)
        cluster.run_both(*words, ranks=2)
    begun, expected = (parameters_in(tmp_path / "one", iteration) for iteration in (6, 9))
    assert all(not torch.equal(value, expected[name]) for name, value in begun.items() if "weight" in name)
    for number in range(2):
        assert_same(parameters_in(tmp_path / "jobs" / f"island_{number}", 9), expected)
    if "fp16" in inside:
        assert any(re.search("skipped iterations: +1 ", line) for line in one.out)


def endless(more: str) -> list[str]:
    """Return the flags of a run that ends when it is asked to."""
    length = f"--train-iters 1000000 --log-interval 3 --exit-signal-handler {more}"
    return f"{SHAPE} {RUN} --num-workers 0 --mock-data --vocab-size {VOCABULARY} {length}".split()


def assert_synchronized(one: Job, other: Job, at_least: int) -> None:
    """Check for the same islands, losses and evaluated parameters, wherever both were there."""
    both = one.losses_of_all().keys() & other.losses_of_all().keys()
    assert len(both) >= at_least
    assert {step: one.losses_of_all()[step] for step in both} == {step: other.losses_of_all()[step] for step in both}
    for where in one.evaluations().keys() & other.evaluations().keys():
        assert one.evaluations()[where] == other.evaluations()[where]


def assert_consecutive(steps: list[int], first: int = 1) -> None:
    assert steps == [*range(first, first + len(steps))]


def test_a_killed_island_returns(tmp_path):
    """The others go on without it, also while it starts again from what it saved; then all are as one again."""
    save = tmp_path / "save"
    folders = f"--save {save} --load {save} --save-interval 6 --save-keep-last 2"
    with cluster_of(tmp_path, endless(f"--global-batch-size 3 --eval-interval 9 {folders}")) as cluster:
        first, leaves, third = (cluster.island(number, 3) for number in range(3))
        leaves.wait_for("successfully saved")
        leaves.kill()
        first.wait_for("islands there: 2")
        returns = cluster.island(1, 3)
        returns.wait_for("islands synchronized at .* islands there: 3", times=4)
        stop(first, returns, third)
        steps = [cluster.steps_of(number, 3) for number in range(3)]
    ((begins,),) = returns.find(r"trains from iteration (\d+) on")
    begins, killed_at = int(begins), max(leaves.losses())
    assert re.search(rf"loaded checkpoint {save}/island_1/iter_\d+ at iteration", returns.out[0])
    assert {there for there, _ in first.losses_of_all().values()} >= {2, 3}
    assert_synchronized(first, third, at_least=6)
    assert_synchronized(first, returns, at_least=3)
    assert begins > killed_at and begins % 3 == 0
    before = [step for step in steps[1] if step <= begins]  # it may have begun one more than the log says
    for island in (steps[0], steps[2], before):
        assert_consecutive(island)
    assert len(before) - killed_at in range(9)
    assert_consecutive(steps[1][len(before) :], begins + 1)
    assert steps[1][-1] > begins


def test_a_stopped_island_wakes_and_one_that_is_asked_to_end_leaves(tmp_path):
    argv = endless(f"--global-batch-size 2 --eval-interval 5 --save {tmp_path / 'save'} --save-interval 999")
    with cluster_of(tmp_path, argv) as cluster:
        stays, stops = cluster.island(0, 2), cluster.island(1, 2, warm=False)  # SIGSTOP would stop a client of it
        stops.wait_for("islands synchronized at .* islands there: 2")
        stops.signal_ranks(signal.SIGSTOP)
        stays.wait_for("islands synchronized at .* islands there: 1", times=3)
        stops.signal_ranks(signal.SIGCONT)
        stops.wait_for("was behind with its step")
        stops.wait_for("islands synchronized at", times=len(stops.find("islands synchronized at")) + 4)
        stop(stops)
        ended = max(stops.losses_of_all())
        stays.wait_for(rf"synchronized at iteration {ended + 9} \| islands there: 1")
        stop(stays)
        steps = [cluster.steps_of(number, 2) for number in range(2)]
    assert any("exiting program at iteration" in line for line in stops.out)
    ((stopped_at, goes_on),) = stops.find(
        r"behind with its step (\d+), and goes on with the others from iteration (\d+)"
    )
    assert_synchronized(stays, stops, at_least=5)
    assert_consecutive(steps[0])
    assert_consecutive(steps[1][: int(stopped_at)])
    assert_consecutive(steps[1][int(stopped_at) :], int(goes_on) + 1)
    assert len(steps[0]) >= ended + 9 and int(goes_on) >= int(stopped_at) + 6


def test_an_island_with_too_many_infinite_steps_ends_alone_and_can_return(tmp_path):
    save = tmp_path / "save"
    folders = f"--save {save} --load {save} --save-interval 999 --max-nonfinite-steps 4"
    with cluster_of(tmp_path, endless(f"--global-batch-size 2 {folders}")) as cluster:
        stays, ends = cluster.island(0, 2), cluster.island(1, 2, INFINITE_FROM="7")
        assert ends.end() == 1
        error = "".join(ends.err)
        assert "4 steps in a row, up to iteration 10, had NaN or Inf" in error
        assert f"saved in {save / 'island_1'}" in error
        stays.wait_for("synchronized at .* islands there: 1")
        returns = cluster.island(1, 2)
        returns.wait_for("synchronized at .* islands there: 2", times=2)
        stop(stays, returns)
    assert any(f"loaded checkpoint {save}/island_1/iter_" in line for line in returns.out)
    assert_synchronized(stays, ends, at_least=3)
    assert_synchronized(stays, returns, at_least=2)
    assert all(np.isfinite(loss) for loss in stays.losses().values())


def test_islands_with_other_data_do_not_train(tmp_path):
    with cluster_of(tmp_path, endless("--global-batch-size 2")) as cluster:
        for island in [cluster.island(number, 2, "--seed", str(number)) for number in range(2)]:
            assert island.end() != 0
            assert "settings or data than the others: start all islands alike" in "".join(island.err)
        assert not cluster.read()


def test_the_commands_of_the_page_work(tmp_path):
    """Three islands of two ranks, as docs/how-to/elastic-islands.md starts them, log the same losses over all."""
    (tmp_path / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    out = run_commands_of_page(0, "wait %2 %3\nkill %1", tmp_path)
    logged = re.findall(r"synchronized at iteration (\d+) \| islands there: 3 \| lm loss of all islands: (\S+)", out)
    assert {int(iteration) for iteration, _ in logged} == {5, 10, 15, 20}
    assert len(set(logged)) == 4 and len(logged) == 12
    evaluated = re.findall(r"loss at iteration 20 on (\w+) set \| lm loss value: (\S+)", out)
    assert len(evaluated) == 6 and len(set(evaluated)) == 2
    assert sorted(path.name for path in (tmp_path / "runs" / "islands").iterdir()) == [f"island_{i}" for i in range(3)]
