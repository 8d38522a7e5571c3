"""tools/report.py on what real runs wrote."""

import contextlib
import dataclasses
import importlib.util
import io
import re
import shlex
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.commands import report
from megatron_zpp.commands.plan import calibrate_from
from megatron_zpp.commands.report import BETWEEN, WITHIN, main, summary
from megatron_zpp.families import GPT
from megatron_zpp.metrics.history import DASHBOARD, METRICS, RunHistory, find_runs, read_training
from megatron_zpp.metrics.writers import MetricWriters, RunStart
from megatron_zpp.planning.cluster import parse_cluster
from megatron_zpp.planning.predict import predict, predict_logged
from megatron_zpp.planning.search import make_plan
from megatron_zpp.settings.groups import LoggingSettings
from megatron_zpp.training.pretrain import train
from megatron_zpp.training.setup import build_trainer
from tests import tools
from tests.ranks import run_ranks
from tests.training.small_run import flags

ZEROPP = "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-monitor-interval 2"
SHOWN = "--log-throughput --peak-tflops 1 --eval-interval 4"
KEYS = [key for of_group in DASHBOARD.values() for key in of_group.values()]


def _train_and_write(runs: dict[str, list[str]]) -> dict[str, str]:
    """Train each run with its writers; return its output on this rank."""
    outputs = {}
    for name, argv in runs.items():
        settings = parse_settings(GPT, argv, dist.get_world_size(), note=lambda text: None)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run = build_trainer(GPT, settings, torch.device("cpu"))
            train(run, time.monotonic())
            run.writers.close()
        outputs[name] = out.getvalue()
    return outputs


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A folder of two runs, ``loco`` and ``coarse``, and the output of each."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {"loco": "--zeropp-loco", "coarse": "--zeropp-gradient-bits 2"}
    argvs = {
        name: flags(data, ZEROPP, SHOWN, more, f"--tensorboard-dir {folder / name}") for name, more in runs.items()
    }
    return folder, run_ranks(4, _train_and_write, argvs)[-1]


@pytest.fixture(scope="module")
def runs(trained):
    return {Path(name).name: read_training(Path(name).name, path) for name, path in find_runs([trained[0]]).items()}


def printed(field: str, log: str) -> list[float]:
    return [float(value) for value in re.findall(rf"{re.escape(field)}: (\S+)", log)]


