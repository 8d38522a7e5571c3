"""The quickstart from end to end, and its comparison."""

import re

import pytest

from examples.quickstart import summary
from megatron_zpp.metrics.writers import MetricWriters, RunStart
from megatron_zpp.settings.groups import LoggingSettings


def write_run(folder, steps: int, validation: float | None) -> None:
    writers = MetricWriters(RunStart(LoggingSettings(), str(folder)), is_writer=True)
    writers.write(
        {"lm loss": 5.25, "tokens-per-second": 8000.0, summary.BETWEEN: 24e6, summary.WITHIN: 12e6}, steps, steps
    )
    if validation is not None:
        writers.write({"lm loss validation": validation}, steps, steps)
    writers.close()


def test_only_runs_that_have_learned_and_are_long_are_compared(tmp_path):
    def compared(validation: float, steps: int) -> str:
        runs = {}
        for name, loss in ("a", validation), ("b", validation + 0.1):
            write_run(tmp_path / name, steps, validation=loss)
            runs[name] = summary.read(name, str(tmp_path / name))
        return summary.table(runs, entropy=5.0)

    long, untrained, short = compared(4.0, 300), compared(5.5, 300), compared(4.0, 10)
    assert "(+2.5 %)" in long and "1.0x less" in long and "not compared" not in long
    assert "(+1.8 %)" not in untrained and "losses are not compared" in untrained and "speeds" not in untrained
    assert re.search(r"tokens per second +8,000 +8,000$", short, re.MULTILINE) and "speeds are not compared" in short
    assert "losses are" not in short


def test_quickstart_shows_loss_and_traffic_of_both_runs(quickstart):
    results = quickstart.folder / "runs" / "quickstart"
    assert (results / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = {name: re.findall(rf"^{name}.*", quickstart.output, re.MULTILINE) for name in ("validation", "MB between")}
    assert all(len(found) == 1 for found in rows.values()), quickstart.output
    less = re.search(r"\(([\d.]+)x less\)", rows["MB between"][0])
    assert less is not None and float(less[1]) > 4
    zero3, zeropp = (summary.read(name, str(results / name)) for name in ("zero3", "zeropp"))
    assert [*zeropp.metrics["tokens-per-second"]] == [1]  # 3 steps, a line every 10
    assert zeropp.last(summary.VALIDATION) == pytest.approx(zero3.last(summary.VALIDATION), rel=0.02)
    assert "\n    def test_" in quickstart.output  # the sample
