"""--islands through the trainer: resumption, and what is refused."""

import math
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.islands.outer_state import local_data
from megatron_zpp.training.islands import prepare_island
from tests.islands.elastic_jobs import secret_file
from tests.parallel.layouts import EPS, assert_same, results_on
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, call_pretrain, flags, start, train_each, train_quietly

ISLANDS = "--islands 2 --island-sync-interval 3"
ZEROPP = (
    "--zeropp-ranks-per-node 1 --zero-quantized-weights --zero-quantized-gradients --zeropp-loco "
    "--zeropp-weight-block-size 64 --zeropp-gradient-block-size 32"
)
LOW_BITS = "--island-bits 2 --island-loco --island-block-size 32"
STREAMING = "--island-fragments 2 --island-sync-delay 2 --island-merge-alpha 0.5"
LOGS = "--log-params-norm --log-num-zeros-in-grad --zeropp-monitor-interval 1"
RUNS = {
    "low bits": f"{ISLANDS} {ZEROPP} {LOW_BITS} {LOGS} --eval-interval 4",
    "streaming": f"{ISLANDS} {ZEROPP} {LOW_BITS} {STREAMING} --optimizer muon --muon-period 2",
    "fp16": f"{ISLANDS} {ZEROPP} --island-bits 4 --fp16 --initial-loss-scale 1048576 --hysteresis 1 "
    "--loss-scale-window 5",
    "every step": "--islands 2 --island-sync-interval 1",
    "offload": f"{ISLANDS} {LOW_BITS}",
}


def _losses_and_bytes(argv: list[str]) -> list[list[float]]:
    metrics = train_each({"": argv})[""]
    return [metrics["lm loss"], metrics["comm/bytes-between-islands"]]


@pytest.mark.parametrize(
    "kind, saves",
    [
        ("streaming", []),
        ("every step", []),
        ("offload", ["--island-offload"]),
        pytest.param("low bits", [], marks=pytest.mark.long),
    ],
)
def test_a_resume_is_exact(data, tmp_path, kind, saves):
    """Also between synchronizations; what is in flight arrives.

    At every step: torch steps an optimizer to load its state, which islands do not count.
    """
    argv, load = flags(data, RUNS[kind], "--train-iters 6"), ["--load", str(tmp_path)]
    save = f"--save {tmp_path} --save-interval 4 --exit-interval 4".split() + saves
    whole, begun, rest = (run_ranks(4, _losses_and_bytes, [*argv, *more])[-1] for more in ([], save, load))
    assert [one + other for one, other in zip(begun, rest, strict=True)] == whole and len(rest[0]) == 2


def test_a_run_that_begins_as_one_resumes_in_islands(data, tmp_path):
    """With its optimizer, whose steps have the momentum of those before. The mean of SGD's steps is a step of all."""
    argv = flags(data, NO_DROPOUT, "--optimizer sgd --sgd-momentum 0.9 --lr 0.1 --clip-grad 0 --save-interval 2")
    argv += ["--train-iters", "4"]
    mean = "--islands 2 --island-sync-interval 1 --island-outer-optimizer sgd --island-outer-lr 1"
    runs = {
        "one": argv,
        "begun": [*argv, "--save", str(tmp_path), "--exit-interval", "2"],
        "islands": [*argv, "--load", str(tmp_path), *mean.split(), "--island-outer-momentum", "0"],
    }
    losses = {name: metrics["lm loss"] for name, metrics in run_ranks(2, train_each, runs)[-1].items()}
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
    expected = results_on(2, {"": ("gpt", flags(data, common))})[""]
    results = results_on(4, {name: ("gpt", flags(data, common, more)) for name, more in layouts.items()})
    for name, result in results.items():
        assert_same(result, expected, name)


@pytest.mark.long
def test_experts_are_divided_within_an_island(data):
    experts = f"--disable-bias-linear --num-experts 4 {NO_DROPOUT} {EPS} --train-iters 6 {ISLANDS}"
    layouts = {"all alike": "", "divided": "--expert-model-parallel-size 2"}
    losses = run_ranks(4, train_each, {name: flags(data, experts, more) for name, more in layouts.items()})[-1]
    for key in ("lm loss", "lm loss validation"):
        assert losses["divided"][key] == pytest.approx(losses["all alike"][key], rel=1e-5)


def _train_with_a_broken_island(argv: list[str]) -> tuple[list[float], str, bool]:
    """Return the losses, what was printed, and whether this rank's parameters and moments end as numbers.

    The last island gets NaN in its parameters and moments by step 2, between two synchronizations.
    """
    run, metrics = start(argv)

    def spoil(optimizer, args, kwargs):
        if run.counters.iteration == 1 and dist.get_rank() == 2:
            for parameter, state in optimizer.state.items():
                local_data(parameter).fill_(math.nan)
                local_data(state["exp_avg"]).fill_(math.nan)

    run.optimizer.register_step_post_hook(spoil)
    said = train_quietly(run)
    kept = [*run.model.parameters(), *(state["exp_avg"] for state in run.optimizer.state.values())]
    return metrics.get("lm loss", []), said, all(bool(local_data(tensor).isfinite().all()) for tensor in kept)


def test_an_island_with_nan_comes_back_and_the_run_ends_well(data):
    argv = flags(data, "--islands 3 --island-sync-interval 3 --global-batch-size 6 --train-iters 7 --island-bits 8")
    (*_, (losses, _, _)) = results = run_ranks(3, _train_with_a_broken_island, argv)
    assert all(is_finite for _, _, is_finite in results)
    assert len(losses) == 7 and all(map(math.isfinite, losses))
    assert "is in the parameters of island 2 after step 3: 2 of 3 islands synchronize" in results[0][1]


