"""Log lines to the character, and a progress bar on a real terminal."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from megatron_zpp.metrics.lines import TrainingReport, format_short_line, format_training_line, format_validation_lines
from megatron_zpp.metrics.progress import progress
from megatron_zpp.metrics.writers import describe_program

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
    assert "throughput per GPU (TFLOP/s/GPU): 1.230e-05 |" in line


def test_a_terminal_shows_a_short_line() -> None:
    ours = dict(tokens_per_second=8000.0, eta_seconds=5, skipped_iterations=2, bytes_between_nodes=1_500_000)
    line = format_short_line(dataclasses.replace(REPORT, **ours))
    assert " ".join(line.split()) == (
        "step 85/100 loss 1.832 lr 1.70e-05 norm 1.578 8,000 tokens/s 1.50 MB between nodes per step "
        "2 steps skipped 0:00:05 left"
    )
    on_one_node = dict(bytes_between_nodes=0.0, bytes_within_nodes=3_000_000, losses={})  # all steps were skipped
    line = format_short_line(dataclasses.replace(REPORT, **on_one_node))
    assert "3.00 MB within the node per step" in line and "loss nan" in line


def test_validation_lines_are_megatrons() -> None:
    rule, line, _ = format_validation_lines(100, {"lm loss": 2.0})
    assert line == " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert rule == "-" * (len(line) + 1)
    assert "at iteration 100 on test set | " in format_validation_lines(100, {"lm loss": 2.0}, "test")[1]
    assert f"PPL: {math.exp(20):.6E}" in format_validation_lines(1, {"lm loss": 99.0})[1]
    assert "PPL: NAN" in format_validation_lines(1, {"lm loss": math.nan})[1]


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
