"""What programs of benchmarks/ count, measure and draw, each in a small run."""

import launches
import lifecycle_fuzz
import pytest
import scaling
import torch.distributed as dist

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import LLAMA
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import communicators
from megatron_zpp.zeropp.recipes import RECIPES
from megatron_zpp.zeropp.wire import kernels
from tests.ranks import run_ranks

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2"
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 64"
WAITS = {  # two layers wait for the step's numbers, for sizes of moved codes, for tokens that come
    "--zeropp zero3": 1,
    f"--zeropp {[*RECIPES][-2]}": 2,
    f"{EXPERTS} --zeropp zero3 --moe-expert-capacity-factor 1.0": 1,
    f"{EXPERTS} --zeropp int8 --expert-model-parallel-size 8": 2 + 2,
    f"{EXPERTS} --zeropp int8 --expert-model-parallel-size 8 --moe-expert-capacity-factor 1.0": 2,
}


def host_waits() -> dict[str, int]:
    dist.destroy_process_group()  # the test's own rank made it
    common = f"{launches.COMMON} {SMALL} --seq-length 128 --vocab-size 512"
    return {flags: launches.count(f"{common} {flags}")["host waits"] for flags in WAITS}


@pytest.mark.long
@pytest.mark.skipif(kernels.why_not_loaded is not None, reason=f"needs kernels: {kernels.why_not_loaded}")
def test_a_step_waits_for_its_numbers_sizes_and_tokens_alone():
    assert run_ranks(1, host_waits, timeout=900) == [WAITS]  # 45 s alone, many times that beside other tests


def test_the_estimator_counts_communicators():
    for row in launches.read_rows(launches.PATH):
        if row["code"] == "now":
            flags = launches.flags_of(row["model"], row["recipe"]).split()
            settings = parse_settings(LLAMA, flags, launches.NODES * launches.PER_NODE, note=lambda text: None)
            number, nbytes = communicators(settings, RankGrid(launches.NODES, launches.PER_NODE, settings.distributed))
            assert number == row["counts"]["communicators"], row["recipe"]
            assert nbytes > number * 5e8


def of(nodes: int, flags: str, per_node: int = 8) -> tuple[int, float]:
    """How many communicators a rank of a small Llama has, and their bytes."""
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3"
    words = f"{shape} --train-iters 1 --mock-data --vocab-size 64 --num-workers 0 {flags}".split()
    settings = parse_settings(LLAMA, words, nodes * per_node, note=lambda text: None)
    return communicators(settings, RankGrid(nodes, per_node, settings.distributed))


def test_islands_and_gradients_within_one_node_have_communicators_too():
    def number(nodes: int, flags: str) -> int:
        return of(nodes, flags)[0]

    assert number(4, "--islands 2 --zeropp zero3") == number(4, "--zeropp zero3") + 2  # an island's, and between them
    assert number(1, "--zero-quantized-gradients") == number(1, "") + 1


def test_an_all_to_all_between_nodes_has_buffers_too():
    """Peers of a node have buffers each; those on other nodes share one pair, however many they are."""
    shared = 2 * 32 * 16 * 2**17
    weights, gradients = "--zero-quantized-weights", "--zero-quantized-gradients"
    alone, both = of(4, weights), of(4, f"{weights} {gradients}")
    assert both[1] - alone[1] == pytest.approx((both[0] - alone[0]) * 688e6 + 3.28e9 + shared)
    assert of(64, f"{weights} {gradients}") == both
    experts = "--num-experts 8 --moe-ffn-hidden-size 64 --expert-model-parallel-size 8"
    within, between = (of(nodes, experts, 8 // nodes * 2) for nodes in (2, 4))
    assert within[0] == between[0] and between[1] - within[1] == pytest.approx(shared - 4 * 3.28e9 / 7)


@pytest.mark.long
@pytest.mark.evidence
def test_steps_logs_and_saves_do_as_much_with_twice_the_ranks():
    few, many = scaling.count(4), scaling.count(8)
    for phase in ("load", "step", "log", "evaluation", "save", "exit", "loop"):
        for what in ("collectives", "requests to the store", "barriers", "groups"):
            assert {rank[phase].get(what, 0) for rank in many} == {few[0][phase].get(what, 0)}, (phase, what)
    for phase in ("load", "step", "log", "evaluation", "exit", "loop"):
        assert not any(rank[phase].get("bytes of objects") for rank in many), phase
    of_others = [max(rank["save"]["bytes of objects"] for rank in ranks[1:]) for ranks in (few, many)]
    assert of_others[1] < 1.2 * of_others[0]
    assert sum(rank["log"]["lines"] for rank in many) == 1


@pytest.mark.long
@pytest.mark.evidence
def test_a_run_lives_through_what_hypothesis_draws(tmp_path):
    rows = lifecycle_fuzz.fuzz(1, 3, tmp_path / "rows")
    assert len(rows) >= 3 and sum(len(row["did"]) for row in rows) > 5
