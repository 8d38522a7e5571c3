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
