"""The quickstart from end to end, and its comparison."""

import math
import re

import pytest

from examples.quickstart import summary
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.metrics.history import RunHistory
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


def test_a_run_without_an_end_and_a_folder_of_several_are_refused(tmp_path):
    write_run(tmp_path / "a", 10, validation=None)
    with pytest.raises(ValueError, match="did the run finish"):
        summary.read("a", str(tmp_path / "a"))
    write_run(tmp_path / "b", 10, validation=None)
    with pytest.raises(ValueError, match="holds 2 runs"):
        summary.read("a", str(tmp_path))


def test_unigram_entropy(tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "d"), "<u2") as writer:
        writer.add_document([[3, 3, 7, 9]])
    assert summary.unigram_entropy(str(tmp_path / "d")) == pytest.approx(1.5 * math.log(2))


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


@pytest.mark.parametrize("nothing", [0.0, math.nan])
def test_runs_that_send_nothing_between_or_within_nodes_are_compared(nothing):
    def run(nbytes: float) -> RunHistory:
        metrics = {key: {100: nbytes} for key in (summary.BETWEEN, summary.WITHIN)}
        return RunHistory("run", metrics={"lm loss": {100: 4.0}, **metrics}, samples={100: 100})

    for runs in ({"a": run(8e6), "b": run(nothing)}, {"a": run(nothing), "b": run(8e6)}):
        between = summary.table(runs, entropy=5.0).splitlines()[3]
        assert between.startswith("MB between nodes per step") and "x less" not in between


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
