"""benchmarks/between_islands.py: what its runs send, measured on real interfaces."""

from __future__ import annotations

import between_islands
import pytest
from common import read_rows

H = 192
PARAMETERS = 1024 * H + 128 * H + 2 * (12 * H * H + 13 * H) + 2 * H  # vocabulary, positions, two layers, last norm


@pytest.mark.long
@pytest.mark.usefixtures("namespaces_allowed")
def test_islands_send_what_they_count(tmp_path, monkeypatch, capsys):
    """Two intervals of three steps, of which each sends one agreement and hardly anything else."""
    flags = "--islands 2 --island-sync-interval 3 --island-fragments 2 --island-sync-delay 1"
    monkeypatch.setattr(between_islands, "SETTINGS", {"streaming": between_islands.Setting(flags, 10, 2, 3)})
    monkeypatch.setattr(between_islands, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(between_islands, "RATE", "200mbit")
    between_islands.measure_all()
    (row,) = read_rows(between_islands.RESULTS)
    assert row["steps"] == 6
    # Every interval all fp32 parameters leave each island: a piece to the other, and one of the mean.
    assert row["counted_bytes_per_node_and_step"] == pytest.approx(4 * PARAMETERS / 3, rel=0.01)
    assert row["bytes_per_node_and_step"] == pytest.approx(row["counted_bytes_per_node_and_step"], rel=0.1)
    assert "| streaming |" in capsys.readouterr().out
    between_islands.measure_all()  # what is there is not measured again
    assert read_rows(between_islands.RESULTS) == [row]
