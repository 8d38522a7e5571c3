"""Points as metrics.jsonl, TensorBoard, wandb and MLflow have them: after resumes, kills, and runs that go back."""

import dataclasses
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp import files
from megatron_zpp.metrics.history import METRICS, read_run
from megatron_zpp.metrics.writers import MetricWriters, RunStart, _kept, jsonl, training_metrics, validation_metrics
from megatron_zpp.parallel.distributed import FailedTogether, errors_on_all_ranks
from megatron_zpp.settings.groups import LoggingSettings
from tests.conftest import fill
from tests.metrics.test_logging import REPORT
from tests.ranks import run_ranks

HELD = []  # by another process, until it ends


def start(folder: Path, iteration: int | None = 0, lr: float = 1.0, **logging: str) -> RunStart:
    """A start that resumes from ``iteration`` of the run in ``folder``."""
    settings = {"seq_length": 32, "lr": lr, "load": str(folder) if iteration else None, "zero_stage": 3}
    settings |= {"padded_vocab_size": None}  # the program finds it
    goes_on, program = bool(iteration), {"architecture": "gpt", "padded_vocab_size": 64}
    return RunStart(LoggingSettings(**logging), str(folder), settings, {"lr": lr}, program, iteration, goes_on)


def write(begin: RunStart, losses: dict[int, float], validation: dict[int, float] | None = None) -> None:
    writers = MetricWriters(begin, is_writer=True)
    for iteration, loss in losses.items():
        writers.write({"lm loss": loss, "tokens": 64 * iteration}, iteration, 2 * iteration)
    for iteration, loss in (validation or {}).items():
        writers.write({"lm loss validation": loss}, iteration, 2 * iteration)
    writers.close()


def losses(folder: Path) -> dict[int, float]:
    return read_run("run", folder / METRICS).metrics["lm loss"]


def test_metrics_are_where_the_run_is_saved_or_its_events_are_or_where_told(tmp_path: Path) -> None:
    for logging, place in ({}, "save"), ({"tensorboard_dir": "events"}, "events"), ({"metrics_dir": "mine"}, "mine"):
        named = {name: str(tmp_path / folder) for name, folder in logging.items()}
        assert RunStart(LoggingSettings(**named), str(tmp_path / "save")).folder == tmp_path / place
    MetricWriters(RunStart(LoggingSettings()), is_writer=True).write({"lm loss": 1.0}, 1, 1)  # no place, no file


def test_each_line_says_what_the_schema_on_the_page_does(tmp_path: Path) -> None:
    write(start(tmp_path), {1: 9.0, 2: math.inf})
    first, *points = map(json.loads, (tmp_path / METRICS).read_text().splitlines())
    assert (first["schema"], first["iteration"], first["settings"]["lr"]) == (1, 0, 1.0)
    assert [(p["iteration"], p["samples"], p["lm loss"]) for p in points] == [(1, 2, 9.0), (2, 4, None)]
    assert 0 <= points[1].pop("time") - first["time"] < 60
    assert math.isnan(losses(tmp_path)[2])


def test_a_run_that_goes_back_shows_its_new_curve(tmp_path: Path) -> None:
    write(start(tmp_path), {1: 9, 2: 8, 3: 7, 4: 6, 6: 5}, {2: 8.5, 4: 6.5})  # the last checkpoint was of 2
    write(start(tmp_path, 2), {3: 7.5, 4: 6.5})  # fewer iterations
    run = read_run("run", tmp_path / METRICS)
    assert run.metrics["lm loss"] == {1: 9, 2: 8, 3: 7.5, 4: 6.5} and run.last("lm loss validation") == 8.5
    assert run.curve("lm loss", "tokens")[-1] == (4 * 2 * 32, 6.5)
    write(start(tmp_path, iteration=None, lr=0.0), {}, {2: 8.25})  # --skip-train: evaluates alone
    run = read_run("run", tmp_path / METRICS)
    assert run.metrics["lm loss"] == {1: 9, 2: 8, 3: 7.5, 4: 6.5} and run.last("lm loss validation") == 8.25
    assert run.settings["lr"] == 1.0
    write(start(tmp_path), {1: 3.0})  # another run, in the same folder
    assert losses(tmp_path) == {1: 3.0}


