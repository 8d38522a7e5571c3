"""What a step waits for besides weights and gradients: on distant links each collective costs a round trip."""

from collections import Counter

from megatron_zpp.training.data import batches_of
from megatron_zpp.training.step import train_step
from tests.collectives import Collectives
from tests.ranks import run_ranks
from tests.training.small_run import flags, start

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


def test_a_step_has_two_collectives_between_nodes_besides_those_of_weights_and_gradients(data):
    for collectives, reads in run_ranks(4, of_a_step, flags(data, MORE, MOVES)):
        weights, gradients = {"allgather_into_tensor_coalesced_": 1}, {"alltoall_base_": LAYERS + 1}
        assert collectives == {"_allgather_base_": 2} | weights | gradients  # sizes of weights; the step's numbers
        assert reads == ["tolist", "tolist"]
