"""The study's page says what its results say."""

import copy
import functools
import re
import sys
import tomllib
from dataclasses import replace

import common
import papers
import pytest
import reproduce
import study
import study_tables
import study_trials
import torch
import torch.distributed as dist
from common import ROOT
from study_arms import RANKS, SCALES, Arm, Experiment, Group, Scale
from study_experiments import EXPERIMENTS, FP32
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard

from megatron_zpp.models.mlp import Activation, GatedMLP
from megatron_zpp.zeropp.recipes import RECIPES
from tests.ranks import run_ranks


def _row(flags: str, seed: int, loss: float) -> dict:
    return {"flags": flags, "seed": seed, "validation_loss": loss, "bytes_per_parameter": 1.5}


@functools.cache
def paper_rows() -> dict[str, list[tuple[str, str, str, str]]]:
    return reproduce.rows_of_claims(tomllib.loads(reproduce.CLAIMS.read_text()))


def test_pages_have_the_tables_of_the_results(monkeypatch):
    rows = paper_rows()  # takes seconds
    monkeypatch.setattr(reproduce, "rows_of_claims", lambda claims: rows)
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--check"])
    reproduce.main()


PAIR = r"([+-]?\d+\.\d+) ± (\d+\.\d+)"


def test_every_interval_that_a_page_or_a_claim_quotes_stands_in_a_table_of_the_results():
    tables = [reproduce.table_of(name) for name in EXPERIMENTS]
    tables += [study_tables.table_of_feedback(e, reproduce.rows_of(e.scale)) for e in EXPERIMENTS.values()]
    tables.append(reproduce.finetuning_bits.table())
    found = {pair for table in tables for pair in re.findall(PAIR, table)}
    found |= {(mean.lstrip("+-"), half) for mean, half in found}  # "loses 2.25 ± 0.31 %"
    texts = {str(page): page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]}
    texts["reproduce.toml"] = reproduce.CLAIMS.read_text()
    quoted = {(pair, name) for name, text in texts.items() for pair in re.findall(PAIR, text.replace("−", "-"))}
    assert len({pair for pair, _ in quoted}) > 100
    assert {(" ± ".join(pair), name) for pair, name in quoted if pair not in found} == set()
    for name, text in texts.items():  # "1.3 ± 0.2" and "0.4 ± 1 %" would not be found in any table
        assert re.findall(r"[\d.]+ ± (?!\d+\.\d\d\b)[\d.]+ %", text) == [], name


def test_two_processors_end_as_far_apart_as_the_page_says():
    rows = reproduce.rows_of("tuned")
    again = study.read_results(ROOT / "benchmarks/results/two_processors.jsonl", "tuned")
    ends = []
    for row in again:
        first = rows[row["flags"]][row["seed"]]
        assert (first["processor"], row["processor"]) == ("AMD EPYC", "Intel(R) Xeon(R) Processor")
        ends.append(f"{100 * (row['validation_loss'] / first['validation_loss'] - 1):+.2f} %")
    assert "bf16 ended {} and `int8` {}".format(*ends) in (study_tables.PAGE.parent / "experiments/e19.md").read_text()


def test_the_losses_of_recipes_are_those_of_the_headline():
    """`auto` decides by them."""
    arms = {arm.name.strip("`"): arm for arm in EXPERIMENTS["E19"].groups[0].arms}
    for name, recipe in RECIPES.items():
        if recipe.loss is not None:
            found = list(study_tables.excesses(arms[name], reproduce.rows_of("tuned")).values())
            assert len(found) == 8
            assert study_tables.difference(found) == f"{recipe.loss[0]:+.2f} ± {recipe.loss[1]:.2f} %", name


@pytest.mark.parametrize("name", tomllib.loads(reproduce.CLAIMS.read_text()))
def test_published_results_have_a_source_a_state_and_programs_that_exist(name):
    claim = tomllib.loads(reproduce.CLAIMS.read_text())[name]
    assert claim.keys() >= {"source", "published", "state", "here"} or not claim.keys() & {"published", "state", "here"}
    lines = paper_rows()[name]
    assert lines and all(published and ours and how for published, ours, how, _ in lines)
    verdicts = {"reproduced", "same direction", "not seen", "not resolved", "needs GPUs"}
    assert {verdict for *_, verdict in lines} <= verdicts
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


