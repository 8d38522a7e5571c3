"""A loss from outside the package: models call it where the output layer's weight is gathered, in every layout."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import load_architecture
from megatron_zpp.models.layers import output_logits
from megatron_zpp.training.data import batches_of
from megatron_zpp.training.evaluate import evaluate
from megatron_zpp.training.loss import LanguageModelLoss
from megatron_zpp.training.setup import build_trainer
from megatron_zpp.training.step import train_step
from tests.ranks import run_ranks
from tests.training.small_run import NO_DROPOUT, flags, start

WEIGHT = 0.05


class WithZLoss(LanguageModelLoss):
    """Keeps the logits' normalizer near 1, as PaLM did (arXiv 2204.02311)."""

    name = "lm and z loss"

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
        losses = super().__call__(hidden, weight, labels, softcap)
        return losses + WEIGHT * output_logits(hidden, weight, softcap).float().logsumexp(-1).square()


def losses_of(argvs: dict[str, list[str]], architecture: str) -> dict[str, list[float]]:
    """Losses of three steps, and of an evaluation after them, of each command line. For ``run_ranks``."""
    results, found = {}, load_architecture(architecture)
    for name, argv in argvs.items():
        settings = parse_settings(found, argv, dist.get_world_size(), note=lambda text: None)
        with contextlib.redirect_stdout(io.StringIO()):
            run = build_trainer(found, settings, torch.device("cpu"), WithZLoss)
            batches, valid = batches_of(run, "train", 0), batches_of(run, "valid", 0)
            assert batches is not None and valid is not None
            micro_batches = 8 // run.mesh.dp_size
            losses = [train_step(run, batches, micro_batches, stop=False).loss for _ in range(3)]
            evaluated = evaluate(run, valid, micro_batches)
        assert evaluated is not None
        results[name] = [*losses, evaluated.loss]
    return results


def by_formula(argv: list[str], architecture: str) -> float:
    """The first step's loss, of the model's logits. For ``run_ranks``."""
    run, _ = start(argv, architecture)
    batches = batches_of(run, "train", 0)
    assert batches is not None
    losses = []
    for _ in range(8):
        batch = next(batches)
        with torch.no_grad():
            logits = run.model(batch["tokens"])
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        losses.append(cross_entropy + WEIGHT * logits.logsumexp(-1).square().mean())
    return torch.stack(losses).mean().item()


LAYOUTS = {
    "gpt": {"pipeline": "--pipeline-model-parallel-size 2", "context parallel": "--context-parallel-size 2"},
    "llama": {"ZeRO-3": "", "tensor parallel": "--tensor-model-parallel-size 2 --sequence-parallel"},
}


@pytest.mark.parametrize("architecture", LAYOUTS)  # tied embeddings, and an output layer of its own
def test_a_program_trains_and_evaluates_on_its_own_loss_in_every_layout(data, architecture):
    argv = flags(data, NO_DROPOUT, "--final-logit-softcapping 5 --lr 1e-2")
    (alone,) = run_ranks(1, losses_of, {"": argv}, architecture)[0].values()
    assert alone[0] == pytest.approx(run_ranks(1, by_formula, argv, architecture)[0], rel=1e-5)
    argvs = {name: [*argv, *more.split()] for name, more in LAYOUTS[architecture].items()}
    for name, losses in run_ranks(2, losses_of, argvs, architecture)[-1].items():
        assert losses == pytest.approx(alone, rel=1e-5), name
