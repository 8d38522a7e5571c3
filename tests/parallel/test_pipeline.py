"""Pipeline parallelism through the trainer: schedules, ZeRO++ inside of stages, faults."""

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

from megatron_zpp.parallel.stages import place_stages
from tests.parallel.layouts import assert_same, results_on
from tests.ranks import run_ranks
from tests.training.small_run import (
    NO_DROPOUT,
    ended,
    flags,
    ranks_of,
    start,
    torchrun,
    train_each,
    train_quietly,
    wait_for_iteration,
)

FOUR_LAYERS = f"--num-layers 4 --train-iters 5 --eval-interval 3 --log-params-norm {NO_DROPOUT}"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq 2"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"


def test_selective_recomputation_serves_every_part_of_a_backward_pass(data):
    """zero-bubble and zbv run backward passes in parts; each part needs the matrix products that were kept.

    Dense layers and layers with experts take turns.
    """
    common = f"{FOUR_LAYERS} {PP2} --untie-embeddings-and-output-weights --recompute-activations {EXPERTS}"
    layouts = {
        "1f1b": "",
        "zero-bubble": "--pipeline-schedule zero-bubble",
        "zbv": f"--pipeline-schedule zbv {VIRTUAL}",
    }
    length = "--train-iters 2 --global-batch-size 4 --eval-iters 0"
    argvs = {name: ("gpt", flags(data, common, of, length)) for name, of in layouts.items()}
    results = results_on(2, argvs)
    for name in ("zero-bubble", "zbv"):
        assert results[name][0]["lm loss"] == results["1f1b"][0]["lm loss"], name
        assert_same(results[name], results["1f1b"], name)


ALL_FLAGS = (
    "--zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-loco "
    "--zeropp-weight-block-size 32 --zeropp-gradient-block-size 32 --zeropp-monitor-interval 1"
)
TWO_NODES = "--zeropp-ranks-per-node 2"


@pytest.mark.long
def test_weights_and_gradients_cross_nodes_once_per_step(data):
    """Four micro-batches on pp 2 * dp 4 against two on dp 4, both on two nodes."""
    common = f"--num-layers 4 --global-batch-size 16 --eval-iters 0 --lr 1e-3 {NO_DROPOUT} {TWO_NODES}"
    runs = {"plain": "", "all flags": ALL_FLAGS, "zero-bubble": f"{ALL_FLAGS} --pipeline-schedule zero-bubble"}
    runs["hpZ alone"] = "--zero-hpz-partition-size 2"
    argvs = {name: ("llama", flags(data, common, PP2, more, length="--train-iters 6")) for name, more in runs.items()}
    results = {name: metrics for name, (metrics, _, _) in results_on(8, argvs).items()}
    del runs["zero-bubble"], runs["hpZ alone"]
    argvs = {name: ("llama", flags(data, common, more, length="--train-iters 6")) for name, more in runs.items()}
    expected = {name: metrics for name, (metrics, _, _) in results_on(4, argvs).items()}

    # The first stage and the last: hidden states there and gradients back, between processes of one machine.
    hidden = 4 * 4 * 2 * (1 * 32 * 32 * 4)  # dp ranks * micro-batches * directions * [B, S, H] in fp32
    for name in ("all flags", "zero-bubble"):
        assert results[name]["lm loss"] == pytest.approx(expected["all flags"]["lm loss"], rel=1e-3)
        assert results[name]["comm/bytes-between-nodes"] == expected["all flags"]["comm/bytes-between-nodes"]
        assert results[name]["comm/error/gradients/inter"] == pytest.approx(
            expected["all flags"]["comm/error/gradients/inter"], rel=0.1
        )
        assert {"comm/error/weights/stage0.layers.0", "comm/error/weights/stage1.layers.3"} <= results[name].keys()
    sent = [of["all flags"]["comm/bytes-within-nodes"][-1] - hidden * (of is results) for of in (results, expected)]
    assert sent[0] == sent[1]
    assert results["plain"]["lm loss"] == pytest.approx(expected["plain"]["lm loss"], rel=1e-5)
    assert results["hpZ alone"]["lm loss"] == pytest.approx(results["plain"]["lm loss"], rel=1e-6)


def _train_with_nan(argv: list[str]) -> tuple[str, int]:
    """Return the output, and the skipped steps; a layer of the second stage spoils the second step."""
    calls = []

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        calls.append(1)
        return output * float("nan") if 8 < len(calls) <= 16 + 8 else None  # the step, and when it is computed again

    run, _ = start(argv)
    if run.mesh.pp_rank == 1:
        run.model.get_submodule("layers.1.mlp.linear_fc1").register_forward_hook(hook)
    return train_quietly(run), run.counters.skipped_iterations


def test_nan_on_one_stage_is_skipped_by_all_and_found(data):
    argv = flags(data, FOUR_LAYERS, PP4, "--eval-iters 0 --clip-grad 0 --train-iters 3")
    results = run_ranks(4, _train_with_nan, argv)
    assert [skipped for _, skipped in results] == [1] * 4
    assert "it began in the output of layers.1.mlp.linear_fc1 on rank 1 on" in results[0][0]
    assert "layers.2" not in results[0][0]


ENDLESS = f"{FOUR_LAYERS} {PP4} --train-iters 100000"


def test_a_killed_stage_ends_the_job_and_is_named(data):
    process = torchrun(4, flags(data, ENDLESS))
    wait_for_iteration(process, 3)
    os.kill(ranks_of(process)[2], signal.SIGKILL)
    _, err = ended(process, status=1)
    report = err.partition("Root Cause (first observed failure)")[2]
    assert "rank      : 2 (local_rank: 2)" in report and "host      : " in report and "Signal 9" in report, err


@pytest.mark.long  # it stops torchrun for 10 s
def test_other_stages_name_the_exchange_that_a_killed_one_broke(data):
    for _ in range(3):  # a kill may also meet them in a collective
        process = torchrun(4, flags(data, ENDLESS), warm=False)
        wait_for_iteration(process, 3)
        process.send_signal(signal.SIGSTOP)  # it would end the other stages, maybe before they say anything
        threading.Timer(10, process.send_signal, [signal.SIGCONT]).start()
        os.kill(ranks_of(process)[2], signal.SIGKILL)
        _, err = ended(process, status=1)
        if "failed in the exchange with a neighbouring pipeline stage" in err:
            return
    pytest.fail(err)


def test_a_pipeline_evaluates_without_training(data):
    argv = flags(data, NO_DROPOUT, "--skip-train")
    alone, staged = (run_ranks(n, train_each, {"": [*argv, *more]})[-1][""] for n, more in ((1, []), (2, PP2.split())))
    assert staged["lm loss validation"] == pytest.approx(alone["lm loss validation"], rel=1e-5)


def test_stages_are_dealt_to_ranks():
    assert [len(layers) for layers in place_stages(7, 3, None, 1, 2).layers] == [1, 4, 2]
    assert place_stages(8, 2, 2).stages_of(1) == [1, 3]
    assert place_stages(8, 2, 2, v_shaped=True).stages_of(0) == [0, 3]
