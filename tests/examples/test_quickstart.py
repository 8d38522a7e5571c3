"""The quickstart from end to end, and its reading of logs."""

import dataclasses
import io
import math
import re
import sys

import pytest

from examples.quickstart import summary
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.metrics import log_reader
from megatron_zpp.metrics.lines import TrainingReport, format_training_line, format_validation_lines

LINE = TrainingReport(
    iteration=10,
    train_iters=20,
    consumed_samples=320,
    learning_rate=1e-3,
    global_batch_size=32,
    losses={"lm loss": 5.25},
    loss_scale=1.0,
    grad_norm=math.inf,
    seconds_per_iteration=0.5,
    tokens_per_second=8000,
    eta_seconds=5,
    bytes_between_nodes=24e6,
    bytes_within_nodes=12e6,
)


def write_log(path, *lines: TrainingReport, validation: float | None) -> None:
    text = ["note: something else", *map(format_training_line, lines)]
    if validation is not None:
        text += format_validation_lines(20, {"lm loss": validation}, "validation")
    path.write_text("\n".join(text) + "\n")


def test_means_weigh_each_line_by_its_steps(tmp_path):
    # One slow step at first, ten at 8000 tokens per second, two at half that speed.
    first = dataclasses.replace(
        LINE, iteration=1, seconds_per_iteration=9, tokens_per_second=1, bytes_between_nodes=50e6
    )
    last = dataclasses.replace(LINE, iteration=13, seconds_per_iteration=1.0, tokens_per_second=4000)
    write_log(tmp_path / "log", first, dataclasses.replace(LINE, iteration=11), last, validation=4.5)
    run = log_reader.read_log(tmp_path / "log")
    assert run.validation_loss == 4.5
    assert run.mean(log_reader.BETWEEN) == pytest.approx((1 * 50 + 10 * 24 + 2 * 24) / 13)
    assert run.tokens_per_second() == pytest.approx((10 * 0.5 * 8000 + 2 * 1.0 * 4000) / (10 * 0.5 + 2 * 1.0))


def test_of_iterations_that_a_resumed_run_repeats_the_later_lines_count(tmp_path):
    first = [dataclasses.replace(LINE, iteration=i) for i in (10, 20, 30)]  # saved at 20, stopped after 30
    again = [dataclasses.replace(LINE, iteration=i, tokens_per_second=4000) for i in (30, 40)]
    write_log(tmp_path / "log", *first, *again, validation=4.5)
    run = log_reader.read_log(tmp_path / "log")
    assert [line["iteration"] for line in run.lines] == [10, 20, 30, 40]
    assert run.mean("tokens per second") == pytest.approx((2 * 8000 + 2 * 4000) / 4)
    assert run.tokens_per_second() == pytest.approx((8000 + 2 * 4000) / 3)


def test_a_log_without_an_end_is_refused(tmp_path):
    write_log(tmp_path / "log", LINE, validation=None)
    with pytest.raises(ValueError, match="did the run finish"):
        log_reader.read_log(tmp_path / "log")


def test_unigram_entropy(tmp_path):
    with IndexedDatasetWriter(str(tmp_path / "d"), "<u2") as writer:
        writer.add_document([[3, 3, 7, 9]])
    assert summary.unigram_entropy(str(tmp_path / "d")) == pytest.approx(1.5 * math.log(2))


def test_only_runs_that_have_learned_and_are_long_are_compared(tmp_path):
    def compared(validation: float, steps: int) -> str:
        runs = {}
        for name, loss in ("a", validation), ("b", validation + 0.1):
            write_log(tmp_path / name, dataclasses.replace(LINE, iteration=steps), validation=loss)
            runs[name] = log_reader.read_log(tmp_path / name)
        return summary.table(runs, entropy=5.0)

    long, untrained, short = compared(4.0, 300), compared(5.5, 300), compared(4.0, 10)
    assert "(+2.5 %)" in long and "1.0x less" in long and "not compared" not in long
    assert "(+1.8 %)" not in untrained and "losses are not compared" in untrained and "speeds" not in untrained
    assert re.search(r"tokens per second +8,000 +8,000$", short, re.MULTILINE) and "speeds are not compared" in short
    assert "losses are" not in short


def test_follow_shortens_training_lines_and_keeps_the_others(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"error: no data\n{format_training_line(LINE)}\n"))
    summary.follow()
    error, line = capsys.readouterr().out.splitlines()
    assert error == "error: no data"
    assert " ".join(line.split()) == (
        "step 10/20 loss 5.250 lr 1.00e-03 norm inf 8,000 tokens/s 24.00 MB between nodes per step 0:00:05 left"
    )


def test_quickstart_shows_loss_and_traffic_of_both_runs(quickstart):
    results = quickstart.folder / "runs" / "quickstart"
    assert (results / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = {name: re.findall(rf"^{name}.*", quickstart.output, re.MULTILINE) for name in ("validation", "MB between")}
    assert all(len(found) == 1 for found in rows.values()), quickstart.output
    less = re.search(r"\(([\d.]+)x less\)", rows["MB between"][0])
    assert less is not None and float(less[1]) > 4
    zero3, zeropp = (log_reader.read_log(results / f"{name}.log") for name in ("zero3", "zeropp"))
    assert [line["iteration"] for line in zeropp.lines] == [1]  # 3 steps, a line every 10
    assert zeropp.validation_loss == pytest.approx(zero3.validation_loss, rel=0.02)
    assert "\n    def test_" in quickstart.output  # the sample
