"""Samples that grow: the loss is that of their first tokens, in every layout of the ranks."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_zpp.training.pretrain import train
from tests.parallel.layouts import EPS, assert_same, results_on
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags, start, write_text

GROWS = f"--curriculum-min-length 8 --curriculum-iters 3 {NO_DROPOUT}"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data"))


def _first_step(argv: list[str]) -> tuple[float, float, int]:
    """The loss of the first step, what the untrained model says of the first 16 tokens, and what the run left out."""
    run, metrics = start(argv)
    text = torch.stack([torch.as_tensor(run.datasets.train[i]) for i in range(8)])
    with torch.no_grad():
        losses = run.model(text[:, :16], text[:, 1:17])
    train(run, time.monotonic())
    return metrics["lm loss"][0], losses.mean().item(), run.counters.cut_tokens


def test_the_loss_is_that_of_the_first_tokens(data):
    ((trained, expected, cut),) = run_ranks(1, _first_step, flags(data, GROWS, length="--train-iters 4"))
    assert trained == pytest.approx(expected, rel=1e-5)
    assert cut == 8 * ((32 - 16) + (32 - 24) + 0 + 0)


@pytest.mark.long
def test_it_is_so_in_every_layout(data):
    common = f"{GROWS} {EPS} --num-layers 4 --train-iters 3 --log-params-norm --train-tokens 100000"
    tokens = "--lr-decay-tokens 700 --lr-warmup-tokens 200"
    layouts = {
        "pp": "--pipeline-model-parallel-size 2",
        "tp": "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 0",
        "cp": "--context-parallel-size 2",
    }
    runs = {name: ("gpt", flags(data, common, tokens, more)) for name, more in layouts.items()}
    expected = results_on(1, {"": ("gpt", flags(data, common, tokens))})[""]
    for name, result in results_on(4, runs).items():
        assert_same(result, expected, name)
