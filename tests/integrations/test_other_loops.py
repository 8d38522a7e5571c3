"""The program that compares loops, on a few short ones: unquantized as plain FSDP2, bytes once per step."""

from __future__ import annotations

import json

import pytest

from tests.integrations.test_examples import output_of

pytestmark = pytest.mark.integrations
CASES = [
    "accelerate",
    "Hugging Face Trainer",
    "Lightning Trainer",
    "torchtitan, chunked loss",
    "Llama, fp16 and GradScaler",
    "Llama, torchao AdamW8bit",
]


def test_other_loops_train_as_plain_fsdp2_and_cross_nodes_once_per_step(tmp_path):
    """One test, since workers of pytest-xdist would each run the program for theirs."""
    results = tmp_path / "rows.jsonl"
    words = ["benchmarks/other_loops.py", *CASES, "--steps", "2", "--results", str(results)]
    output_of("examples/library/on_cpus.py", *words)
    all_rows = [json.loads(line) for line in results.read_text().splitlines()]
    rows = {(row["case"], row["setting"], row["accumulation"]): row for row in all_rows}
    assert len(rows) == len(CASES) * 3 * 2
    for case in CASES:
        for accumulation in (1, 4):
            off, hierarchy, all_flags = (
                rows[case, setting, accumulation]["largest_loss_difference"]
                for setting in ("off", "hierarchy", "all flags")
            )
            assert off == 0 and hierarchy < 1e-5 and 0 < all_flags < 0.1, case
        for setting in ("hierarchy", "all flags"):
            one, four = (rows[case, setting, accumulation]["bytes_between_nodes"] for accumulation in (1, 4))
            # torchtitan's chunked loss gathers by hand, and a look for unseen changes crosses each time: 6 bytes.
            assert four == pytest.approx(one, rel=2e-5), case
        off, all_flags = (rows[case, setting, 4]["bytes_between_nodes"][-1] for setting in ("off", "all flags"))
        assert all_flags < off / 10, case