def test_differences_are_paired_by_seed_and_have_t_intervals():
    ours, control = Arm("ours", "--a", "--c"), Arm("control", "--c", "--c")
    rows = study_tables.by_flags_and_seed(
        [
            *(_row("--c", seed, loss) for seed, loss in ((1, 4.0), (2, 5.0), (3, 4.0), (4, 4.0))),
            *(_row("--a", seed, loss) for seed, loss in ((1, 4.4), (2, 5.6), (3, 4.32), (9, 1.0))),  # +10, 12, 8 %
        ]
    )
    found = study_tables.excesses(ours, rows)
    assert found == pytest.approx({1: 10, 2: 12, 3: 8})
    # The standard deviation is 2; the quantile for 2 degrees of freedom is 4.303.
    assert study_tables.half_width([10, 12, 8]) == pytest.approx(4.303 * 2 / 3**0.5)
    lines = study_tables.table(Experiment("x", (Group("y", (control, ours)),)), rows).splitlines()
    assert "| ours | 4.7733 | +10.00 ± 4.97 % | 3 | higher | 1.50 |" in lines


@pytest.mark.parametrize(
    "values, said",
    [
        ((0.0, 0.1, -0.1), "no loss seen"),  # ± 0.25
        ((0.05, 0.1, 0.15), "no loss seen"),  # clearly above zero, and below 0.3
        ((0.0, 0.2, -0.2), "not resolved"),  # ± 0.5: the mean is zero, and 0.4 % may be lost
        ((1.0, 1.1, 0.9), "higher"),
        ((-1.0, -1.1, -0.9), "lower"),
        ((0.0,), "one seed"),
    ],
)
def test_no_loss_is_said_only_of_an_interval_that_shows_it(values, said):
    assert study_tables.verdict(values) == said


def test_a_second_row_of_a_seed_is_refused():
    with pytest.raises(ValueError, match="two rows of seed 2 of '--a': remove the later one"):
        study_tables.by_flags_and_seed([_row("--a", 1, 4.0), _row("--a", 2, 4.0), _row("--a", 2, 3.9)])


def test_new_seeds_change_every_sentence_that_rests_on_them():
    """A row that lands needs no edit by hand: resolution, verdicts, and those on the paper's losses."""
    e19, e20 = EXPERIMENTS["E19"], EXPERIMENTS["E20"].groups[0].arms
    base, fp32, int8 = (arm.flags for arm in (*e19.groups[0].arms[:2], e19.groups[0].arms[3]))

    def rows(seeds: int) -> study_tables.Rows:
        noise = [0.001 * (-1) ** seed for seed in range(seeds)]
        every = {base: 0.0, fp32: 0.0} | {arm.flags: 2.065 for arm in e20[1:]} | {int8: 3.0}
        return study_tables.by_flags_and_seed(
            [
                _row(flags, seed, 4 * (1 + excess / 100) + (noise[seed] if flags != base else 0))
                for flags, excess in every.items()
                for seed in range(seeds)
            ]
        )

    assert study_tables.resolution(e19, rows(2)).endswith("with 2 seeds.")
    assert study_tables.resolution(e19, rows(8)) == "Intervals are ± 0.02 % with 8 seeds."
    lines = study_tables.table(e19, rows(8)).splitlines()
    assert any(line.startswith("| `int8`") and "| 8 | higher |" in line for line in lines)
    assert any(line.startswith("| fp32") and "| 8 | no loss seen |" in line for line in lines)
    lines = study_tables.table(e19, rows(2)).splitlines()
    assert any(line.startswith("| fp32") and "| not resolved |" in line for line in lines)
    shown = papers.table_5(rows(8)).splitlines()
    assert shown[2].endswith("| 8 | higher | reproduced |")
    assert shown[3].endswith("| 8 | higher | same direction |") and shown[4].endswith("| not seen |")


