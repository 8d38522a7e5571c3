"""Expert parallelism: every layout trains as one rank does, tokens' bytes are counted, and its checkpoints move."""

from __future__ import annotations

import re

import pytest

from tests.parallel.layouts import EPS, Run, assert_same, results_on
from tests.training.small_run import err_after_a_kill, flags, torchrun, write_text

EXPERTS = (
    "--num-layers 4 --num-experts 4 --moe-ffn-hidden-size 40 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.001 "
    "--micro-batch-size 2"
)
MODELS = {  # architecture and flags
    "like Mixtral": ("llama", EXPERTS),
    "like GPT": (
        "gpt",
        f"{EXPERTS} --moe-layer-freq 2 --moe-shared-expert-intermediate-size 24 "
        "--moe-router-topk 1 --moe-router-pre-softmax --hidden-dropout 0 --attention-dropout 0",
    ),
}
MODELS["a pyramid of residual experts"] = (
    "gpt",
    f"{EXPERTS} --hidden-dropout 0 --attention-dropout 0 --moe-layer-freq 2 --moe-first-layer 2 --moe-residual "
    "--num-experts 8 --moe-experts-per-layer 4,8",
)
HIERARCHY = (
    "--zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-gradient-bits 0 --zeropp-gradient-intra-bits 0"
)
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SOME = {
    "ep 2, hierarchy, selectively recomputed": f"{EP2} {HIERARCHY} --recompute-activations",
    "tp 2, ep 2": f"{TP2} {EP2} --sequence-parallel",
}
MORE = {
    "ep 4, hierarchy": f"{EP4} {HIERARCHY}",
    "ep 2 at stage 1, per token": f"{EP2} --zero-stage 1 --calculate-per-token-loss",
    "ep 2 at stage 0": f"{EP2} --zero-stage 0",
    "ep 2 at stage 2, recomputed": f"{EP2} --zero-stage 2 --recompute-granularity full",
    "tp 4": "--tensor-model-parallel-size 4",
    "tp 2, ep 2, not sequence-parallel": f"{TP2} {EP2}",
    "pp 2, ep 2": f"{PP2} {EP2}",
    "zero-bubble, ep 2": f"{PP2} {EP2} --pipeline-schedule zero-bubble --num-layers-per-virtual-pipeline-stage 1",
    "zero-bubble, ep 2, selectively recomputed": f"{PP2} {EP2} --pipeline-schedule zero-bubble --recompute-activations",
    "cp 2, ep 2": f"--context-parallel-size 2 {EP2}",
    "offloaded": f"{EP2} --cpu-offload",
}
SIGMOID = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-router-topk-scaling-factor 1.5"
)
QUANTIZED = (
    "--bf16 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco "
    "--zeropp-weight-moves"
)
LOSSES = ("load balancing loss", "router z-loss")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def runs(data: str, model: str, layouts: dict[str, str], iterations: int) -> dict[str, Run]:
    architecture, shape = MODELS[model]
    common = f"{shape} {EPS} --log-params-norm --lr-decay-style constant"
    return {
        name: (architecture, flags(data, common, layout, length=f"--train-iters {iterations}"))
        for name, layout in layouts.items()
    }


def assert_all_train_alike(data: str, model: str, layouts: dict[str, str], iterations: int) -> None:
    expected = results_on(1, runs(data, model, {"": ""}, iterations))[""]
    for name, result in results_on(4, runs(data, model, layouts, iterations)).items():
        # Rounding turns a token to another expert now and then; its gradient jumps, and the losses hardly move.
        assert_same(result, expected, name, tolerance=1e-4)
        for key in ("lm loss", *LOSSES):
            assert result[0][key] == pytest.approx(expected[0][key], rel=1e-5), f"{name}, {key}"


def test_training_equals_one_rank(data):
    assert_all_train_alike(data, "like Mixtral", SOME, 3)


@pytest.mark.long
def test_every_layout_trains_as_one_rank(data):
    assert_all_train_alike(data, "like Mixtral", SOME | MORE, 5)


@pytest.mark.long
def test_shared_experts_and_biases_train_as_on_one_rank(data):
    some = {name: MORE[name] for name in ("ep 4, hierarchy", "tp 4", "pp 2, ep 2", "cp 2, ep 2")}
    assert_all_train_alike(data, "like GPT", SOME | some, 5)


