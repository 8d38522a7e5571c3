"""The study's page says what its results say."""

from __future__ import annotations

import re
import sys
import tomllib

import common
import pytest
import reproduce
import study
import study_tables
from study_arms import FP32, RANKS, SCALES, Arm, Experiment, Group, Scale
from study_experiments import EXPERIMENTS


def _row(flags: str, seed: int, loss: float) -> dict:
    return {"flags": flags, "seed": seed, "validation_loss": loss, "bytes_per_parameter": 1.5}


def test_the_page_has_the_tables_of_the_results(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--check"])
    reproduce.main()


@pytest.mark.parametrize("name", tomllib.loads(reproduce.CLAIMS.read_text()))
def test_published_results_have_a_source_a_state_and_programs_that_exist(name):
    claim = tomllib.loads(reproduce.CLAIMS.read_text())[name]
    assert claim["source"] and claim["published"] and claim["state"] in ("seen", "not seen", "not run")
    commands = [command for scale in ("laptop", "gpu", "full") for command in claim.get(scale, [])]
    for program in re.findall(r"(?:benchmarks|examples)/\S+\.(?:py|sh)", " ".join(commands)):
        assert (common.ROOT / program).exists()
    results = study.read_results(study.RESULTS, "cpu")
    assert claim["laptop"] and reproduce.time_of(claim, results) != "0 min"


def test_excess_is_seed_by_seed_and_recovery_is_of_the_groups_first_arm():
    nothing, feedback = Arm("nothing", "--a"), Arm("feedback", "--b")
    rows = study_tables.by_flags_and_seed(
        [
            *(_row(FP32.flags, seed, loss) for seed, loss in ((1, 4.0), (2, 5.0), (3, 4.0))),
            *(_row("--a", seed, loss) for seed, loss in ((1, 4.4), (2, 5.5), (3, 4.4))),  # all +10 %
            *(_row("--b", seed, loss) for seed, loss in ((1, 4.2), (2, 5.0), (3, 4.1))),  # +5 %, 0, +2.5 %
        ]
    )
    assert study_tables.excesses(nothing, rows) == pytest.approx([10, 10, 10])
    assert study_tables.recovered(nothing, feedback, rows) == pytest.approx([50, 100, 75])
    table = study_tables.table(Experiment("x", Group("y", (nothing, feedback), recovers=True)), rows)
    assert re.search(r"\| feedback \| 4\.4333 ± 0\.49 \| \+2\.50 ± 2\.5 % \| 75 ± 25 % \| 1\.50 \|", table)


def test_nothing_is_recovered_of_a_loss_within_its_spread():
    nothing, feedback = Arm("nothing", "--a"), Arm("feedback", "--b")
    losses = {FP32.flags: (4.0, 4.0, 4.0), "--a": (4.01, 3.99, 4.02), "--b": (4.0, 4.0, 4.0)}
    rows = study_tables.by_flags_and_seed(
        [_row(flags, seed, loss) for flags, of_seeds in losses.items() for seed, loss in enumerate(of_seeds, 1)]
    )
    assert study_tables.recovered(nothing, feedback, rows) == []


def _samples_of_a_step(scale: Scale, arm: Arm) -> int:
    words = study.flags_of(scale, arm).split()
    if "--global-batch-size" in words:
        return int(words[words.index("--global-batch-size") + 1])
    sizes = [int(words[i + 1]) for i, word in enumerate(words) if word == "--micro-batch-size"]
    ranks = [int(words[i + 1]) for i, word in enumerate(words) if word == "--emulate-ranks"]
    return sizes[-1] * ranks[-1]


def test_every_scale_fills_in_the_arms_flags():
    arms = {arm.flags: arm for arm in study.arms(list(EXPERIMENTS))}
    for scale in SCALES.values():
        assert _samples_of_a_step(scale, FP32) == scale.micro_batch_size * RANKS
        for arm in arms.values():
            assert _samples_of_a_step(scale, arm) == _samples_of_a_step(scale, arms[arm.control]), arm.name


def test_every_arm_has_flags_of_its_own():
    named: dict[str, set[str]] = {}
    for experiment in EXPERIMENTS.values():
        for group in experiment.groups:
            assert len({arm.flags for arm in group.arms}) == len(group.arms)
            for arm in group.arms:
                named.setdefault(arm.name + group.title, set()).add(arm.flags)
    assert all(len(flags) == 1 for flags in named.values())
