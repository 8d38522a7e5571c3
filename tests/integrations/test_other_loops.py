"""The program that compares loops, on a few short ones: unquantized as plain FSDP2, bytes once per step."""

from __future__ import annotations

import json

import pytest

from tests.training.small_run import torchrun

pytestmark = pytest.mark.integrations
CASES = [
    "accelerate",
    "Hugging Face Trainer",
    "Lightning Trainer",
    "torchtitan, chunked loss",
    "Llama, fp16 and GradScaler",
    "Llama, torchao AdamW8bit",
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    results = tmp_path_factory.mktemp("loops") / "rows.jsonl"
    words = ["benchmarks/other_loops.py", *CASES, "--steps", "2", "--results", str(results)]
    process = torchrun(4, words, script="examples/library/on_cpus.py")
    _, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return {(row["case"], row["setting"], row["accumulation"]): row for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_fsdp2_where_nothing_is_quantized(rows, case):
    for accumulation in (1, 4):
        assert rows[case, "off", accumulation]["largest_loss_difference"] == 0
        assert rows[case, "hierarchy", accumulation]["largest_loss_difference"] < 1e-5
        assert 0 < rows[case, "all flags", accumulation]["largest_loss_difference"] < 0.1


@pytest.mark.parametrize("case", CASES)
def test_bytes_cross_nodes_once_per_step(rows, case):
    for setting in ("hierarchy", "all flags"):
        one, four = (rows[case, setting, accumulation]["bytes_between_nodes"] for accumulation in (1, 4))
        # Some bytes more are allowed: ranks ask each other whether weights changed unseen, here and there once more.
        assert four == pytest.approx(one, rel=1e-5)
    off, all_flags = (rows[case, setting, 4]["bytes_between_nodes"][-1] for setting in ("off", "all flags"))
    assert all_flags < off / 10