def test_page_compares_the_runs(trained, runs, tmp_path, capsys):
    folder, logs = trained
    page = tmp_path / "page.html"
    assert main([str(folder), "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"2 runs: {page}\n"
    text = page.read_text()
    assert text.count('<svg role="img"') == text.count("</svg>") == len(KEYS) + 6  # losses also over other axes
    assert not re.search(r"""(src|href)="(?!#)|url\((?!#)""", text)  # nothing is fetched
    assert page.stat().st_size < 400_000
    found = re.findall(r"<tr><th>([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>", text)
    rows = {name: cells for name, *cells in reversed(found)}  # the first of a name
    names = rows[""]
    assert set(names) == {"loco", "coarse"}
    assert rows["tokens"] == ["2,048", "2,048"]
    # Validation at 4 and 8, then the test set, is what the log has.
    for name, loss, megabytes in zip(
        names, rows["validation loss (last)"], rows["MB between nodes per step (mean)"], strict=True
    ):
        assert float(loss) == pytest.approx(printed("lm loss value", logs[name])[1], abs=1e-4)
        sent = printed("sent between nodes per step (MB)", logs[name])
        assert float(megabytes) == pytest.approx(sum(sent) / len(sent), abs=2e-3)
    loco = names.index("loco")
    sent, over = ([cells for name, *cells in found if name == "MB between nodes per step (mean)"][i] for i in range(2))
    assert over == ["1 x", f"{float(sent[1]) / float(sent[0]):.4g} x"]  # over the first run's
    assert all(rows["command"]) and all(rows["hardware"])
    assert (rows["zeropp_loco"][loco], rows["zeropp_gradient_bits"][1 - loco]) == ("True", "2")
    assert "tensorboard_dir" not in rows and "seq_length" not in rows


def test_a_run_reads_back_as_it_was_printed(trained, runs):
    run, log = runs["loco"], trained[1]["loco"]
    assert set(KEYS) <= set(run.metrics)  # every chart of the dashboard has its key from the trainer
    assert list(run.metrics["lm loss"]) == list(range(1, 9))
    assert list(run.metrics["lm loss"].values()) == pytest.approx(printed("lm loss", log), rel=1e-6)
    assert [tokens for tokens, _ in run.curve("lm loss", "tokens")] == [8 * 32 * i for i in range(1, 9)]
    sent = [1e6 * value for value in printed("sent between nodes per step (MB)", log)]
    curve = run.curve("lm loss validation", "bytes sent between nodes")
    assert [nbytes for nbytes, _ in curve] == pytest.approx([sum(sent[:4]), sum(sent)], rel=1e-2)
    errors = list(run.metrics["comm/error/gradients/inter"].values())
    assert errors == pytest.approx(printed("error of gradients/inter", log), abs=1e-4) and len(errors) == 4
    error_states = run.metrics["comm/error-state/gradients/inter"]
    assert run.metrics["comm/error/gradients/inter/layers.0"].keys() == error_states.keys()


def test_tensorboard_has_the_dashboard(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    events = EventAccumulator(str(trained[0] / "loco")).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(DASHBOARD)
    found = []
    for chart in (chart for category in layout.category for chart in category.chart):
        (pattern,) = chart.multiline.tag
        tags = [tag for tag in events.Tags()["scalars"] if re.compile(pattern).match(tag)]  # as TensorBoard does
        assert len(tags) == 1, f"{chart.title} shows {tags}"
        found += tags
    assert found == KEYS


def test_megabytes_are_means_over_steps_not_points():
    points = {1: 10e6, 5: 20e6, 8: 30e6}  # 1, 4 and 3 steps
    losses = dict.fromkeys(points, 2.0)
    run = RunHistory("run", {}, {"lm loss": losses, BETWEEN: points, WITHIN: {4: 1e6, 5: 6e6}})
    figures = summary(run)
    assert figures["MB between nodes per step (mean)"] == f"{(10 + 4 * 20 + 3 * 30) / 8:.3f}"
    assert figures["MB within nodes per step (mean)"] == f"{(4 * 1 + 6) / 5:.3f}"
    del run.metrics[BETWEEN]
    assert summary(run)["MB between nodes per step (mean)"] == ""


def test_bad_input_gets_one_line(tmp_path, capsys):
    for name in ("empty", "older"):
        (tmp_path / name).mkdir()
    (tmp_path / "older" / "events.out.tfevents.1").touch()
    MetricWriters(RunStart(LoggingSettings(), str(tmp_path / "nothing")), is_writer=True).close()
    for folder, message in {
        "missing": "there is no folder",
        "empty": "holds no metrics.jsonl: give a run's --metrics-dir, --tensorboard-dir or --save",
        "older": "TensorBoard shows the events in it, which an older version wrote",
        "nothing": "holds no training losses",
    }.items():
        assert main([str(tmp_path / folder), "--output", str(tmp_path / "page.html")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(SystemExit):
        main([])


CLUSTER = parse_cluster("2x2xH100@100")
SHAPE = "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 --bf16"
TRAINED = "--train-iters 10 --lr 1e-3 --mock-data --vocab-size 1000 --global-batch-size 8"


def test_predictions_beside_measurements(tmp_path, capsys):
    """The prediction is the one that tools/plan.py ranks; what was measured is computed here by hand."""
    pytest.importorskip("matplotlib")
    program = {"architecture": "gpt", "padded_vocab_size": 1024, "world_size": 4}
    argv = f"{SHAPE} {TRAINED} --zero-quantized-weights --zeropp-ranks-per-node 2".split()
    program["command"] = shlex.join(["pretrain_gpt.py", *argv])
    settings = parse_settings(GPT, argv, 4, note=lambda text: None).as_flat_dict()
    start = RunStart(LoggingSettings(), str(tmp_path / "run"), settings, program=program)
    writers = MetricWriters(start, is_writer=True)
    for step, seconds in enumerate((9.0, 0.4, 0.6, 0.5), start=1):
        waited = {f"comm/seconds-waited-{link}-nodes": seconds / n for link, n in (("between", 2), ("within", 10))}
        writers.write(
            {"lm loss": 1.0, "batch-size": 8, "tokens-per-second": 8 * 2048 / seconds} | waited, step, 8 * step
        )
    writers.close()
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "run"), "--output", str(page), "--cluster", "2x2xH100@100"]) == 0, capsys.readouterr()
    cells = dict(re.findall(r"<tr><th>ms for ([^<]*)</th><td>([^<]*)</td></tr>", page.read_text()))
    predicted, measured = zip(*(map(float, cell.split(", ")) for cell in cells.values()), strict=True)
    assert measured == (500, 250, 50, 200)
    only_data = ["--tensor-model-parallel-size", "1"]
    plan = make_plan(GPT, [*argv, *only_data], 1024, CLUSTER)
    (time,) = {outcome.prediction.time.seconds: outcome.prediction.time for outcome in plan.outcomes}.values()
    rest = time.compute + time.compression + time.optimizer
    expected = (time.seconds, time.exposed_between, time.exposed_within, rest)
    assert predicted == pytest.approx([1000 * seconds for seconds in expected], abs=0.06) and predicted[0] > 10
    calibrated = calibrate_from(parse_cluster("8x2xH100@100"), tmp_path / "run")
    needs = predict_logged(read_training("run", tmp_path / "run" / METRICS), CLUSTER).needs
    time = predict(dataclasses.replace(calibrated, nodes=2), needs).time
    assert time.seconds - time.exposed_between - time.exposed_within == pytest.approx(0.2)
    assert "matrix products reach" in capsys.readouterr().out and calibrated.nodes == 8
    with pytest.raises(ValueError, match="4 ranks, which are no whole nodes of 8 GPUs"):
        calibrate_from(parse_cluster("1x8xH100@100"), tmp_path / "run")
    for cluster, message in ("2x4xH100@100", "had 4"), ("nothing", "neither a file nor of the form"):
        assert main([str(tmp_path / "run"), "--output", str(page), "--cluster", cluster]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="does not say its architecture, command, padded_vocab_size, world_size"):
        predict_logged(RunHistory("old", {"seq_length": "32"}), parse_cluster("2x2xH100@100"))


@pytest.mark.skipif(importlib.util.find_spec("wandb_workspaces") is not None, reason="wandb_workspaces is installed")
def test_missing_wandb_workspaces_is_named(capsys):
    assert main(["--wandb", "project"]) == 2
    assert capsys.readouterr().err == "error: --wandb needs two packages: pip install wandb wandb-workspaces\n"


def test_a_run_of_step_0_alone_and_folders_named_as_formulas_or_hidden_labels():
    run = RunHistory("$$", metrics={"lm loss": {0: 1.0}, BETWEEN: {0: 8.0}})
    assert summary(run)["MB between nodes per step (mean)"] == ""
    drawing = report._plot("mfu", "iteration", {"$$": [(0, 1.0)], "_name": [(0, 2.0)]}, {"$$": "C0", "_name": "C1"})
    assert "$$" in drawing and "_name" in drawing


@pytest.mark.integrations
def test_an_experiments_view_and_report_in_wandb_have_all_charts_of_its_runs_alone():
    view, page = report.wandb_pages("project", "owner", "loco")
    section = view._to_model().spec.section  # as it is sent
    grids = page.blocks[1::2]
    keys = {group: [[key] for key in charts.values()] for group, charts in DASHBOARD.items()}
    keys["Loss"].append(["lm loss"])  # over tokens
    assert [[panel.y for panel in grid.panels] for grid in grids] == [*keys.values()]
    sections = section.panel_bank_config.sections
    assert {each.name: [panel.config.metrics for panel in each.panels] for each in sections} == keys
    (chosen,) = section.run_sets[0].filters["filters"]
    assert (chosen["key"], chosen["op"], chosen["value"]) == ({"section": "run", "name": "group"}, "=", "loco")
    assert {grid.runsets[0].filters for grid in grids} == {"Metric('Group') == 'loco'"}


@pytest.mark.integrations
def test_a_missing_wandb_login_is_one_line(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    command = ["python", "-m", "megatron_zpp", "report", "--wandb", "project"]
    said = tools.run(*command, status=2, HOME=str(tmp_path)).stderr
    assert said == "error: --wandb project: No API key configured. Use `wandb login` to log in.\n"
