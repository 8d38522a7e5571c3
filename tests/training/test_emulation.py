"""--emulate-ranks through the trainer: the same command line in one process and on real ranks."""

import itertools
import math

import pytest

from megatron_zpp.training.data import batches_of
from megatron_zpp.training.step import accumulate_gradients
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, assert_emulated, flags, start, train_each

EMULATE = ["--emulate-ranks", "4", "--emulate-nodes", "2"]
ALL_FLAGS = (
    "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco "
    "--zeropp-weight-block-size 64 --zeropp-gradient-block-size 32 --zeropp-monitor-interval 1"
)
NOISE = "--zeropp-weight-rounding stochastic --zeropp-gradient-rounding stochastic"
QUANTIZED = "--zero-quantized-weights --zero-quantized-gradients --zeropp-ranks-per-node 2 --zeropp-loco"
MUON = f"{ALL_FLAGS} --optimizer muon --muon-period 2 --muon-momentum-bits 4"
LONG = f"{QUANTIZED} --train-iters 24 --log-params-norm --log-num-zeros-in-grad"
# Two micro-batches a rank with dropout, clipped at 1; five steps, or long enough for a rounding error to flip codes.
RUNS = {
    "all flags": f"{ALL_FLAGS} --eval-interval 2",
    "noise": f"{ALL_FLAGS} {NOISE} --recompute-activations --dataloader-type cyclic",
    "bf16": f"{LONG} --bf16",
    "fp16": f"{LONG} --fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 5",
    "muon": MUON,
    "stage 2": "--zero-stage 2 --zero-quantized-gradients --zeropp-ranks-per-node 2 --bf16 --calculate-per-token-loss",
}


def command(data: str, *more: str) -> list[str]:
    return flags(data, *more, length="--train-iters 5")


@pytest.mark.parametrize(
    "architecture, names",
    [
        ("gpt", ("all flags", "noise")),
        pytest.param("gpt", ("fp16",), marks=pytest.mark.long),
        pytest.param("gpt", ("bf16", "stage 2"), marks=pytest.mark.long),
        pytest.param("llama", ("noise", "muon"), marks=pytest.mark.long),
    ],
)
def test_logs_what_real_ranks_log(data, architecture, names):
    real = run_ranks(4, train_each, {name: command(data, RUNS[name]) for name in names}, architecture)[3]
    argv = {name: command(data, RUNS[name]) + EMULATE for name in names}
    emulated = run_ranks(1, train_each, argv, architecture)[0]
    for name in names:
        assert_emulated(emulated[name], real[name], name)
        assert len(real[name]["lm loss"]) == (24 if LONG in RUNS[name] else 5)
        assert "comm/bytes-between-nodes" in real[name]
        if LONG in RUNS[name]:
            assert sum(1.0 < norm < math.inf for norm in real[name]["grad-norm"]) >= 16  # clipped
    if "fp16" in names:
        scales = real["fp16"]["loss-scale"]
        assert min(scales) < max(scales) and len(set(scales)) > 2


def _steps_of_equal_models(data, more, seeds):
    """By what is rounded, and for each seed: loss and gradients of a step with the same weights on the same samples."""
    found = {"weight": [], "gradient": []}
    for rounded, steps in found.items():
        weights = samples = None
        for seed in seeds:
            stochastic = f"--zero-quantized-{rounded}s --zero-{rounded}-rounding stochastic --zeropp-ranks-per-node 2"
            run, _ = start(command(data, stochastic, NO_DROPOUT, *more, f"--seed {seed}"))
            assert run.zeropp.describe().endswith(f"; seed {seed}")
            if weights is None:
                weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
                samples = list(itertools.islice(batches_of(run, "train", 0), 2 * len(run.ranks)))
            run.model.load_state_dict(weights)
            totals, *_ = accumulate_gradients(run, iter(samples), 2)
            shards = [shard for p in run.model.parameters() for shard in run.ranks.shards_of(p.grad)]
            steps.append([totals[:1], *shards])
    return found


@pytest.mark.parametrize("world_size, more", [(1, EMULATE), (4, [])])
def test_stochastic_rounding_follows_the_seed(data, world_size, more):
    for of_rank in run_ranks(world_size, _steps_of_equal_models, data, more, [1, 1, 2]):
        for rounded, (first, again, other) in of_rank.items():
            assert all(mine.equal(its) for mine, its in zip(first, again, strict=True)), rounded
            shards = [
                (mine, its) for mine, its in zip(first[1:], other[1:], strict=True) if mine.ndim > 1 and len(mine)
            ]
            assert shards and not any(mine.equal(its) for mine, its in shards), rounded


@pytest.mark.parametrize("world_size, more", [(1, EMULATE), pytest.param(4, [], marks=pytest.mark.long)])
def test_an_evaluation_leaves_the_bytes_of_training_steps_as_they_are(data, world_size, more):
    """It gathers changed weights between nodes, and units that stay gathered, in the next step's stead."""
    arms = {
        "ZeRO-3": "--zeropp-ranks-per-node 2",
        "ZeRO-2, int8 weights": "--zero-stage 2 --zero-quantized-weights --zeropp-ranks-per-node 2",
        "hpZ": "--zero-hpz-partition-size 2",
    }
    runs = {
        (name, interval): command(data, arm, *more, "--train-iters 3 --eval-interval", interval)
        for name, arm in arms.items()
        for interval in ("2", "3")
    }
    metrics = run_ranks(world_size, train_each, runs)[-1]
    for name in arms:
        for key in ("comm/bytes-between-nodes", "comm/bytes-within-nodes"):
            with_evaluation, without = (metrics[name, interval][key] for interval in ("2", "3"))
            assert len(set(without)) == 1 and without[0] > 0, (name, key)
            # Whether weights are still those of the evaluation is looked up in the step after it, in a few bytes.
            assert with_evaluation == pytest.approx(without, rel=1e-4), (name, key)


@pytest.mark.parametrize(
    "saves, loads, settings",
    [
        ("emulated", ["emulated", "real"], f"{ALL_FLAGS} {NOISE}"),
        pytest.param("real", ["emulated"], MUON, id="muon"),
    ],
)
def test_checkpoints_pass_between_emulated_and_real_ranks(data, tmp_path, saves, loads, settings):
    def losses(kind, *more):
        argv = command(data, settings, *more, *(EMULATE if kind == "emulated" else []))
        return run_ranks(1 if kind == "emulated" else 4, train_each, {"": argv})[-1][""]["lm loss"]

    whole = losses("emulated")
    assert losses(saves, f"--save {tmp_path} --save-interval 3 --exit-interval 3") == whole[:3]
    for kind in loads:
        assert losses(kind, f"--load {tmp_path}") == whole[3:], kind
