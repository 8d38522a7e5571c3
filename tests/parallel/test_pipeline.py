"""Pipeline parallelism through the trainer: every layout trains as one rank does."""

from __future__ import annotations

import contextlib
import gc
import io
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from megatron_zpp.parallel.stages import place_stages
from megatron_zpp.training.arguments import parse_settings
from megatron_zpp.training.errors import SettingsError
from megatron_zpp.training.pretrain import train
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, Metrics, flags, start, write_text

FOUR_LAYERS = f"--num-layers 4 --eval-interval 11 --log-params-norm {NO_DROPOUT}"
TWENTY = "--train-iters 20"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage 1"
COMPARED = ("lm loss", "lm loss validation", "grad-norm", "params-norm")

Result = tuple[Metrics, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data"))


def _train_each(runs: dict[str, list[str]], architecture: str = "gpt") -> dict[str, Result]:
    """For ``run_ranks``: each run's metrics, and this rank's parameters in full by their name in the whole model."""
    results = {}
    for name, argv in runs.items():
        run, metrics = start(argv, architecture)
        with contextlib.redirect_stdout(io.StringIO()):
            train(run, time.monotonic())
        results[name] = metrics, _parameters(run.model)
        del run
        gc.collect()
    return results


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.full_tensor() for key, value in get_model_state_dict(model).items()}


def _results(world_size: int, runs: dict[str, list[str]], architecture: str = "gpt") -> dict[str, Result]:
    """Each run's metrics of the rank that logs, and all parameters; ranks that share one must agree to the bit."""
    of_ranks: list[dict[str, Any]] = run_ranks(world_size, _train_each, runs, architecture)
    merged: dict[str, Result] = {}
    for name in runs:
        parameters: dict[str, torch.Tensor] = {}
        for results in of_ranks:
            for key, value in results[name][1].items():
                assert torch.equal(parameters.setdefault(key, value), value), f"{name}: {key} differs between ranks"
        merged[name] = of_ranks[-1][name][0], parameters
    return merged


def _assert_same(result: Result, expected: Result, name: str, tolerance: float = 1e-5) -> None:
    for key in COMPARED:
        torch.testing.assert_close(
            result[0][key], expected[0][key], rtol=tolerance, atol=0, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )
    assert result[1].keys() == expected[1].keys()
    for key, value in expected[1].items():
        torch.testing.assert_close(
            result[1][key], value, rtol=0, atol=tolerance, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )


# Two ranks, GPT: its embeddings are tied, so the first and the last stage have a copy each.
TWO = {
    "1f1b": "",
    "gpipe, stages of 3 and 1": "--pipeline-schedule gpipe --decoder-first-pipeline-num-layers 3 --zero-stage 2",
    "interleaved": VIRTUAL,
    "zero-bubble": "--pipeline-schedule zero-bubble",
    "zero-bubble, virtual": f"--pipeline-schedule zero-bubble {VIRTUAL} --zero-stage 1",
    "token mean, recomputed": "--calculate-per-token-loss --recompute-granularity full --reset-attention-mask",
    "recomputed, zero-bubble": "--pipeline-schedule zero-bubble --recompute-granularity full",
}


def test_two_stages_train_as_one_rank(data):
    alone = {"": "", "token mean, recomputed": TWO["token mean, recomputed"]}
    expected = _results(1, {name: flags(data, FOUR_LAYERS, more, length=TWENTY) for name, more in alone.items()})
    results = _results(2, {name: flags(data, FOUR_LAYERS, PP2, more, length=TWENTY) for name, more in TWO.items()})
    for name, result in results.items():
        _assert_same(result, expected[name if name in expected else ""], name)


FOUR = {
    "1f1b": PP4,
    "gpipe": f"{PP4} --pipeline-schedule gpipe",
    "zero-bubble": f"{PP4} --pipeline-schedule zero-bubble",
    "pp 2 * dp 2": PP2,
    "pp 2 * dp 2, interleaved": f"{PP2} {VIRTUAL} --zero-stage 2",
    "pp 2 * dp 2, zbv": f"{PP2} {VIRTUAL} --pipeline-schedule zbv",
    "pp 2 * dp 2, stages of 1 and 3": f"{PP2} --decoder-last-pipeline-num-layers 3 --zero-stage 1",
}


def test_four_ranks_train_as_one_rank(data):
    llama = f"{FOUR_LAYERS} --group-query-attention --num-query-groups 2"
    expected = _results(1, {"": flags(data, llama, length=TWENTY)}, "llama")
    results = _results(4, {name: flags(data, llama, more, length=TWENTY) for name, more in FOUR.items()}, "llama")
    for name, result in results.items():
        _assert_same(result, expected[""], name)