def test_a_branch_counts_its_own_bytes_from_where_it_left_the_other_run(tmp_path: Path) -> None:
    sent = "comm/bytes-between-nodes"
    for iteration, steps in (1000, (1002, 1004)), (1002, (1004, 1006)):  # --load A --save B, then a resume
        writers = MetricWriters(start(tmp_path, iteration), is_writer=True)
        for step in steps:
            writers.write({"lm loss": 1.0, sent: 10.0}, step, step)
        writers.close()
    run = read_run("run", tmp_path / METRICS)
    assert run.sum_so_far(sent) == {1002: 20, 1004: 40, 1006: 60} and run.mean(sent) == 10


def test_the_line_that_a_kill_cut_off_costs_no_other_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(start(tmp_path), {1: 9, 2: 8})
    with open(tmp_path / METRICS, "a") as file:
        file.write('{"iteration": 3, "lm lo')
    assert losses(tmp_path) == {1: 9, 2: 8} and "1 lines were cut off" in capsys.readouterr().err
    write(start(tmp_path, 2), {3: 7})
    assert losses(tmp_path) == {1: 9, 2: 8, 3: 7}


def test_time_stands_still_between_a_stop_and_a_resume(tmp_path: Path) -> None:
    """Steps of 2 seconds; the run stops after the fourth, and goes on an hour later from the third."""
    with open(tmp_path / METRICS, "w") as file:
        for begin, steps in ((1000.0, range(1, 5)), (5000.0, range(4, 7))):
            settings = {"settings": {}, "program": {}, "time": begin - 30}
            file.write(json.dumps({"schema": 1, "iteration": steps[0] - 1, **settings}) + "\n")
            for number, step in enumerate(steps):
                point = {"iteration": step, "samples": step, "time": begin + 2 * number, "lm loss": 10 - step}
                file.write(json.dumps(point) + "\n")
    run = read_run("run", tmp_path / METRICS)
    assert run.curve("lm loss", "time") == [(0, 9), (2, 8), (4, 7), (4, 6), (6, 5), (8, 4)]


def hold(folder: Path) -> None:
    HELD.append(MetricWriters(start(folder), is_writer=True))


def refusal(folder: Path) -> str:
    jsonl.PATIENCE_SECONDS = 0.0
    with pytest.raises(FailedTogether) as refused, errors_on_all_ranks():
        MetricWriters(start(folder), is_writer=dist.get_rank() == 1)
    return str(refused.value)


