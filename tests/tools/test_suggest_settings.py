"""Settings are ranked by what short emulated runs did."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.training.small_run import SHAPE, write_text
from tools.suggest_settings import Outcome, suggest

RUN = f"{SHAPE} --micro-batch-size 1 --lr 3e-3 --num-workers 0 --tokenizer-type ByteTokenizer"


def call(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools/suggest_settings.py"), "gpt", "--emulate-ranks", "4", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_settings_are_trained_and_ranked_by_bytes(tmp_path):
    tries = ["--zero-quantized-gradients --zero-gradient-bits 2", "--zero-quantized-gradients --zero-gradient-bits 8"]
    words = [word for setting in tries for word in ("--try", setting)]
    result = call(
        "--iterations", "20", "--link-gbps", "10", *words, "--", *RUN.split(), "--data-path", write_text(tmp_path)
    )
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if re.search(r"\d+\.\d+ +[-+]\d+\.\d\d%", line)]
    assert [row.split("  ")[0] for row in rows] == ["ZeRO-3", tries[1], tries[0]]
    losses, megabytes, seconds = zip(
        *(map(float, re.search(r"([\d.]+) +[-+][\d.]+% +([\d.]+) +([\d.]+)$", row).groups()) for row in rows),
        strict=True,
    )
    assert losses[2] > losses[1]  # 2 bits lose more than 8
    assert megabytes[0] > 2 * megabytes[1]
    assert seconds[0] == pytest.approx(megabytes[0] * 8e6 / 10e9, abs=1e-4)
    assert re.search(r"Suggested: .+\n  --", result.stdout)


def outcome(name: str, loss: float, nbytes: float) -> Outcome:
    return Outcome(name, "", loss, nbytes)


def test_the_fewest_bytes_within_the_noise_are_suggested():
    outcomes = [outcome("zero3", 4.0, 100), outcome("a", 4.005, 30), outcome("b", 4.03, 20), outcome("c", 9.9, 10)]
    assert suggest(outcomes, noise=0.0).name == "a"  # within 0.25 %
    assert suggest(outcomes, noise=0.05).name == "b"
    assert suggest([outcomes[0], outcome("nan", float("nan"), 1)], noise=1.0).name == "zero3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--num-layers", "2"], "--seq-length"),
        (["--emulate-nodes", "3", "--", *RUN.split(), "--mock-data"], "give 2 nodes or more that divide the ranks"),
        (["--iterations", "3", "--", *RUN.split(), "--mock-data"], "too short"),
        ([], "after --"),
    ],
)
def test_mistakes_come_to_light_before_anything_is_trained(words, message):
    result = call(*words)
    assert result.returncode in (1, 2) and message in result.stderr
