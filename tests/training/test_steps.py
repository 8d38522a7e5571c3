"""What a step computes in special cases, and details of the loop that no loss shows."""

import contextlib
import dataclasses
import gc
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_zpp.parallel.sharding import mixed_precision
from megatron_zpp.settings.groups import PrecisionSettings
from megatron_zpp.training.data import batches_of
from megatron_zpp.training.evaluate import evaluate
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags, start, take_step, train_each, train_quietly


def _first_step(argv: list[str]) -> tuple[float, float, int]:
    """The loss of the first step, the untrained model's loss of the first 16 tokens, and the tokens left out."""
    run, metrics = start(argv)
    text = torch.stack([torch.as_tensor(run.datasets.train[i]) for i in range(8)])
    with torch.no_grad():
        losses = run.model(text[:, :16], text[:, 1:17])
    train_quietly(run)
    return metrics["lm loss"][0], losses.mean().item(), run.counters.cut_tokens


def test_the_loss_of_growing_samples_is_that_of_the_first_tokens(data):
    argv = flags(data, f"--curriculum-min-length 8 --curriculum-iters 3 {NO_DROPOUT} --train-iters 4 --eval-iters 0")
    ((trained, expected, cut),) = run_ranks(1, _first_step, argv)
    assert trained == pytest.approx(expected, rel=1e-5)
    assert cut == 8 * ((32 - 16) + (32 - 24) + 0 + 0)


# Host memory, where that is the memory of the device anyway


def test_offloading_changes_no_result(data):
    common = "--zero-quantized-gradients --zeropp-loco --zeropp-ranks-per-node 1 --bf16 --train-iters 3 --eval-iters 0"
    offloads = ["", "--cpu-offload", "--zeropp-offload all", "--cpu-offload --zeropp-offload sums"]
    for of_rank in run_ranks(2, train_each, {more: flags(data, common, more) for more in offloads}):
        assert len(of_rank[""]["lm loss"]) == 3
        for name, metrics in of_rank.items():
            for key in ("lm loss", "grad-norm"):
                assert metrics[key] == of_rank[""][key], name


# A step that is skipped because its loss spikes leaves the run as if it had never been


BATCH = 4
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
        assert result.has_spiked == result.is_skipped == (factor != 1)
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
        "scale": run.scaler.scale,
    }


def test_a_spike_with_loco_leaves_no_trace(data):
    common = f"--global-batch-size {BATCH} --loss-spike-factor 2 {NO_DROPOUT}"
    argvs = {name: flags(data, common, more) for name, more in RUNS.items()}
    for of_rank in run_ranks(4, _states, argvs):
        for name, (expected, result) in of_rank.items():
            assert any("error" in key for key in expected["errors"]), name
            torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "flags_, compute, reduce",
    [
        ({}, None, None),
        ({"bf16": True}, torch.bfloat16, torch.float32),
        ({"bf16": True, "grad_reduce_in_bf16": True}, torch.bfloat16, torch.bfloat16),
        ({"fp16": True}, torch.float16, torch.float16),
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, torch.float16, torch.float32),
    ],
)
def test_dtypes_of_computing_and_reducing(flags_, compute, reduce):
    policy = mixed_precision(PrecisionSettings(**flags_))
    assert (policy.param_dtype, policy.reduce_dtype) == (compute, reduce)


def _train_and_evaluate(argvs: dict[str, list[str]]):
    """Losses of each run; then two evaluations on the same samples, and the number of collections of garbage."""
    results = {}
    for name, argv in argvs.items():
        run, metrics = start(argv)
        collections: list[int] = []

        def count(phase, info, collections=collections):
            if phase == "start" and not gc.isenabled():  # those before the loop come when Python likes
                collections.append(info["generation"])

        gc.callbacks.append(count)
        train_quietly(run)
        gc.callbacks.remove(count)
        assert gc.isenabled() == ("--manual-gc" not in argv)
        gc.enable()
        twice = [evaluate(run, batches_of(run, "valid", 0), 3) for _ in range(2)]
        results[name] = metrics["lm loss"], twice, collections, run.model.training
    return results


def test_evaluation_is_without_dropout_and_leaves_training_alone(data):
    argvs = {
        name: flags(data, f"--global-batch-size 2 --hidden-dropout 0.3 {more}", length="--train-iters 4")
        for name, more in {
            "evaluates": "--eval-interval 1 --manual-gc --log-interval 2",
            "does not": "--manual-gc --log-interval 9",
            "without dropout": "--attention-dropout 0 --hidden-dropout 0",
        }.items()
    }
    for of_rank in run_ranks(2, _train_and_evaluate, argvs):
        losses = {name: result[0] for name, result in of_rank.items()}
        assert losses["evaluates"] == losses["does not"] != losses["without dropout"]
        for _, (first, second), _, is_training in of_rank.values():
            assert first == second and is_training
        assert of_rank["evaluates"][2] == [2, 2]  # whole ones, at steps 2 and 4, and no other
        assert of_rank["does not"][2] == []


def _host_waits(argv):
    """How often the host reads what the device computed, behind the last backward pass and before the optimizer."""
    run, _ = start(argv)
    waits, seen = [], []
    backward, optimizer_step = torch.Tensor.backward, run.optimizer.step

    def begin(*arguments, **options):
        backward(*arguments, **options)
        waits.clear()

    def end(*arguments, **options):
        seen.extend(waits)
        return optimizer_step(*arguments, **options)

    def counted(name):
        read = getattr(torch.Tensor, name)
        return lambda tensor, *arguments: (waits.append(name), read(tensor, *arguments))[1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "backward", begin))
        stack.enter_context(patch.object(run.optimizer, "step", end))
        for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
            stack.enter_context(patch.object(torch.Tensor, name, counted(name)))
        take_step(run)
    return seen


@pytest.mark.parametrize("more", ["", "--calculate-per-token-loss --log-num-zeros-in-grad"])
def test_the_host_waits_once_between_the_last_backward_pass_and_the_optimizer(data, more):
    argv = flags(data, "--global-batch-size 4", more)
    assert run_ranks(2, _host_waits, argv) == [["tolist"]] * 2
