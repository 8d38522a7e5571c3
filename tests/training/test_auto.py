"""``--zeropp auto``: what is chosen from predictions, equally on all ranks, and kept on resume."""

import re
from dataclasses import replace

import pytest

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import LLAMA
from megatron_zpp.planning.auto import PREDICTION_ERROR, WAYS, choose, predict_recipes
from megatron_zpp.planning.cluster import default_cluster
from megatron_zpp.planning.step import StepTime
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.recipes import LOSS_BUDGET, RECIPES
from tests.training.small_run import NO_DROPOUT, ended, flags, torchrun

PLAIN, EXACT, MORE_BITS, FEWER_BITS, *_ = RECIPES  # from what rounds nothing to what rounds most


def times(**seconds: tuple[float, float]) -> dict[str, tuple[StepTime, StepTime]]:
    return {name: (StepTime(compute=a), StepTime(compute=b)) for name, (a, b) in seconds.items()}


@pytest.mark.parametrize(
    "seconds, budget, chosen",
    [
        ({PLAIN: 9.0, EXACT: 5.0, MORE_BITS: 1.0, FEWER_BITS: 1.02}, LOSS_BUDGET, MORE_BITS),  # rounds less, as fast
        ({PLAIN: 9.0, EXACT: 5.0, MORE_BITS: 1.1, FEWER_BITS: 1.0}, 1.0, FEWER_BITS),
        ({PLAIN: 9.0, EXACT: 5.0, MORE_BITS: 1.1, FEWER_BITS: 1.0}, 0.0, EXACT),
        ({PLAIN: 1.04, EXACT: 1.1, MORE_BITS: 1.0, FEWER_BITS: 1.0}, LOSS_BUDGET, PLAIN),
        ({PLAIN: 1.04, EXACT: 1.03, MORE_BITS: 1.0, FEWER_BITS: 1.0}, LOSS_BUDGET, EXACT),  # both round nothing
        ({PLAIN: 2.0, MORE_BITS: 1.0}, LOSS_BUDGET, MORE_BITS),  # others do not fit
    ],
)
def test_the_least_rounding_of_the_fastest_is_chosen(seconds, budget, chosen):
    assert choose(times(**{name: (s, s) for name, s in seconds.items()}), budget) == chosen


def test_less_memory_goes_before_speed_within_the_error():
    least_memory, faster = f"{PLAIN} {WAYS[0]}", f"{EXACT} {WAYS[1]}"
    assert choose(times(**{least_memory: (1.04, 1.04), faster: (1.0, 1.0)}), LOSS_BUDGET) == least_memory


def test_recipes_within_the_error_of_the_measurement_are_equally_fast():
    measured = times(**{PLAIN: (4, 9), EXACT: (1.3, 1.3), MORE_BITS: (1.0, 1.25), FEWER_BITS: (1.1, 1.2)})
    # No slower than MORE_BITS may be; PLAIN is, though nobody knows how much.
    assert choose(measured, LOSS_BUDGET) == EXACT
    measured |= times(**{EXACT: (1.25 * (1 + PREDICTION_ERROR) + 0.01, 2.0)})
    assert choose(measured, LOSS_BUDGET) == MORE_BITS


def test_recipes_that_do_not_fit_or_lose_are_left_out_and_zero3_never():
    optimizer = "adam"

    def parse(name: str, ranks_per_node: int) -> ResolvedSettings:
        run = "--preset llama-8b --vocab-size 128256 --micro-batch-size 1 --train-iters 9 --lr 1 --mock-data --bf16"
        argv = f"{run} --optimizer {optimizer} --zeropp {name} --zeropp-ranks-per-node {ranks_per_node}".split()
        return parse_settings(LLAMA, argv, 2 * ranks_per_node, note=lambda text: None)

    cluster = default_cluster(2, 8, "H100", 100)

    def refused_with(memory_gb: float, host_gb: float = 0.0) -> dict[str, str]:
        clusters = (replace(cluster, memory_gb=memory_gb, host_gb=host_gb),) * 2
        times, refused = predict_recipes(clusters, LLAMA, parse, 128256)
        assert times.keys() | refused.keys() == every and not times.keys() & refused.keys()
        return refused

    *_, on_cards, in_host, all_in_host = WAYS
    every = {f"{name} {way}" for name in RECIPES for way in WAYS}
    every -= {f"zero3 {way}" for way in (on_cards, in_host, all_in_host)}  # it keeps nothing
    assert refused_with(1000.0) == {}
    assert refused_with(1.0).keys() == every - {f"zero3 {WAYS[0]}"}
    assert all("GB of 1" in why for why in refused_with(1.0).values())
    tight = refused_with(65.9)  # int8's copy fits in host memory alone
    assert {f"int8 {way}" for way in WAYS} - tight.keys() == {f"int8 {in_host}", f"int8 {all_in_host}"}
    assert refused_with(65.9, host_gb=9.0)[f"int8 {in_host}"].endswith("of the 9 of a node's host")
    alone = replace(default_cluster(2, 1, "H100", 1), memory_gb=1000.0)  # only these copies send moves there
    assert choose(predict_recipes((alone, alone), LLAMA, parse, 128256)[0], LOSS_BUDGET).endswith(on_cards)
    optimizer = "muon"
    assert refused_with(1000.0).keys() == {
        name for name in every if RECIPES[name.split()[0]].fields.get("gradient_bits") in (1, 2)
    }


@pytest.mark.long
def test_a_run_decides_before_its_first_step_and_keeps_that(data, tmp_path):
    saved = f"--save {tmp_path} --load {tmp_path} --save-interval 2 --eval-iters 0 --bf16 --lr-decay-iters 9"
    argv = flags(data, NO_DROPOUT, saved, "--zeropp auto --zeropp-ranks-per-node 2", length="--train-iters 2")

    def said(*more: str) -> str:
        return ended(torchrun(4, [*argv, *more]))[0]

    first = said()
    (chosen,) = re.findall(r"^--zeropp auto: ([^(]+) \(.*Measured in \d+ s: 2 nodes of 2 ranks", first, re.MULTILINE)
    assert f"  --zeropp {chosen.split()[0]} stands for --z" in first or chosen.startswith("zero3")
    resumed = said("--train-iters", "4")
    assert f"--zeropp auto: {chosen}, as the checkpoint's run" in resumed and "4/       4 |" in resumed
