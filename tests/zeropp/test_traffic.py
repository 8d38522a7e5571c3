"""Bytes as they are counted, against the sizes of rings and pieces written out."""

import pytest
import torch

from megatron_zpp.zeropp.fsdp.collectives import count_flat_ring, count_reduce_scatter
from megatron_zpp.zeropp.fsdp.shared import Traffic
from megatron_zpp.zeropp.fsdp.topology import RankLayout


@pytest.mark.parametrize("num_nodes, ranks_per_node, crossing", [(2, 3, {2, 5}), (1, 6, set()), (6, 1, set(range(6)))])
def test_only_the_last_rank_of_a_node_sends_to_another_one(num_nodes, ranks_per_node, crossing):
    """Each of 6 ranks passes 5 pieces on; gloo's reduce-scatter goes around twice."""
    for rank in range(6):
        layout, gathered, reduced = RankLayout(num_nodes, ranks_per_node, rank), Traffic(), Traffic()
        assert (layout.node, layout.local_rank) == divmod(rank, ranks_per_node)
        count_flat_ring(gathered, layout, 100)
        count_reduce_scatter(reduced, layout, torch.empty(25))
        assert gathered == (Traffic(0, 500) if rank in crossing else Traffic(500, 0))
        assert reduced == (Traffic(0, 1000) if rank in crossing else Traffic(1000, 0))
        on_gpu = Traffic()
        count_reduce_scatter(on_gpu, layout, torch.empty(25, device="meta"))
        assert on_gpu == gathered


def test_an_evaluation_counts_only_what_stays():
    layout, traffic = RankLayout(num_nodes=2, ranks_per_node=1, rank=0), Traffic()
    with traffic.evaluating():
        count_flat_ring(traffic, layout, 100)
        count_reduce_scatter(traffic, layout, torch.empty(25))
        assert traffic.take() == Traffic(0, 0)
        count_flat_ring(traffic, layout, 100, stays=True)
    traffic.add(intra_node=7)
    assert traffic.take() == Traffic(7, 100)
    assert traffic.take() == Traffic(0, 0)
