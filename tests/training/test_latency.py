"""What a step waits for besides weights and gradients: on distant links each collective costs a round trip."""

from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest

from megatron_zpp.training.data import batches_of
from megatron_zpp.training.step import train_step
from megatron_zpp.zeropp.fsdp.waits import Waits
from tests.collectives import Collectives
from tests.ranks import run_in_turn
from tests.training.small_run import flags, start, train_quietly

MOVES = "--bf16 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-weight-moves"
LAYERS = 8
MORE = f"--num-layers {LAYERS} --log-num-zeros-in-grad"


def of_a_step(argv):
    """Collectives between nodes, and what the host reads, of the third step."""
    run, _ = start(argv)
    batches = batches_of(run, "train", 0)
    for _ in range(2):
        train_step(run, batches, 2, stop=False)
    with Collectives() as recorded:
        train_step(run, batches, 2, stop=False)
    return Counter(each.name for each in recorded.started if each.crosses_nodes(2)), recorded.reads


def looks_at_waits(argv):
    """How often a run of 8 steps looks at the times that collectives took."""
    run, _ = start(argv)
    with patch.object(Waits, "take_seconds", autospec=True, side_effect=Waits.take_seconds) as take:
        train_quietly(run)
    return take.call_count


@pytest.fixture(scope="module")
def found(data):
    return run_in_turn(
        4,
        {
            "step": partial(of_a_step, flags(data, MORE, MOVES)),
            "looks": partial(looks_at_waits, flags(data, MOVES, "--log-interval 8")),
        },
    )


def test_a_step_has_two_collectives_between_nodes_besides_those_of_weights_and_gradients(found):
    for collectives, reads in found["step"]:
        weights, gradients = {"allgather_into_tensor_coalesced_": 1}, {"alltoall_base_": LAYERS + 1}
        assert collectives == {"_allgather_base_": 2} | weights | gradients  # sizes of weights; the step's numbers
        assert reads == ["tolist", "tolist"]


def test_times_of_collectives_are_looked_at_where_a_line_is_printed(found):
    assert found["looks"] == [3] * 4  # at the beginning, and for the lines of the first and the last step
