"""Log lines to the character, metrics as TensorBoard reads them back, and a progress bar on a real terminal."""

import contextlib
import dataclasses
import io
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch

from megatron_zpp.metrics.lines import TrainingReport, format_training_line, format_validation_lines
from megatron_zpp.metrics.log_reader import parse_line, shorten
from megatron_zpp.metrics.progress import progress
from megatron_zpp.metrics.writers import MetricWriters, describe_program, training_metrics, validation_metrics
from megatron_zpp.settings.groups import LoggingSettings

NOW = datetime(2026, 8, 22, 3, 3, 31, 123456)
REPORT = TrainingReport(
    iteration=85, train_iters=100, consumed_samples=10880, learning_rate=1.7e-5, global_batch_size=128,
    losses={"lm loss": 1.831795}, loss_scale=1.0, grad_norm=1.578, num_zeros=0, params_norm=233.145,
    seconds_per_iteration=5.5809, tflops_per_device=234.0,
)  # fmt: skip
MEGATRON_LINE = (
    " [2026-08-22 03:03:31.123456] iteration       85/     100 | consumed samples:        10880 |"
    " elapsed time per iteration (ms): 5580.9 | throughput per GPU (TFLOP/s/GPU): 234.0 |"
    " learning rate: 1.700000E-05 | global batch size:   128 | lm loss: 1.831795E+00 | loss scale: 1.0 |"
    " grad norm: 1.578 | num zeros: 0 | params norm: 233.145 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |"
)


def test_training_line_is_megatrons() -> None:
    assert format_training_line(REPORT, NOW) == MEGATRON_LINE


def test_our_fields_follow_megatrons() -> None:
    ours = dict(tokens_per_second=12345.6, mfu=0.4121, eta_seconds=3723)
    ours |= dict(bytes_between_nodes=1_500_000, bytes_within_nodes=2_000_000_000)
    line = format_training_line(dataclasses.replace(REPORT, **ours), NOW)
    assert line.startswith(MEGATRON_LINE)
    assert line[len(MEGATRON_LINE) :] == (
        " tokens per second: 12346 | MFU: 41.21% | ETA: 1:02:03 |"
        " sent between nodes per step (MB): 1.500 | sent within nodes per step (MB): 2000.000 |"
    )
    # As users' scripts read it: fields between bars, name and value around the first colon.
    fields = dict(re.split(r":\s+", field.strip(), maxsplit=1) for field in line.split("|")[1:-1])
    assert float(fields["lm loss"]) == 1.831795
    assert int(fields["consumed samples"]) == 10880


def test_a_small_model_on_a_slow_device_has_a_throughput_above_zero() -> None:
    line = format_training_line(dataclasses.replace(REPORT, tflops_per_device=0.0000123), NOW)
    assert parse_line(line)["throughput per GPU (TFLOP/s/GPU)"] == 1.23e-5


def test_a_terminal_on_one_node_shows_the_bytes_within_it() -> None:
    ours = dataclasses.replace(REPORT, tokens_per_second=1.0, bytes_between_nodes=0.0, bytes_within_nodes=3_000_000)
    assert "3.00 MB within the node per step" in shorten(format_training_line(ours, NOW))
    ours = dataclasses.replace(ours, bytes_between_nodes=1_500_000)
    assert "1.50 MB between nodes per step" in shorten(format_training_line(ours, NOW))


def test_validation_lines_are_megatrons() -> None:
    rule, line, _ = format_validation_lines(100, {"lm loss": 2.0})
    assert line == " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert rule == "-" * (len(line) + 1)
    assert "at iteration 100 on test set | " in format_validation_lines(100, {"lm loss": 2.0}, "test")[1]
    assert f"PPL: {math.exp(20):.6E}" in format_validation_lines(1, {"lm loss": 99.0})[1]
    assert "PPL: NAN" in format_validation_lines(1, {"lm loss": math.nan})[1]


