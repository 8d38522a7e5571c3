"""Training as a user starts it, on one and several ranks, with every feature that changes how a step is computed."""

import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.loader import make_batch
from megatron_zpp.families import find_architecture
from megatron_zpp.models.init import init_weights
from megatron_zpp.zeropp.recipes import DEFAULT, RECIPES
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import NO_DROPOUT, ended, flags, start, take_step, torchrun, train_each

STEPS, BATCH = 4, 8
SAME = f"{NO_DROPOUT} --weight-decay 0.1 --train-iters {STEPS}"  # as the plain loop


# The user's way


def test_learns(data):
    zeropp = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"
    argv = flags(data, zeropp, "--train-iters 16 --lr 1e-2 --num-workers 1 --lr-decay-style cosine --log-interval 8")
    argv += ["--global-batch-size", "4"]
    out, _ = ended(torchrun(4, argv, "pretrain_llama.py"))
    losses = [float(loss) for loss in re.findall(r"\| lm loss: (\S+) \|", out)]
    assert losses[0] > 5.3 and losses[-1] < 4.3  # ln 257 = 5.55
    assert "iteration       16/      16 | consumed samples:           64 |" in out
    assert re.search(r"validation loss at iteration 16 on test set \| lm loss value: [34]\.", out)
    assert float(re.search(r"between nodes per step \(MB\): (\S+)", out)[1]) > 0


# Against plain PyTorch


