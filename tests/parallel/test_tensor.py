"""Tensor and sequence parallelism: training equals one rank's, whatever the layout."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from megatron_zpp.training.pretrain import train
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, Metrics, flags, start, write_text

# Adam's eps: a key's bias has no gradient but rounding errors, which Adam would blow up to whole steps.
LENGTH = "--train-iters 20 --eval-interval 10 --adam-eps 1e-5 --micro-batch-size 2"
GPT, LLAMA = "", "--group-query-attention --num-query-groups 4 --num-attention-heads 8 --ffn-hidden-size 64"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data"))


def train_runs(runs: dict[str, list[str]], architecture: str) -> dict[str, tuple[Metrics, dict[str, Tensor], str]]:
    """Runs on each rank: train each command line; metrics, whole parameters at the end, and what was printed."""
    results = {}
    for name, argv in runs.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run, metrics = start(argv, architecture)
            train(run, time.monotonic())
        parameters = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))
        results[name] = metrics, parameters, out.getvalue()
    return results


def train_on(world_size: int, architecture: str, data: str, *common: str, **runs: str) -> dict[str, Any]:
    """What each run was, as rank 0 knows it; the others' losses are the same."""
    argvs = {name: flags(data, NO_DROPOUT, *common, more, length=LENGTH) for name, more in runs.items()}
    results = run_ranks(world_size, train_runs, argvs, architecture)
    for name, (metrics, _, _) in results[-1].items():
        assert metrics["lm loss"] == results[0][name][0]["lm loss"]
        assert metrics["grad-norm"] == results[0][name][0]["grad-norm"]
    return results[0]


def assert_equal(result: Any, expected: Any) -> None:
    (metrics, parameters, _), (expected_metrics, expected_parameters, _) = result, expected
    for curve in ("lm loss", "lm loss validation", "grad-norm"):
        steps = len(metrics[curve])
        assert metrics[curve] == pytest.approx(expected_metrics[curve][-steps:], rel=1e-5), curve
    assert parameters.keys() == expected_parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(value, expected_parameters[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("architecture, shape", [("gpt", GPT), ("llama", LLAMA)])
def test_training_equals_one_rank(data, architecture, shape):
    expected = train_on(1, architecture, data, alone=shape)["alone"]
    tp = "--tensor-model-parallel-size"
    of_two = train_on(2, architecture, data, tp=f"{shape} {tp} 2", sp=f"{shape} {tp} 2 --sequence-parallel")
    of_four = train_on(
        4,
        architecture,
        data,
        tp=f"{shape} {tp} 4 --recompute-granularity full",
        sp=f"{shape} {tp} 4 --sequence-parallel --recompute-granularity selective --log-params-norm",
        beside_dp=f"{shape} {tp} 2 --sequence-parallel --zero-stage 1 --calculate-per-token-loss",
    )
    for result in (*of_two.values(), *of_four.values()):
        assert_equal(result, expected)


@pytest.mark.parametrize("architecture, shape", [("gpt", GPT), ("llama", LLAMA)])
def test_checkpoints_load_under_any_layout(data, tmp_path, architecture, shape):
    """From data-parallel ranks to tensor-parallel ones, between those, and back: ten more losses after each."""
    tp = "--tensor-model-parallel-size"
    plain, cut = tmp_path / "plain", tmp_path / "cut"
    expected = train_on(1, architecture, data, shape, alone="")["alone"]
    half = "--save-interval 100 --exit-interval 10"
    train_on(4, architecture, data, shape, saves=f"--save {plain} {half}")
    more = train_on(
        4,
        architecture,
        data,
        shape,
        of_four=f"{tp} 4 --load {plain}",
        saves=f"{tp} 2 --sequence-parallel --load {plain} --save {cut} --save-interval 5",
        of_two=f"{tp} 4 --load {cut} --ckpt-step 15",
        data_parallel=f"--load {cut} --ckpt-step 15",
    )
    for result in more.values():
        assert_equal(result, expected)
    assert "random states start anew: 4 ranks saved, 4 load, divided otherwise" in more["of_four"][2]