@pytest.mark.long
def test_a_pyramid_of_residual_experts_trains_as_on_one_rank(data):
    assert_all_train_alike(data, "a pyramid of residual experts", SOME | {"pp 2, ep 2": MORE["pp 2, ep 2"]}, 5)


@pytest.mark.long
def test_checkpoints_and_biases_move_between_layouts(data, tmp_path):
    """Of a model whose experts are balanced by biases: saved by one layout, and trained on by the others."""
    save, load = f"--save {tmp_path} --save-interval 3 --no-async-save", f"--load {tmp_path} --override-data"
    whole = results_on(1, runs(data, "like Mixtral", {"": SIGMOID}, 5))[""]
    biases = [value for name, value in whole[1].items() if name.endswith("expert_bias")]
    assert len(biases) == 4 and all(bias.any() for bias in biases)  # an odd number of steps up or down
    results_on(4, runs(data, "like Mixtral", {"": f"{SIGMOID} {EP2} {save}"}, 3))
    layouts = {"ep 4": EP4, "tp 2, ep 2": f"{TP2} {EP2}", "pp 2, ep 2": f"{PP2} {EP2}"}
    resumed = results_on(
        4, runs(data, "like Mixtral", {name: f"{SIGMOID} {flags} {load}" for name, flags in layouts.items()}, 5)
    )
    for name, result in resumed.items():
        assert len(result[0]["lm loss"]) == 2
        assert_same(result, whole, name)


@pytest.mark.long
def test_a_resume_with_low_bits_goes_on_to_the_bit(data, tmp_path):
    shape = f"{QUANTIZED} {EP2}"
    whole = results_on(4, runs(data, "like Mixtral", {"": shape}, 6))[""]
    save, load = f"--save {tmp_path} --save-interval 3 --no-async-save", f"--load {tmp_path}"
    results_on(4, runs(data, "like Mixtral", {"": f"{shape} {save}"}, 3))
    resumed = results_on(4, runs(data, "like Mixtral", {"": f"{shape} {load}"}, 6))[""]
    assert resumed[0]["lm loss"] == whole[0]["lm loss"][3:]
    assert_same(resumed, whole, "resumed", tolerance=0)


@pytest.mark.long
def test_tokens_are_counted_and_may_travel_in_few_bits(data):
    """Two nodes of one rank. Each choice of a token makes four rows travel: there and back, and their gradients."""
    common = (
        f"{EP2} --zeropp-ranks-per-node 1 --moe-router-topk 4"  # each token goes to all four experts, two on each rank
    )
    layouts = {
        "fp32": "",
        "int8": "--moe-token-bits 8",
        "int4": "--moe-token-bits 4",
        "recomputed": "--recompute-granularity full",
    }
    ran = results_on(2, runs(data, "like Mixtral", {name: f"{common} {flags}" for name, flags in layouts.items()}, 4))
    sent = {name: log_lines(result[2]) for name, result in ran.items()}
    hidden, layers, tokens = 32, 4, 8 * 32
    rows = layers * tokens * 4 // 2  # of a step: half of a token's choices are of the other rank
    row_bytes = {"fp32": 4 * hidden, "int8": 48, "int4": 32}  # codes and a scale, up to a multiple of 16
    for name, size in row_bytes.items():
        assert sent[name] == pytest.approx([4 * rows * size / 1e6] * 4, abs=0.0006), name
    assert sent["recomputed"] == pytest.approx([6 * rows * row_bytes["fp32"] / 1e6] * 4, abs=0.0006)
    exact = ran["fp32"][0]["lm loss"]
    assert ran["int8"][0]["lm loss"] == pytest.approx(exact, rel=1e-3)
    assert ran["int8"][0]["lm loss"] != exact
    assert ran["int4"][0]["lm loss"] == pytest.approx(exact, rel=2e-2)


def log_lines(text: str) -> list[float]:
    return [float(megabytes) for megabytes in re.findall(r"tokens sent between nodes per step \(MB\): ([\d.]+)", text)]


@pytest.mark.long
def test_a_killed_rank_ends_the_job_and_is_named(data):
    _, shape = MODELS["like GPT"]
    err_after_a_kill(torchrun(4, flags(data, shape, EP4, length="--train-iters 100000")), 2)
