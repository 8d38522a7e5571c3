"""A few sequences of benchmarks/lifecycle_fuzz.py."""

from __future__ import annotations

import lifecycle_fuzz
import pytest

from tests import ranks  # noqa: F401 - what its ranks import is imported once for these, too


@pytest.mark.long
def test_a_run_lives_through_what_hypothesis_draws(tmp_path):
    rows = lifecycle_fuzz.fuzz(1, 5, tmp_path / "rows")
    assert len(rows) >= 5 and sum(len(row["did"]) for row in rows) > 10