def test_tensorboard_receives_megatrons_keys(tmp_path: Path) -> None:
    settings = LoggingSettings(tensorboard_dir=str(tmp_path))
    writers = MetricWriters(settings, {"num_layers": 12}, is_writer=True)
    report = dataclasses.replace(REPORT, bytes_between_nodes=1000.0)
    writers.write(training_metrics(report), iteration=85, consumed_samples=10880)
    writers.write(validation_metrics({"lm loss": 2.0}), iteration=85, consumed_samples=10880)
    writers.close()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    points = {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}
    both = ["learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros", "params-norm"]
    both += ["lm loss", "lm loss validation", "lm loss validation ppl"]
    assert points.keys() == {
        *both,
        *(f"{key} vs samples" for key in both),
        "comm/bytes-between-nodes",
        "iteration-time",
        "throughput",
    }
    assert points["lm loss"] == [(85, pytest.approx(1.831795))]
    assert points["lm loss vs samples"] == [(10880, pytest.approx(1.831795))]
    assert points["comm/bytes-between-nodes"] == [(85, 1000.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    writers = MetricWriters(LoggingSettings(tensorboard_dir=str(folder)), {}, is_writer=False)
    writers.write({"lm loss": 1.0}, 1, 1)
    writers.close()
    assert not folder.exists()


@pytest.mark.parametrize("is_writer", [True, False])
def test_missing_wandb_stops_every_rank(is_writer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # an earlier run's folder must not pass for the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match=r"--wandb-project needs the package wandb, of megatron_zpp's extra wandb"):
        MetricWriters(LoggingSettings(wandb_project="p"), {}, is_writer=is_writer)


@pytest.fixture
def open_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], MetricWriters]:
    pytest.importorskip("wandb.sdk", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = LoggingSettings(wandb_project="p", wandb_exp_name="run")
    return lambda resumes: MetricWriters(settings, {}, is_writer=True, save=str(tmp_path), resumes=resumes)


def test_wandb_offline_keeps_the_points(tmp_path: Path, open_wandb: Callable[[bool], MetricWriters]) -> None:
    writers = open_wandb(False)
    writers.write({"lm loss": 1.5}, iteration=3, consumed_samples=30)
    writers.close()
    (recorded,) = (tmp_path / "wandb").glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while b"lm loss" not in (content := recorded.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a process of wandb's own writes the file
    assert b"lm loss" in content and b"samples vs steps" in content and b"vs samples" not in content


def test_a_run_is_described_by_its_command_commit_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--data-path", "a b"])
    described = describe_program()
    assert described["command"] == "pretrain_gpt.py --data-path 'a b'"
    assert described["torch_version"] == torch.__version__

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert "commit" not in describe_program(tmp_path)
    (tmp_path / "file").write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD")
    assert describe_program(tmp_path)["commit"] == head
    (tmp_path / "file").write_text("new")
    assert describe_program(tmp_path)["commit"] == f"{head}-dirty"


def test_progress_shows_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with progress("building", total=2) as advance:
        advance(1)
    assert capfd.readouterr() == ("", "")

    master, slave = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress("building", total=2) as advance:
            advance(2)
        shown = b""
        while b"building" not in shown:  # it comes in pieces
            shown += os.read(master, 10000)

        monkeypatch.setenv("RANK", "1")
        with progress("elsewhere") as advance:
            advance(1)
        print("end", file=terminal, flush=True)
        shown = b""
        while b"end" not in shown:
            shown += os.read(master, 10000)
        assert b"elsewhere" not in shown
    os.close(master)


def test_a_bar_ends_at_its_total_where_that_was_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    with contextlib.redirect_stderr(screen), progress("building", 22) as advance:
        advance(23)
    with contextlib.redirect_stderr(screen), progress("reading", 500) as advance:
        advance(9)
    assert "22/22" in screen.getvalue() and "23/22" not in screen.getvalue() and "500/500" in screen.getvalue()


def test_progress_in_a_log_is_a_line_now_and_then(capsys):
    with progress("building", 200, line_every=0.0) as advance:
        advance(50)
        advance(100)
        advance(50)
    with progress("evaluating", 200) as advance:
        advance(50)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["building: 25 %", "building: 75 %"]
    assert all(line.endswith(" s left") for line in lines)
