"""benchmarks/planner.py: published rows become flags, and the cluster in a box is measured and compared."""

import json
import re

import planner
import planner_box
import planner_published
import pytest

from tests.planning.test_measure import MEASURE_QUICKLY

TINY = f"--num-layers 2 --hidden-size 64 --num-attention-heads 2 {planner_box.COMMON}".replace("256", "32")


def rows() -> dict[str, dict]:
    """One published row of each program."""
    lines = [json.loads(line) for line in planner_published.PUBLISHED.read_text().splitlines()]
    assert all(line["source"] and line["tokens_s_gpu"] > 0 for line in lines)
    return {line["source"].partition("@")[0]: line for line in lines if line["gpus"] <= 512}


@pytest.mark.parametrize("row", rows().values(), ids=lambda row: row["source"].split("@")[0].split("/")[-1])
def test_a_published_row_is_predicted(row):
    found = planner_published.read_row(row)
    assert found.settings.training.seq_length == row["seq"] and found.cluster.world_size == row["gpus"]
    assert found.needs.micro_batches == (row["grad_accum"] or 1)
    # Rates rise with the share of the peak, up to where links or memory set them.
    assert 0 < found.ratio((0.2, 0.2)) < found.ratio((0.4, 0.2)) < found.ratio((0.4, 0.4))


def test_the_fit_finds_the_share_that_made_the_rates():
    found = planner_published.read_row(rows()["mosaicml/llm-foundry"])
    short = planner_published.read_row(dict(found.row, seq=512))
    made = [
        planner_published.dataclasses.replace(
            each, row=dict(each.row, tokens_s_gpu=each.row["tokens_s_gpu"] * each.ratio((0.38, 0.3)))
        )
        for each in (found, short)
    ]
    assert planner_published.fit(made) == pytest.approx((0.38, 0.3))


def test_islands_are_compared_with_one_cluster(monkeypatch):
    """A smaller model on fewer nodes shows it, over a slow link and over one as fast as the nodes'."""
    run = planner.RUN.replace("--global-batch-size 2048", "--global-batch-size 64 --num-layers 4")
    for name, value in {"RUN": run, "SITE": "2x2x8xH100@400", "GBITS": (1, 800)}.items():
        monkeypatch.setattr(planner, name, value)
    _, _, slow, fast = planner.islands().splitlines()
    of_slow, of_fast = ([float(cell) for cell in re.findall(r"([\d.]+)%", row)] for row in (slow, fast))
    zero3, *_, fp32, four_bits, streaming = of_slow
    assert zero3 < 10 < fp32 < four_bits < streaming <= 100
    assert all(0 < share <= 100 for share in of_fast) and of_fast[0] > 5 * zero3


@pytest.mark.long
@pytest.mark.usefixtures("namespaces_allowed")
def test_the_box_is_measured_and_compared(tmp_path, monkeypatch, capsys):
    changes = {
        "MEASURED": tmp_path / "box.jsonl",
        "CLUSTER": tmp_path / "box.yaml",
        "SCATTER": tmp_path / "box.png",
        "TOOL": tmp_path / "measure_quickly.py",
        "MODELS": {"tiny": TINY},
        "SETTINGS": dict([*planner_box.SETTINGS.items()][:2]),
        "SIZES": "--hidden-size 64 --tokens 32",
        "RATES": (1000,),
        "STEPS": {1: 6},
    }
    for name, value in changes.items():
        monkeypatch.setattr(planner_box, name, value)
    planner_box.TOOL.write_text(MEASURE_QUICKLY)
    with pytest.raises(SystemExit, match="nothing is measured yet"):
        planner_box.compare()
    planner_box.measure()
    planner_box.compare()
    out = capsys.readouterr().out
    assert f"{len(planner_box.SETTINGS)} points: median error" in out
    planner_box.measure()  # what is there is not measured again
    assert not capsys.readouterr().out
