"""Compiled blocks have no graph breaks, and nothing is compiled after the first step."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from megatron_zpp.training.data import batches_of
from megatron_zpp.training.step import train_step
from tests.ranks import run_ranks
from tests.training.small_run import flags, start

ZEROPP = "--bf16 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 1 --zeropp-loco"


# Graphs are the same without a C++ compiler, which takes minutes; test_pretrain.py trains with it.
WITHOUT_COMPILER = partial(torch.compile, backend="aot_eager_decomp_partition")


def compiled(argv):
    """Graph breaks, and the graphs that were compiled by the end of each of four steps."""
    with patch("torch.compile", WITHOUT_COMPILER):
        run, _ = start(argv)
    batches, graphs = batches_of(run, "train", 0), []
    for _ in range(4):
        train_step(run, batches, 2, stop=False)
        graphs.append(counters["stats"]["unique_graphs"])
    return dict(counters["graph_break"]), graphs


@pytest.mark.long
@pytest.mark.parametrize("more", [ZEROPP, "--bf16 --num-experts 4 --moe-router-topk 2"])
def test_blocks_compile_once_and_whole(data, more):
    for breaks, graphs in run_ranks(2, compiled, flags(data, "--compile", more), timeout=280):
        assert breaks == {}
        assert graphs[0] > 0 and set(graphs) == {graphs[0]}


def bytes_kept(*argvs):
    """Bytes that autograd keeps of a micro-batch's forward pass, and the losses of two steps, of each command line."""
    found = []
    for argv in argvs:
        torch._dynamo.reset()
        with patch("torch.compile", WITHOUT_COMPILER):
            run, _ = start(argv)
        batches, kept = batches_of(run, "train", 0), {}
        losses = [train_step(run, batches, 2, stop=False).loss for _ in range(2)]

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.zeros(1, 32, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            assert run.model(tokens, tokens).requires_grad
        found.append((sum(kept.values()), losses))
    return found


@pytest.mark.long
def test_a_budget_of_activation_memory(data):
    plain = flags(data, "--compile --attention-dropout 0 --hidden-dropout 0")
    budgets = [[*plain, "--activation-memory-budget", budget] for budget in ("0.5", "0")]
    ((everything, losses), (half, of_half), (inputs, of_inputs)) = run_ranks(1, bytes_kept, plain, *budgets)[0]
    assert inputs < half < everything and inputs < 0.7 * everything
    assert of_half == pytest.approx(losses, rel=1e-6) and of_inputs == pytest.approx(losses, rel=1e-6)
