"""Auxiliary losses of a model's forward pass: added once, whatever the layout, and averaged as they are logged."""

import contextlib
import dataclasses
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.data.loader import build_loader
from megatron_zpp.families import GPT
from megatron_zpp.models.decoder import Decoder
from megatron_zpp.models.transformer import ModelOutput
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, Metrics, flags, start, train_each


class WithAuxiliary(Decoder):
    """Penalizes large losses, as much as it minimizes them."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(tokens, labels, *args, **kwargs)
        if labels is None or not hasattr(self, "final_norm"):
            return output
        return ModelOutput(output, {"square": 0.2 * output.square().mean(), "cube": 0.02 * (output**3).mean()})


ARCHITECTURE = dataclasses.replace(GPT, module=WithAuxiliary)
GIVEN = f"{__name__}:ARCHITECTURE"
# One rank computes the whole batch at once; all others must come to the same.
ALONE = "--micro-batch-size 8"
KEYS = ("lm loss", "square", "cube", "grad-norm", "lm loss validation")
LAYOUTS = {
    "micro-batches": "--micro-batch-size 2",
    "per token": "--micro-batch-size 2 --calculate-per-token-loss",
    "loss scale": "--micro-batch-size 2 --fp16 --initial-loss-scale 4096",
    "recomputed": f"{ALONE} --recompute-granularity full",
}


def first_step(argv: list[str]) -> tuple[float, float, float]:
    """Plain PyTorch's losses and gradient norm of the first step. For ``run_ranks``."""
    with contextlib.redirect_stdout(io.StringIO()):
        run, _ = start(argv, ARCHITECTURE)
    parameters = {name: p.full_tensor().detach().requires_grad_() for name, p in run.model.named_parameters()}
    assert run.datasets.train is not None
    sizes = dict(consumed_samples=0, micro_batch_size=8, dp_rank=0, dp_size=1, num_workers=0)
    loader = build_loader(run.datasets.train, **sizes, device=torch.device("cpu"))
    batch = next(loader)
    model = WithAuxiliary(run.model.config)
    losses = torch.func.functional_call(model, parameters, (batch["tokens"], batch["labels"])).losses
    square = 0.2 * losses.square().mean()
    (losses.mean() + square + 0.02 * (losses**3).mean()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values()])
    return losses.mean().item(), square.item(), norm.item()


@pytest.fixture(scope="module")
def alone(data) -> Metrics:
    return run_ranks(1, train_each, {"": flags(data, NO_DROPOUT, ALONE, length="--train-iters 2")}, GIVEN)[0][""]


def test_the_step_adds_them(data, alone):
    loss, square, norm = run_ranks(1, first_step, flags(data, NO_DROPOUT, ALONE))[0]
    assert alone["lm loss"][0] == pytest.approx(loss, rel=1e-5)
    assert alone["square"][0] == pytest.approx(square, rel=1e-5)
    assert alone["grad-norm"][0] == pytest.approx(norm, rel=1e-5)


def test_they_do_not_depend_on_how_a_rank_divides_its_batch(data, alone):
    """test_experts.py compares layouts of several ranks."""
    argvs = {name: flags(data, NO_DROPOUT, more, length="--train-iters 2") for name, more in LAYOUTS.items()}
    for name, metrics in run_ranks(1, train_each, argvs, GIVEN)[-1].items():
        for key in KEYS:
            tolerance = 1e-2 if name == "loss scale" else 1e-5
            assert metrics[key] == pytest.approx(alone[key], rel=tolerance), f"{name}, {key}"


@pytest.mark.parametrize(
    "per_token", ["", pytest.param("--calculate-per-token-loss --eod-mask-loss", marks=pytest.mark.long)]
)
def test_a_pipeline_adds_those_of_its_last_stage(data, per_token):
    """Per token, each micro-batch's count as many tokens as it has, which differ."""

    def argv(more: str) -> list[str]:
        more = f"{more} {per_token}"
        return flags(data, NO_DROPOUT, more, "--micro-batch-size 2 --num-layers 4", length="--train-iters 4")

    stages = "--pipeline-model-parallel-size 2 --pipeline-schedule"
    virtual = "--num-layers-per-virtual-pipeline-stage 1"
    schedules = {"1f1b": argv(f"{stages} 1f1b"), "zero-bubble": argv(f"{stages} zero-bubble {virtual}")}
    whole = run_ranks(1, train_each, {"": argv("")}, GIVEN)[0][""]
    for schedule, metrics in run_ranks(2, train_each, schedules, GIVEN)[-1].items():
        for key in KEYS:
            assert metrics[key] == pytest.approx(whole[key], rel=1e-5), f"{schedule}, {key}"