def _samples_of_a_step(scale: Scale, arm: Arm) -> int:
    words = study.flags_of(scale, arm).split()
    if "--global-batch-size" in words:
        return int(words[words.index("--global-batch-size") + 1])
    sizes = [int(words[i + 1]) for i, word in enumerate(words) if word == "--micro-batch-size"]
    ranks = [int(words[i + 1]) for i, word in enumerate(words) if word in ("--local-ranks", "--emulate-ranks")]
    return sizes[-1] * ranks[-1]


def test_every_scale_fills_in_the_arms_flags():
    arms = {arm.flags: arm for arm in study.arms(list(EXPERIMENTS))}
    for scale in SCALES.values():
        assert _samples_of_a_step(scale, FP32) == scale.micro_batch_size * scale.ranks
        for arm in arms.values() if scale.ranks == RANKS else EXPERIMENTS["E17"].groups[0].arms:
            larger = 4 if "{large}" in arm.flags and "{large}" not in arm.control else 1  # the batch itself is compared
            assert _samples_of_a_step(scale, arm) == larger * _samples_of_a_step(scale, arms[arm.control]), arm.name


@pytest.mark.long
@pytest.mark.evidence
def test_an_arm_that_drops_qgz_halfway_resumes_from_half_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scale = replace(SCALES["tiny"], train_iters=40)
    monkeypatch.setitem(SCALES, "tiny", scale)
    (arm,) = (arm for arm in EXPERIMENTS["E20"].groups[0].arms if arm.begins)
    row = study.train(tmp_path / "rows.jsonl", "tiny", study.make_text("tiny", scale), arm, seed=1)
    first, second = row["command"].split(" && ")
    assert "--zero-quantized-gradients" in first and "--exit-interval 20 " in first
    assert "--zero-quantized-gradients" not in second and "--load begun" in second
    assert len(row["train_losses"]) == 1  # from the one log line, at step 40
    assert common.read_rows(tmp_path / "rows.jsonl")[0]["commit"] == common.COMMIT_AT_START


def _shards_with_outliers():
    """Whether outliers of a sharded model are where a whole one has them."""
    torch.manual_seed(0)
    whole = nn.Sequential(GatedMLP(6, 10, Activation("silu", is_gated=True), bias=False))
    sharded = copy.deepcopy(whole)
    fully_shard(sharded)
    for model in (whole, sharded):
        study_trials.add_outliers(model, 30.0)
    pairs = zip(whole.parameters(), sharded.parameters(), strict=True)
    return all(a.equal(b.full_tensor()) for a, b in pairs), whole[0].linear_fc1_up.weight[:4].abs().max() > 5


def test_arms_with_outliers_have_them_on_ranks_that_shard_the_model():
    for is_equal, is_large in run_ranks(2, _shards_with_outliers):
        assert is_equal and is_large


def _gradients_of_power_sgd():
    """Six steps' gradients of a weight and a bias: DDP's with PyTorch's hook, and the trial's of the ranks' mean."""
    torch.manual_seed(0)
    model = nn.Linear(24, 40)
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    state, own_state = (PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2) for _ in range(2))
    ddp.register_comm_hook(state, powerSGD_hook)
    found = []
    for inputs in torch.randn(6, dist.get_world_size(), 8, 24):
        ddp(inputs[dist.get_rank()]).square().mean().backward()
        model(inputs).square().mean().backward()
        mean = [parameter.grad.clone() for parameter in model.parameters()]
        study_trials.compress(own := [gradient.clone() for gradient in mean], own_state)
        found.append((mean, own, [parameter.grad.clone() for parameter in ddp.parameters()]))
        for m in (ddp, model):
            m.zero_grad()
    return found


def test_the_trial_of_powersgd_makes_of_mean_gradients_what_pytorchs_hook_makes_of_the_ranks():
    for mean, own, expected in run_ranks(2, _gradients_of_power_sgd)[0][2:]:
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
        assert torch.linalg.matrix_rank(own[0]) == 2 < torch.linalg.matrix_rank(mean[0])
