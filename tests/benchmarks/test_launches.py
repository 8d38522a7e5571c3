"""Host waits of a step on GPUs that are not there; communicators are as many as the estimator says."""

from __future__ import annotations

import launches
import pytest
import torch.distributed as dist

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import LLAMA
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import communicators
from megatron_zpp.zeropp.wire import kernels
from tests.ranks import run_ranks

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2"
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 64"
WAITS = {  # of two layers: for the step's numbers, for sizes of moved codes, for tokens that come
    "--zeropp zero3": 1,
    "--zeropp int6": 2,
    f"{EXPERTS} --zeropp zero3 --moe-expert-capacity-factor 1.0": 1,
    f"{EXPERTS} --zeropp int8 --expert-model-parallel-size 8": 2 + 2,
    f"{EXPERTS} --zeropp int8 --expert-model-parallel-size 8 --moe-expert-capacity-factor 1.0": 2,
}


def host_waits() -> dict[str, int]:
    dist.destroy_process_group()  # that of the test's own rank
    common = f"{launches.COMMON} {SMALL} --seq-length 128 --vocab-size 512"
    return {flags: launches.count(f"{common} {flags}")["host waits"] for flags in WAITS}


@pytest.mark.long
@pytest.mark.skipif(kernels.why_not_loaded is not None, reason=f"needs kernels: {kernels.why_not_loaded}")
def test_a_step_waits_for_its_numbers_sizes_and_tokens_alone():
    assert run_ranks(1, host_waits) == [WAITS]


def test_the_estimator_counts_communicators():
    for row in launches.read_rows(launches.PATH):
        if row["code"] == "now":
            flags = launches.flags_of(row["model"], row["recipe"]).split()
            settings = parse_settings(LLAMA, flags, launches.NODES * launches.PER_NODE, note=lambda text: None)
            number, nbytes = communicators(settings, RankGrid(launches.NODES, launches.PER_NODE, settings.distributed))
            assert number == row["counts"]["communicators"], row["recipe"]
            assert nbytes > number * 5e8


def test_islands_and_gradients_within_one_node_have_communicators_too():
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3"

    def number(nodes: int, flags: str) -> int:
        words = f"{shape} --train-iters 1 --mock-data --vocab-size 64 --num-workers 0 {flags}".split()
        settings = parse_settings(LLAMA, words, nodes * 8, note=lambda text: None)
        return communicators(settings, RankGrid(nodes, 8, settings.distributed))[0]

    assert number(4, "--islands 2 --zeropp zero3") == number(4, "--zeropp zero3") + 2  # an island's, and between them
    assert number(1, "--zero-quantized-gradients") == number(1, "") + 1
