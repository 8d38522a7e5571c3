"""The study's page says what its results say."""

import re
import statistics
import sys
import tomllib
from dataclasses import replace

import common
import pytest
import reproduce
import study
import study_tables
from study_arms import FP32, RANKS, SCALES, Arm, Experiment, Group, Scale
from study_experiments import EXPERIMENTS

from megatron_zpp.zeropp.recipes import LOSS_BUDGET, RECIPES


def _row(flags: str, seed: int, loss: float) -> dict:
    return {"flags": flags, "seed": seed, "validation_loss": loss, "bytes_per_parameter": 1.5}


def test_the_page_has_the_tables_of_the_results(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--check"])
    reproduce.main()


PAIR = r"([+-]?\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)"
OF_A_DEFECT = {("11.1", "2"), ("10.4", "1.5")}  # E14's, before it was mended


def test_every_mean_and_spread_in_the_text_and_in_the_claims_stands_in_a_table_of_the_results():
    page = re.sub(r"(?s)<!-- claims -->.*<!-- end of claims -->", "", study_tables.PAGE.read_text()).replace("−", "-")
    tables = " ".join(line for line in page.splitlines() if line.startswith("|"))
    text = " ".join(line for line in page.splitlines() if not line.startswith("|"))
    text += " ".join(claim["here"] for claim in tomllib.loads(reproduce.CLAIMS.read_text()).values())
    cells = [(abs(float(mean)), float(spread)) for mean, spread in re.findall(PAIR, tables)]
    pairs = set(re.findall(PAIR, text.replace("−", "-"))) - OF_A_DEFECT
    assert len(pairs) > 20
    for mean, spread in pairs:  # "0.3 % below" has no sign
        near_mean, near_spread = (0.51 * 10 ** -len(number.partition(".")[2]) for number in (mean, spread))
        assert any(
            abs(a - abs(float(mean))) <= near_mean and abs(b - float(spread)) <= near_spread for a, b in cells
        ), (mean, spread)


def test_the_losses_of_recipes_are_those_of_their_nearest_arms():
    rows = reproduce.kept_rows()

    def excesses(experiment: str, group: int, name: str, control: str = FP32.flags) -> list[float]:
        (arm,) = (arm for arm in EXPERIMENTS[experiment].groups[group].arms if arm.name == name)
        return study_tables.excesses(replace(arm, control=control), rows)

    fastest = "--lr 0.002 --min-lr 0.0002"  # the fp32 wire's best learning rate, of E13
    nearest = {
        "int8": excesses("E5", 1, "int4 differences, 8-4 gradients, LoCo between nodes"),
        "int6": excesses("E12", 2, "int6, moved codes"),
        "ternary": excesses("E12", 3, "int6, moved codes, learning rate 0.0014", fastest),
    }
    for name, found in nearest.items():
        assert RECIPES[name].loss == pytest.approx((statistics.mean(found), statistics.stdev(found)), abs=0.0051), name
    spreads = [statistics.stdev(excesses("E5", 1, arm.name)) for arm in EXPERIMENTS["E5"].groups[1].arms]
    assert max(spreads) == pytest.approx(LOSS_BUDGET, abs=0.01)


@pytest.mark.parametrize("name", tomllib.loads(reproduce.CLAIMS.read_text()))
def test_published_results_have_a_source_a_state_and_programs_that_exist(name):
    claim = tomllib.loads(reproduce.CLAIMS.read_text())[name]
    assert claim["source"] and claim["published"] and claim["state"] in ("seen", "not seen", "not run")
    commands = [command for scale in ("laptop", "gpu", "full") for command in claim.get(scale, [])]
    for program in re.findall(r"(?:benchmarks|examples)/\S+\.(?:py|sh)", " ".join(commands)):
        assert (common.ROOT / program).exists()
    assert claim["laptop"] and reproduce.time_of(claim) != "0 min"


def test_titles_say_how_many_parameters_their_models_have():
    counted = {(row["scale"], row["flags"]): row.get("num_parameters") for row in common.read_rows(study.RESULTS)}
    said = {}
    for experiment in EXPERIMENTS.values():
        for group in experiment.groups:
            if found := re.search(r"([\d.]+)M parameters", group.title):
                sizes = {counted.get((experiment.scale, arm.flags)) for arm in group.arms} - {None}  # old rows lack it
                said[group.title] = sizes
                assert {round(size / 1e6, 1) for size in sizes} <= {float(found[1])}, group.title
    assert sum(map(bool, said.values())) >= 5


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
        assert _samples_of_a_step(scale, FP32) == scale.micro_batch_size * scale.ranks
        for arm in arms.values() if scale.ranks == RANKS else EXPERIMENTS["E17"].groups[0].arms:
            assert _samples_of_a_step(scale, arm) == _samples_of_a_step(scale, arms[arm.control]), arm.name


def test_every_arm_has_flags_of_its_own():
    named: dict[str, set[str]] = {}
    for experiment in EXPERIMENTS.values():
        for group in experiment.groups:
            assert len({arm.flags for arm in group.arms}) == len(group.arms)
            for arm in group.arms:
                named.setdefault(arm.name + group.title, set()).add(arm.flags)
    assert all(len(flags) == 1 for flags in named.values())