def test_a_second_run_in_a_folder_stops_on_all_ranks(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as another:  # locks belong to processes
        another.apply(hold, (tmp_path,))
        for text in run_ranks(2, refusal, tmp_path):
            assert f"another run writes {tmp_path / METRICS}: give --metrics-dir another folder" in text
    write(start(tmp_path), {1: 9.0})


def test_a_start_that_a_full_disk_refused_is_not_written_behind_its_points(small_disk: Path) -> None:
    """A reader dropped the points before it."""
    filler = fill(small_disk)
    MetricWriters(start(small_disk), is_writer=True)
    filler.unlink()
    disk = small_disk.stat().st_dev
    assert not [file for file in files._LOCKED if not file.closed and os.fstat(file.fileno()).st_dev == disk]
    assert (small_disk / METRICS).stat().st_size == 0


def test_a_file_of_another_schema_or_program_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun, point = '{"schema": 1, "iteration": 0, "settings": {}, "program": {}}\n', '{"iteration": 1, "lm loss": 1.0'
    for lines in (
        *('{"schema": 2, "iteration": 0}', "[1]", '{"loss": 1}', '{"schema": 1, "iteration": 0, "settings": {}}'),
        *(f'{begun}{point}, "samples": 1}}', f'{begun}{point}, "time": 1}}', f'{point}, "samples": 1, "time": 1}}'),
    ):
        (tmp_path / METRICS).write_text(lines + "\n")
        with pytest.raises(ValueError, match="is not of schema 1"):
            losses(tmp_path)
        assert _kept(start(tmp_path, 1)) is None  # and training goes on
        assert "wandb and MLflow go on with the run before" in capsys.readouterr().err


def test_tensorboard_receives_megatrons_keys(tmp_path: Path) -> None:
    writers = MetricWriters(start(tmp_path, tensorboard_dir=str(tmp_path)), is_writer=True)
    report = dataclasses.replace(REPORT, bytes_between_nodes=1000.0)
    writers.write(training_metrics(report), iteration=85, consumed_samples=10880)
    writers.write(validation_metrics({"lm loss": 2.0}), iteration=85, consumed_samples=10880)
    writers.close()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    points = {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}
    both = ["learning-rate", "batch-size", "loss-scale", "grad-norm", "num-zeros", "params-norm"]
    both += ["lm loss", "lm loss validation", "lm loss validation ppl"]
    only_iterations = ["comm/bytes-between-nodes", "iteration-time", "throughput"]
    assert points.keys() == {*both, *(f"{key} vs samples" for key in both), *only_iterations}
    assert points["lm loss"] == [(85, pytest.approx(1.831795))]
    assert points["lm loss vs samples"] == [(10880, pytest.approx(1.831795))]
    assert points["comm/bytes-between-nodes"] == [(85, 1000.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    writers = MetricWriters(start(tmp_path / "run"), is_writer=False)
    writers.write({"lm loss": 1.0}, 1, 1)
    writers.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_writer", [True, False])
def test_missing_wandb_stops_every_rank(is_writer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # an earlier run's folder must not pass for the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match=r"--wandb-project needs the package wandb, of megatron_zpp's extra wandb"):
        MetricWriters(start(tmp_path, wandb_project="p"), is_writer=is_writer)


def wandb_records(path: Path):
    """Read a run's file, which has LevelDB's format: blocks of 32 KiB, of checksum, length, kind, and content."""
    from wandb.proto import wandb_internal_pb2

    content, place, record = path.read_bytes(), 7, b""
    while place + 7 < len(content):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record, place = record + content[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_wandb_shows_the_new_curve_of_a_run_that_goes_back_with_other_settings(tmp_path: Path, monkeypatch) -> None:
    """wandb drops points below a run's last step. What a crash repeats with the same settings needs no new run."""
    pytest.importorskip("wandb.sdk", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, wandb = tmp_path / "mine", {"wandb_project": "p"}
    write(start(folder, **wandb), {1: 9, 2: 8, 3: 7, 4: 6})
    write(start(folder, 2, **wandb), {3: 7, 4: 6, 5: 5})
    write(start(folder, 2, lr=0.5, **wandb), {3: 7.5, 4: 6.5})
    deadline, points = time.monotonic() + 30, list[list[tuple[int, float]]]()
    while sum(map(len, points)) < 4 + 3 + 4 and time.monotonic() < deadline:  # a process of wandb's own writes
        time.sleep(0.05)
        files = sorted(folder.glob("wandb/wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
        records = [list(wandb_records(path)) for path in files]
        points = []
        for of_run in records:
            logged = ({"".join(i.nested_key): i.value_json for i in record.history.item} for record in of_run)
            points.append([(int(values["_step"]), float(values["lm loss"])) for values in logged if values])
    assert points[2] == [(1, 9), (2, 8), (3, 7.5), (4, 6.5)]
    assert files[0].stem == files[1].stem != files[2].stem == f"run-{(folder / 'wandb/run_id').read_text().strip()}"
    for of_run in records:
        (run,) = [record.run for record in of_run if record.WhichOneof("record_type") == "run"]
        assert (run.run_group, run.job_type, list(run.tags)) == ("mine", "train", ["gpt", "ZeRO-3"])
        shown = {item.key for item in run.config.update} - {"_wandb"}
        assert shown == {"lr", "architecture", "padded_vocab_size"}  # the changed settings, and the program
        assert [m.metric.step_metric for m in of_run if m.metric.glob_name == "lm loss*"] == ["tokens"]


@pytest.mark.integrations
def test_mlflow_keeps_one_run_and_begins_another_where_it_goes_back(tmp_path: Path, monkeypatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for iteration, lr, found in ((0, 1.0, {1: 9, 2: 8, 3: 7}), (3, 1.0, {4: 6}), (2, 0.5, {3: 7.5})):
        write(start(tmp_path, iteration, lr, mlflow_experiment="e"), found)
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id], order_by=["start_time"])
    curves = [{m.step: m.value for m in client.get_metric_history(run.info.run_id, "lm loss")} for run in runs]
    assert curves == [{1: 9, 2: 8, 3: 7, 4: 6}, {1: 9, 2: 8, 3: 7.5}]
    assert [run.data.params["lr"] for run in runs] == ["1.0", "0.5"]
    assert runs[0].data.tags["job_type"] == "train" and runs[0].info.status == "FINISHED"