def plain_training(data: str, architecture: str, eod_mask_loss: bool) -> tuple[list[float], float]:
    """The loss of each of STEPS steps and the validation loss after them, by the shortest loop that says the same."""
    settings = parse_settings(find_architecture(architecture), flags(data, NO_DROPOUT))
    model = find_architecture(architecture).build_model(settings.model, 257).to_empty(device="cpu")
    init_weights(model, seed=1234)
    options = SampleOptions(seq_length=32, seed=1234, eod=256, eod_mask_loss=eod_mask_loss)
    train, valid, _ = build_datasets(options, data_path=[data], num_samples=(STEPS * BATCH, BATCH, BATCH))

    def loss_of(dataset, first):
        batch = make_batch(np.stack([dataset[i] for i in range(first, first + BATCH)]), options)
        losses = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        return (losses * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()

    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)])
    losses = []
    for step in range(STEPS):
        loss = loss_of(train, step * BATCH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, loss_of(valid, 0).item()


@pytest.fixture(scope="module")
def plain_gpt(data) -> tuple[list[float], float]:
    return plain_training(data, "gpt", eod_mask_loss=False)


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_stage_and_number_of_ranks_trains_like_a_plain_loop(data, plain_gpt, world_size):
    losses, validation = plain_gpt
    choices = [f"--zero-stage {stage}" for stage in ((0, 3) if world_size == 1 else range(4))]
    choices.append(f"--micro-batch-size {BATCH // world_size}")  # no accumulation
    runs = {choice: flags(data, SAME, choice) for choice in choices}
    for metrics in run_ranks(world_size, train_each, runs):
        for name, run in metrics.items():
            assert run["lm loss"] == pytest.approx(losses, rel=1e-5), name
            assert run["lm loss validation"] == pytest.approx([validation], rel=1e-5), name


def test_llama_averages_over_the_unmasked_tokens_of_all_ranks(data):
    losses, validation = plain_training(data, "llama", eod_mask_loss=True)
    argv = flags(data, SAME, "--eod-mask-loss --calculate-per-token-loss")
    run = run_ranks(4, train_each, {"": argv}, "llama")[0][""]
    assert run["lm loss"] == pytest.approx(losses, rel=1e-5)
    assert run["lm loss validation"] == pytest.approx([validation], rel=1e-5)


# ZeRO++


HPZ = "--zero-hpz-partition-size"
EXACT = [*RECIPES][1]
NODES = "--zeropp-ranks-per-node {per_node}"
QUANTIZED = {
    "qwZ": "--zero-quantized-weights",
    "qgZ": f"--zero-quantized-gradients {NODES}",
    "LoCo": f"--zero-quantized-gradients {NODES} --zeropp-loco",
    "all": f"--zero-quantized-weights --zero-quantized-gradients --zeropp-loco {HPZ} {{per_node}}",
}


@pytest.mark.parametrize("world_size, per_node, names", [(1, 1, ["all"]), (2, 1, ["LoCo"]), (4, 2, QUANTIZED)])
def test_zeropp_trains_like_zero_3(data, plain_gpt, world_size, per_node, names):
    losses, validation = plain_gpt
    common = f"{SAME} --eval-interval 2"
    runs = {name: flags(data, common, QUANTIZED[name].format(per_node=per_node)) for name in names}
    if per_node > 1:
        runs["hpZ"] = flags(data, common, f"{HPZ} {per_node}")
        runs[EXACT] = flags(data, common, f"--zeropp {EXACT} {NODES.format(per_node=per_node)}")
    metrics = run_ranks(world_size, train_each, runs)[-1]
    # Stale weights in hpZ's secondary partition, after an optimizer step or an evaluation, would show here.
    for exact in (metrics.pop(name) for name in ("hpZ", EXACT) if name in metrics):
        assert exact["lm loss"] == pytest.approx(losses, rel=1e-6)
        assert exact["lm loss validation"][-1] == pytest.approx(validation, rel=0.02)  # other samples than the loop's
    for name, run in metrics.items():
        assert run["lm loss"] == pytest.approx(losses, rel=5e-3), name
        moved = losses[0] - losses[-1]
        assert run["lm loss"][-1] == pytest.approx(losses[-1], abs=0.05 * moved), name
        if world_size > 1:  # quantized indeed
            assert run["lm loss"] != pytest.approx(losses, rel=1e-6), name


@pytest.mark.parametrize(
    "stages",
    [{DEFAULT: (1, 2, 3)}, pytest.param({EXACT: (1, 3), [*RECIPES][-1]: (2, 3)}, marks=pytest.mark.long)],
    ids=["default", "exact and most rounded"],
)
def test_weights_that_stay_between_micro_batches_train_the_same_and_send_no_more(data, plain_gpt, stages):
    """Stage 2 keeps what stage 3 gathers again; stage 1 also adds up whole gradients in fp32, and rounds them once."""
    common = f"{SAME} --bf16 --eval-interval 2 {NODES.format(per_node=2)}"
    recipes = [(recipe, stage) for recipe, of_recipe in stages.items() for stage in of_recipe]
    runs = {(name, stage): flags(data, common, f"--zeropp {name} --zero-stage {stage}") for name, stage in recipes}
    metrics = run_ranks(4, train_each, runs)[-1]
    between, within = (f"comm/bytes-{link}-nodes" for link in ("between", "within"))
    for (recipe, stage), run in metrics.items():
        again = metrics[recipe, 3]
        assert run["lm loss"] == pytest.approx(plain_gpt[0], rel=1e-2), (recipe, stage)
        assert run[between][1:] == pytest.approx(again[between][1:], rel=0.1)  # moved codes and one reduction
        assert stage == 3 or run[within][-1] < again[within][-1]
        for key in ("lm loss", "lm loss validation", "grad-norm") if stage == 2 else ():
            assert run[key] == again[key], (recipe, key)


# Memory and precision


def test_activation_checkpointing_changes_nothing(data):
    granularities = {
        "none": "",
        "full": "--recompute-granularity full",
        "selective": "--recompute-activations",
        "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "modules": "--recompute-granularity selective --recompute-modules core_attn mlp",
    }
    common = "--train-iters 2 --global-batch-size 4 --eval-iters 0"  # with dropout
    runs = {name: flags(data, more, common) for name, more in granularities.items()}
    metrics = run_ranks(2, train_each, runs)[0]
    for name, run in metrics.items():
        assert run["lm loss"] == pytest.approx(metrics["none"]["lm loss"], rel=1e-6), name
        assert run["grad-norm"] == pytest.approx(metrics["none"]["grad-norm"], rel=1e-5), name


def assert_offloading_changes_no_bit(data, layouts: dict[str, str], architecture: str = "llama") -> None:
    runs = {}
    for layout, more in layouts.items():
        plain = flags(data, layout, "--train-iters 2 --eval-iters 0 --log-params-norm")
        runs |= {layout: plain, f"{layout} offloaded": [*plain, *more.split()]}
    metrics = run_ranks(2, train_each, runs, architecture, timeout=600)[-1]  # which has the last stage
    for layout in layouts:
        offloaded = metrics[f"{layout} offloaded"]
        for key in ("lm loss", "grad-norm", "params-norm"):
            assert len(offloaded[key]) == 2 and offloaded[key] == metrics[layout][key], (layout, key)


ALL_LAYERS = "--cpu-offloading-num-layers 2"


def test_offloaded_activations_change_no_bit(data):
    low_bits = "--bf16 --zero-quantized-weights --zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1"
    assert_offloading_changes_no_bit(
        data, {low_bits: "--cpu-offloading-num-layers 1", "": f"{ALL_LAYERS} --recompute-granularity full"}
    )


@pytest.mark.long
def test_offloaded_activations_change_no_bit_in_any_layout(data):
    experts = "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32"
    pipeline, mlps = "--num-layers 4 --pipeline-model-parallel-size 2", "--recompute-granularity selective"
    virtual = "--num-layers-per-virtual-pipeline-stage 1"
    assert_offloading_changes_no_bit(
        data,
        {
            "--zero-stage 1 --attention-dropout 0.1": ALL_LAYERS,
            "--tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0.1": ALL_LAYERS,
            "--tensor-model-parallel-size 2 --hidden-dropout 0.1": f"{ALL_LAYERS} {mlps} --recompute-modules mlp",
            "--context-parallel-size 2": ALL_LAYERS,
            f"{pipeline} --pipeline-schedule 1f1b": ALL_LAYERS,
            f"{pipeline} --pipeline-schedule interleaved {virtual}": "--cpu-offloading-num-layers 1",
            f"{pipeline} --pipeline-schedule zero-bubble": f"{ALL_LAYERS} {mlps} --recompute-modules core_attn",
            f"{pipeline} --pipeline-schedule zbv {virtual}": "--cpu-offloading-num-layers 1",
            f"{experts} --expert-model-parallel-size 2 --bf16": f"{ALL_LAYERS} {mlps} --recompute-modules moe",
            f"{experts} --tensor-model-parallel-size 2 --sequence-parallel": ALL_LAYERS,
        },
    )


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_offloaded_activations_of_compiled_blocks_change_no_bit(data):
    assert_offloading_changes_no_bit(data, {"--compile": "--cpu-offloading-num-layers 1"})


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled(data):
    common = f"{NO_DROPOUT} --num-layers 1 --train-iters 3 --recompute-granularity full --num-experts 4"
    runs = {more: flags(data, common, more) for more in ("", "--compile")}
    metrics = run_ranks(1, train_each, runs)[0]  # each rank would compile
    assert metrics["--compile"]["lm loss"] == pytest.approx(metrics[""]["lm loss"], rel=1e-5)


def test_gradients_handed_over_in_bf16_are_those_in_fp32_to_the_bit(data):
    """They are bf16 as autograd makes them, and all sums are in fp32; so is what is sent unquantized between nodes."""
    common = "--bf16 --zero-quantized-gradients --zeropp-ranks-per-node 2 --zeropp-loco --zeropp-gradient-block-size 32"
    length = "--train-iters 3 --eval-iters 0"
    kinds, precisions = (
        ("", "--zeropp-gradient-sum-dtype int8"),
        ("", "--accumulate-allreduce-grads-in-fp32"),
    )
    runs = {
        kind + precision: flags(data, common, length, kind, precision) for kind in kinds for precision in precisions
    }
    results = run_ranks(4, train_each, runs)[0]
    for kind in kinds:
        in_bf16, in_fp32 = (results[kind + precision] for precision in precisions)
        assert in_bf16["lm loss"] == in_fp32["lm loss"] and in_bf16["grad-norm"] == in_fp32["grad-norm"]


def _parameters_after_two_steps(argv: list[str], overflow_between: bool) -> list[torch.Tensor]:
    run, _ = start(argv)

    def step(batch: int, overflow: bool = False) -> None:
        change = (lambda batch: batch | {"loss_mask": batch["loss_mask"] * torch.inf}) if overflow else None
        result = take_step(run, batch * BATCH, BATCH // dist.get_world_size(), change)
        assert result.is_skipped == overflow

    step(0)
    if overflow_between:
        step(2, overflow=True)
        assert run.scaler.scale == 256
    step(1)
    return [parameter.detach().to_local() for parameter in run.model.parameters()]


def test_an_overflow_changes_neither_parameters_nor_locos_errors(data):
    argv = flags(
        data,
        NO_DROPOUT,
        "--fp16 --initial-loss-scale 512 --hysteresis 1 --zero-quantized-gradients --zeropp-loco",
        "--zeropp-ranks-per-node 1 --optimizer sgd --lr 1.0",  # Adam would hide a wrong scale
    )
    calls = {overflow: partial(_parameters_after_two_steps, argv, overflow) for overflow in (False, True)}
    expected, result = (of_ranks[0] for of_ranks in run_in_turn(2, calls).values())
    ours, theirs = (torch.cat([parameter.flatten() for parameter in of_run]) for of_run in (result, expected))
    # fp16 rounds otherwise at another scale, which may carry a gradient to the next code.
    others = (ours - theirs).abs() > 1e-5 + 1e-3 * theirs.abs()
    assert others.float().mean() < 1e-3


def test_exit_interval_and_duration(data, tmp_path):
    save = f"--save {tmp_path} --overwrite-save --save-interval 100"
    runs = {
        "interval": flags(data, save, "--exit-interval 3"),
        "duration": flags(data, save, "--exit-duration-in-mins 0"),
    }
    metrics = run_ranks(2, train_each, runs)[0]
    assert {name: len(run["lm loss"]) for name, run in metrics.items()} == {"interval": 3, "duration": 1}
    assert all("lm loss validation" not in run for run in metrics.values())  # it exits at once
    assert {path.name for path in tmp_path.glob("iter_*")} == {"iter_0000001", "iter_0000003"}