def test_no_sample_is_seen_twice(data):
    """Islands of any number train on the batches of data parallelism, in its order."""
    argv = flags(data, NO_DROPOUT, "--train-iters 1")
    runs = {str(number): [*argv, "--islands", str(number)] for number in (1, 2, 4)}
    losses = run_ranks(4, train_each, runs)[-1]
    for number in ("2", "4"):  # of the initial weights, on the first batch
        assert losses[number]["lm loss"] == pytest.approx(losses["1"]["lm loss"], rel=1e-6)


def _folders(load: Path) -> list[str | None]:
    """Return what an elastic island would load, as checkpoints come into ``load``."""
    found, its_folder = [], load / "island_1"
    words = f"--global-batch-size 2 --island-lighthouse localhost:1 --island-secret-file {secret_file()} --load {load}"
    for tracker in (None, "", "4", "not an iteration"):
        if tracker is not None:
            its_folder.mkdir(exist_ok=True)
        if tracker:
            (its_folder / "latest_checkpointed_iteration.txt").write_text(tracker)
        settings = parse_settings(GPT, flags("nowhere", ELASTIC, words), 1, note=lambda text: None)
        found.append(prepare_island(settings).checkpoint.load)
    return found


def test_an_elastic_island_loads_its_own_checkpoint_even_if_that_is_damaged(tmp_path):
    """Loading says what is wrong with it, or finds an older one, as --load-latest-good and --ckpt-step ask."""
    assert run_ranks(1, _folders, tmp_path) == [[str(tmp_path)] * 2 + [str(tmp_path / "island_1")] * 2]


ELASTIC = "--islands 2 --islands-may-leave --island-number 1 --island-sync-interval 3"
TRUST = "--island-lighthouse localhost:29510 --island-secret-file island.secret"


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
        (ELASTIC, 2, "--islands 1", "--islands-may-leave needs --islands above 1"),
        (ELASTIC, 2, "--island-number 2", "--island-number 2 must be below --islands 2"),
        (ELASTIC, 2, "--island-fragments 2", "keep in flight"),
        (ELASTIC, 2, "--island-sync-delay 1", "keep in flight"),
        (ELASTIC, 2, "--skip-train", "--skip-train needs no other island"),
        (ELASTIC, 2, "--load x --override-batch-size", "--override-batch-size does not go with --islands-may-leave"),
        (ELASTIC, 2, "--save x --save-interval 4", "--save-interval 4 must be a multiple of --island-sync-interval 3"),
        (ELASTIC, 2, "--exit-interval 5", "--exit-interval 5 must be a multiple of --island-sync-interval 3"),
        (ELASTIC, 2, "--global-batch-size 6", "data-parallel size 4 = 4; use 4 or 8"),
        (ELASTIC, 2, "--tensor-model-parallel-size 4", "= 4 does not divide the 2 rank.s. of this run"),
        (ELASTIC, 2, "--zero-stage 0", "--zero-stage 0 has none"),
        (ELASTIC, 2, "--island-timeout-seconds 0", "--island-timeout-seconds must be above 0"),
    ],
)
def test_what_does_not_go_with_islands_is_refused(data, base, world_size, more, message):
    """World sizes are those of one job."""
    with pytest.raises(SettingsError, match=message):
        parse_settings(GPT, flags(data, base, TRUST if base == ELASTIC else "", more), world_size)


def test_an_elastic_island_must_know_its_number_and_the_lighthouse(data):
    for missing in ("", *re.findall("--[a-z-]+ [^ ]+", TRUST)):
        with pytest.raises(SettingsError, match="by --island-lighthouse and --island-secret-file"):
            parse_settings(GPT, flags(data, ELASTIC, missing), 2)
    with pytest.raises(SettingsError, match=r"which island is this job\? give --island-number, from 0 to 1"):
        parse_settings(GPT, flags(data, f"--islands 2 --islands-may-leave {TRUST}"), 2)
    times = "--island-timeout-seconds 5", "--island-patience-seconds 5"
    for alone in ("--island-number 1", TRUST, "--island-secret-file x", "--island-bind x", *times):
        with pytest.raises(SettingsError, match=f"{alone.split()[0]} needs --islands-may-leave"):
            parse_settings(GPT, flags(data, "--islands 2", alone), 2)
    settings = parse_settings(GPT, flags(data, ELASTIC, TRUST), 2)
    assert settings.training.global_batch_size == 8


@pytest.mark.parametrize("more, left_out", [("--train-iters 8", True), ("--train-iters 9", False)])
def test_last_steps_of_an_elastic_island_without_a_synchronization_are_noted(data, more, left_out):
    notes: list[str] = []
    argv = flags(data, ELASTIC, TRUST, more)
    parse_settings(GPT, argv, 2, note=notes.append)
    note = (
        "the last 2 of 8 steps are not in the outer parameters, which are evaluated and saved: make --train-iters a "
        "multiple of --island-sync-interval 3"
    )
    assert (note in notes) == left_out


def test_an_island_without_a_good_secret_ends_before_it_trains(data, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    secret.chmod(0o644)
    argv = flags(data, ELASTIC, f"--global-batch-size 2 --island-lighthouse localhost:1 --island-secret-file {secret}")
    (((code, _, err),),) = run_ranks(1, call_pretrain, argv)
    assert code == 2 and err.endswith(
        f"error: users other than its owner may read the islands' secret {secret}: chmod 600 {secret}\n"
    )
