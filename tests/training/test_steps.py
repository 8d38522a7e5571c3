"""What a step computes in special cases: growing samples, Muon, host memory, and a spike that is skipped."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags, start, take_step, train_each, train_quietly

# Samples that grow


def _first_step(argv: list[str]) -> tuple[float, float, int]:
    """The loss of the first step, the untrained model's loss of the first 16 tokens, and the tokens left out."""
    run, metrics = start(argv)
    text = torch.stack([torch.as_tensor(run.datasets.train[i]) for i in range(8)])
    with torch.no_grad():
        losses = run.model(text[:, :16], text[:, 1:17])
    train_quietly(run)
    return metrics["lm loss"][0], losses.mean().item(), run.counters.cut_tokens


def test_the_loss_of_growing_samples_is_that_of_the_first_tokens(data):
    argv = flags(data, f"--curriculum-min-length 8 --curriculum-iters 3 {NO_DROPOUT} --train-iters 4")
    ((trained, expected, cut),) = run_ranks(1, _first_step, argv)
    assert trained == pytest.approx(expected, rel=1e-5)
    assert cut == 8 * ((32 - 16) + (32 - 24) + 0 + 0)


# Muon


@pytest.mark.long
def test_muon_trains_as_on_one_rank(data):
    layouts = {
        "pipeline": "--pipeline-model-parallel-size 2",
        "context": "--context-parallel-size 2",
        "replicas": "--num-distributed-optimizer-instances 2 --zeropp-ranks-per-node 2",
        "stage 1": "--zero-stage 1 --zeropp-ranks-per-node 2",
    }
    adamw = f"{NO_DROPOUT} --train-iters 4"
    muon = f"{adamw} --optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2"
    alone = run_ranks(1, train_each, {"muon": flags(data, muon), "adamw": flags(data, adamw)})[0]
    argvs = {name: flags(data, muon, layout) for name, layout in layouts.items()}
    # Sums are taken in another order, and orthogonalization rounds what that changes to bf16.
    tolerance = 2e-4
    for name, metrics in run_ranks(4, train_each, argvs, timeout=500)[-1].items():
        assert metrics["lm loss"] == pytest.approx(alone["muon"]["lm loss"], abs=tolerance), name
    assert abs(alone["adamw"]["lm loss"][-1] - alone["muon"]["lm loss"][-1]) > 10 * tolerance


# Host memory, where that is the memory of the device anyway


def test_offloading_changes_no_result(data):
    common = "--zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1 --bf16 --train-iters 3"
    offloads = ["", "--cpu-offload", "--zeropp-offload-gradient-sums", "--cpu-offload --zeropp-offload-gradient-sums"]
    for of_rank in run_ranks(2, train_each, {more: flags(data, common, more) for more in offloads}):
        assert len(of_rank[""]["lm loss"]) == 3
        for name, metrics in of_rank.items():
            for key in ("lm loss", "grad-norm"):
                assert metrics[key] == of_rank[""][key], name


# A step that is skipped because its loss spikes leaves the run as if it had never been


BATCH = 8
LOCO = "--zero-quantized-gradients --zeropp-loco --zeropp-gradient-bits 3 --zeropp-ranks-per-node 2"
RUNS = {
    "both hops, decaying": f"{LOCO} --zeropp-loco-hops both --zeropp-loco-reset decay --zeropp-loco-reset-interval 5",
    "fp16": f"{LOCO} --fp16 --initial-loss-scale 256 --hysteresis 1",
    "weights too": f"{LOCO} --zero-quantized-weights --zero-hpz-partition-size 2",
}


def _states(argvs: dict[str, list[str]]) -> dict[str, tuple[dict, dict]]:
    """What each run is after steps of batches 0 and 1: without, and with a step between that spikes."""
    return {name: (_state(argv, spikes=False), _state(argv, spikes=True)) for name, argv in argvs.items()}


def _state(argv: list[str], spikes: bool) -> dict:
    run, _ = start(argv)

    def step(batch: int, factor: float = 1.0) -> float:
        scaled = run.model.register_forward_hook(lambda model, inputs, losses: losses * factor)
        result = take_step(run, batch * BATCH, BATCH // dist.get_world_size())
        scaled.remove()
        assert result.spiked == result.skipped == (factor != 1)
        return result.loss

    first = step(0)
    if spikes:
        average = run.counters.average_loss
        second = step(2, factor=4.0)
        assert second > 3 * first
        # The average moves towards a spike, but no further than to its limit: 2 * the average.
        assert run.counters.average_loss == pytest.approx(0.98 * first + 0.02 * 2 * first)
        run.counters.average_loss = average
    step(1)
    optimizer = [
        {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
        for state in run.optimizer.state.values()
    ]
    return {
        "parameters": [parameter.detach().to_local() for parameter in run.model.parameters()],
        "optimizer": optimizer,
        "errors": run.zeropp.state_dict(),
        "counters": dataclasses.asdict(run.counters),
        "scale": run.states[0].scaler.scale,
    }


def test_a_spike_with_loco_leaves_no_trace(data):
    common = f"--global-batch-size {BATCH} --loss-spike-factor 2 {NO_DROPOUT}"
    argvs = {name: flags(data, common, more) for name, more in RUNS.items()}
    for of_rank in run_ranks(4, _states, argvs):
        for name, (expected, result) in of_rank.items():
            assert any("error" in key for key in expected["errors"]), name
            torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
