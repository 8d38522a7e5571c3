"""Details of the loop that no loss shows: how precisions map, how many evaluations come, when garbage is collected."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.parallel.sharding import mixed_precision
from megatron_zpp.settings.groups import DistributedSettings, PrecisionSettings, TrainingSettings
from megatron_zpp.training.data import batches_of
from megatron_zpp.training.evaluate import evaluate
from megatron_zpp.training.setup import _plan_length
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, take_step, train_quietly


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


@pytest.mark.parametrize(
    "interval, iteration, evaluations",
    [(None, 0, 1), (4, 0, 3), (4, 3, 3), (4, 4, 2), (4, 9, 1), (4, 12, 1), (10, 0, 2), (11, 0, 1)],
)
def test_evaluations_to_come(interval, iteration, evaluations):
    training = TrainingSettings(eval_interval=interval, train_iters=10, eval_iters=1, micro_batch_size=1)
    settings = SimpleNamespace(training=training, distributed=DistributedSettings())
    mesh = SimpleNamespace(num_jobs=1, dp_size_of_job=1)
    *_, (_, valid_samples, _) = _plan_length(settings, BatchSchedule(1, 1, 1), Counters(iteration=iteration), mesh)
    assert valid_samples == evaluations


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
            "evaluates": "--eval-interval 1 --manual-gc --manual-gc-interval 2",
            "does not": "--manual-gc",
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
