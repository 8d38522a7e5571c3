"""--islands through the trainer: what they log, resumption, and what is refused."""

from functools import partial

import pytest

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import GPT
from tests.parallel.layouts import EPS, assert_same, results_on
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import NO_DROPOUT, Metrics, flags, train_each

ISLANDS = "--islands 2 --island-sync-interval 3"
ZEROPP = (
    "--zeropp-ranks-per-node 1 --zero-quantized-weights --zero-quantized-gradients --zeropp-loco "
    "--zeropp-weight-block-size 64 --zeropp-gradient-block-size 32"
)
LOW_BITS = "--island-bits 2 --island-loco"
STREAMING = "--island-fragments 2 --island-sync-delay 2 --island-merge-alpha 0.5"
LOGS = "--log-params-norm --log-num-zeros-in-grad --zeropp-monitor-interval 1"
RUNS = {
    "low bits": f"{ISLANDS} {ZEROPP} {LOW_BITS} {LOGS} --eval-interval 4",
    "streaming": f"{ISLANDS} {ZEROPP} {LOW_BITS} {STREAMING} --optimizer muon --muon-period 2",
    "fp16": f"{ISLANDS} {ZEROPP} --island-bits 4 --fp16 --initial-loss-scale 1048576 --hysteresis 1 "
    "--loss-scale-window 5",
    "every step": "--islands 2 --island-sync-interval 1",
}


def _losses_and_bytes(argv: list[str]) -> list[list[float]]:
    metrics = train_each({"": argv})[""]
    return [metrics["lm loss"], metrics["comm/bytes-between-islands"]]


@pytest.mark.parametrize(
    "kind", ["streaming", *(pytest.param(k, marks=pytest.mark.long) for k in ("low bits", "every step", "fp16"))]
)
def test_a_resume_is_exact(data, tmp_path, kind):
    """Also between synchronizations: what is in flight arrives.

    At every step: torch steps an optimizer to load its state, which islands do not count.
    """
    argv = flags(data, RUNS[kind], "--train-iters 6")
    save = f"--save {tmp_path} --save-interval 4 --exit-interval 4".split()
    calls = {"whole": argv, "begun": [*argv, *save], "rest": [*argv, "--load", str(tmp_path)]}
    found = run_in_turn(4, {name: partial(_losses_and_bytes, words) for name, words in calls.items()})
    for rank in range(4):
        whole, begun, rest = (found[name][rank] for name in calls)
        assert [one + other for one, other in zip(begun, rest, strict=True)] == whole and len(rest[0]) == 2
    assert max(found["whole"][3][1]) > 0


def _mean_losses(ranks: list[dict[str, Metrics]]) -> dict[str, list[float]]:
    """Return each run's losses, the mean of what the islands' ranks would write."""
    per_rank = {name: [rank[name]["lm loss"] for rank in ranks] for name in ranks[0]}
    return {name: [sum(step) / len(step) for step in zip(*losses, strict=True)] for name, losses in per_rank.items()}


def test_a_run_that_begins_as_one_resumes_in_islands(data, tmp_path):
    """With its optimizer, whose steps have the momentum of those before. The mean of SGD's steps is a step of all."""
    argv = flags(data, NO_DROPOUT, "--optimizer sgd --sgd-momentum 0.9 --lr 0.1 --clip-grad 0 --save-interval 2")
    argv += ["--train-iters", "4"]
    mean = "--islands 2 --island-sync-interval 1 --island-outer-lr 1"
    runs = {
        "one": argv,
        "begun": [*argv, "--save", str(tmp_path), "--exit-interval", "2"],
        "islands": [*argv, "--load", str(tmp_path), *mean.split(), "--island-outer-momentum", "0"],
    }
    losses = _mean_losses(run_ranks(2, train_each, runs))
    assert len(losses["islands"]) == 2
    assert losses["begun"] + losses["islands"] == pytest.approx(losses["one"], rel=1e-5)


def _validation(commands: dict[str, list[str]]) -> dict[str, float]:
    return {name: train_each({"": argv})[""]["lm loss validation"][-1] for name, argv in commands.items()}


@pytest.mark.long
def test_the_outer_model_goes_to_other_numbers_of_islands(data, tmp_path):
    """Each run ends where the first one did, and evaluates its outer parameters."""
    common = f"{NO_DROPOUT} --train-iters 8 --load {tmp_path} --save-interval 8"
    saved = flags(data, common, f"{ISLANDS} --save {tmp_path}")
    to = {"none": "", "four": "--islands 4", "two, finer": "--islands 2 --island-bits 8", "ZeRO-1": "--zero-stage 1"}
    losses = run_ranks(
        4, _validation, {"saved": saved} | {name: flags(data, common, more) for name, more in to.items()}
    )
    for rank in losses:
        for name, loss in rank.items():
            assert loss == pytest.approx(rank["saved"], rel=1e-6), name


@pytest.mark.long
def test_beside_other_kinds_of_parallelism(data):
    """Islands of two ranks that share a model train as islands of one do."""
    common = f"--num-layers 4 {NO_DROPOUT} {EPS} --train-iters 6 --log-params-norm {ISLANDS}"
    layouts = {
        "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
        "pp": "--pipeline-model-parallel-size 2",
        "cp": "--context-parallel-size 2",
    }
    expected = results_on(2, {"": ("gpt", flags(data, common))}, islands=2)[""]
    results = results_on(4, {name: ("gpt", flags(data, common, more)) for name, more in layouts.items()}, islands=2)
    for name, result in results.items():
        assert_same(result, expected, name)


def test_no_sample_is_seen_twice(data):
    """Islands of any number train on the batches of data parallelism, in its order."""
    argv = flags(data, NO_DROPOUT, "--train-iters 1")
    runs = {str(number): [*argv, "--islands", str(number)] for number in (1, 2, 4)}
    losses = _mean_losses(run_ranks(4, train_each, runs))
    for number in ("2", "4"):  # the initial weights' loss on the first batch
        assert losses[number] == pytest.approx(losses["1"], rel=1e-6)


@pytest.mark.parametrize(
    "base, world_size, more, message",
    [
        ("", 4, "--islands 3", "--islands 3 does not divide the 4 data-parallel rank.s.; choose one of 1, 2, 4"),
        ("", 4, "--island-bits 4", "--island-bits needs --islands above 1"),
        ("--islands 2", 4, "--island-loco", "--island-loco returns what was lost"),
        ("--islands 2", 4, "--island-bits 7", "--island-bits must be one of"),
        ("--islands 2", 4, "--zero-stage 0", "--zero-stage 0 has none"),
        ("--islands 2", 4, "--num-distributed-optimizer-instances 2", "leave one out"),
        ("--islands 2", 4, "--calculate-per-token-loss", "leave one out"),
        ("--islands 2", 4, "--loss-spike-factor 2", "leave one out"),
        ("--islands 2", 4, "--island-fragments 3", "are more than the 2 layer"),
        ("--islands 2", None, "--local-ranks 6 --local-nodes 3 --global-batch-size 6", "choose|of whole nodes"),
        ("--islands 2", 4, "--zero-hpz-partition-size 4", "does not divide the 2 rank"),
        ("--islands 2", 4, "--publish y", "--publish has the weights of one model, which does not"),
    ],
)
def test_what_does_not_go_with_islands_is_refused(data, base, world_size, more, message):
    with pytest.raises(SettingsError, match=message):
        parse_settings(GPT, flags(data, base, more), world_size)
