"""Finding which ranks share a node; a process alone; bytes counted against rings and pieces written out."""

import os
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.api import local_part
from megatron_zpp.zeropp.fsdp import topology
from megatron_zpp.zeropp.fsdp.collectives import count_flat_ring, count_reduce_scatter
from megatron_zpp.zeropp.fsdp.shared import Traffic
from megatron_zpp.zeropp.fsdp.topology import Topology, _ranks_per_node_of, build_topology
from megatron_zpp.zeropp.reduce import reduce_scatter
from tests.ranks import run_in_turn
from tests.zeropp.training_on_ranks import Net, shard

GROUPS = (None,) * 4  # a rank that only counts needs none


def test_equal_consecutive_nodes():
    assert _ranks_per_node_of(["a", "a", "b", "b", "c", "c"]) == 2
    assert _ranks_per_node_of(["a"] * 8) == 8
    assert _ranks_per_node_of(["a", "b", "c"]) == 1


@pytest.mark.parametrize(
    "names", [["a", "a", "b"], ["a", "b", "a", "b"], ["a", "b", "b", "a"], ["a", "a", "b", "b", "a", "a"]]
)
def test_unequal_or_interleaved_nodes_are_refused(names):
    with pytest.raises(ValueError, match="not split evenly"):
        _ranks_per_node_of(names)


def _groups(ranks_per_node):
    topology = build_topology(dist.group.WORLD, ranks_per_node)
    return (
        topology.node,
        topology.local_rank,
        dist.get_process_group_ranks(topology.intra_group),
        dist.get_process_group_ranks(topology.inter_group),
    )


def test_a_rank_exchanges_with_its_node_and_with_its_place_on_other_nodes(on_four_ranks):
    for rank, (node, local_rank, intra, inter) in enumerate(on_four_ranks["2 per node"]):
        assert (node, local_rank) == divmod(rank, 2)
        assert intra == [2 * node, 2 * node + 1]
        assert inter == [local_rank, local_rank + 2]


def _timeouts():
    group = dist.new_group(timeout=timedelta(seconds=123))
    topology = build_topology(group, 2)
    groups = (topology.group, topology.intra_group, topology.inter_group)
    return [each._get_backend(torch.device("cpu")).options._timeout for each in groups]


NCCL = ("nccl", "cpu:gloo,cuda:nccl", "undefined")  # as programs name it; the last gave init_process_group no name


class Options:
    """Stands in for torch's ProcessGroupNCCL.Options, which only builds with NCCL have."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)


def _options_with_nccl(ranks_per_node, name):
    """What NCCL would be told of each group that is made of some of the ranks: members, priority, timeout."""
    made, new_group = [], dist.new_group
    world = dist.new_group(timeout=timedelta(seconds=123))

    def recorded(ranks, timeout, backend, pg_options, **more):
        assert (backend, pg_options._timeout) == (name, timeout)  # else torch warns, and takes the timeout
        made.append((ranks, pg_options.is_high_priority_stream, timeout))
        return new_group(ranks, timeout, "gloo", **more)

    on_cpu = SimpleNamespace(options=world._get_backend(torch.device("cpu")).options)
    with (
        patch.object(dist, "get_backend", lambda group: name),
        patch.object(dist, "get_backend_config", lambda group: "cuda:nccl" if name == "nccl" else "cpu:gloo,cuda:nccl"),
        patch.object(type(world), "_get_backend", lambda group, device: on_cpu),
        patch.object(dist, "new_group", recorded),
        patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True),
    ):
        topology = build_topology(world, ranks_per_node)
    return made, topology.inter_group is not topology.group


def _of_gradients(have_own_group):
    """Whether gradients have a group of their own, its ranks, and the gradients' ranks after a step."""
    with patch.object(topology, "_runs_in_order", lambda _: have_own_group):
        model = Net()
        zeropp = shard(model, ZeroPPConfig(True, 2, quantized_gradients=True, weight_block_size=32), model.blocks)
    of_unit = zeropp.topologies[0]
    with patch.object(reduce_scatter, "start_exchange", side_effect=reduce_scatter.start_exchange) as send:
        model(torch.ones(2, 24) * (1 + dist.get_rank())).square().sum().backward()
    has_own = of_unit.reduce_group is not of_unit.intra_group
    used = {call.args[4] for call in send.call_args_list} == {of_unit.reduce_group, of_unit.inter_group}
    norm = sum(local_part(parameter.grad).norm().item() for parameter in model.parameters())
    return has_own, used, dist.get_process_group_ranks(of_unit.reduce_group), norm


def _refusal(ranks_per_node):
    with pytest.raises(ValueError) as refusal:
        _groups(ranks_per_node)
    return str(refusal.value)


def _on_two_nodes(function, *args):
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)  # as torchrun's agents number themselves
    return function(*args)


@pytest.fixture(scope="module")
def on_four_ranks():
    functions = {"timeouts": _timeouts, "one host": partial(_groups, None), "3 per node": partial(_refusal, 3)}
    functions |= {f"own group {own}": partial(_of_gradients, own) for own in (False, True)}
    functions |= {
        f"{name}, {number} per node": partial(_options_with_nccl, number, name) for name in NCCL for number in (1, 2)
    }
    functions["2 per node"] = partial(_groups, 2)
    functions["1 per node"] = partial(_on_two_nodes, _groups, 1)
    functions["4 per node"] = partial(_on_two_nodes, _refusal, 4)
    return run_in_turn(4, functions)


def test_groups_wait_as_long_as_the_one_that_they_are_of(on_four_ranks):
    assert on_four_ranks["timeouts"] == [[timedelta(seconds=123)] * 3] * 4


def test_gradients_have_a_communicator_of_their_own_where_collectives_of_one_wait_for_each_other(on_four_ranks):
    shared, own = on_four_ranks["own group False"], on_four_ranks["own group True"]
    for rank in range(4):
        node = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert shared[rank][:3] == (False, True, node) and own[rank][:3] == (True, True, node)
        assert shared[rank][3] == own[rank][3] > 0


@pytest.mark.parametrize("name", NCCL)
def test_nccl_runs_what_is_in_flight_before_what_computes_as_fsdp2_does(on_four_ranks, name):
    seconds = timedelta(seconds=123)
    for rank in range(4):
        node, same = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        made = [(each, True, seconds) for each in (node, same, node)]
        assert on_four_ranks[f"{name}, 2 per node"][rank] == (made, True)
        # Gradients between nodes of one rank are in flight, too: not on the program's group, whose priority is its own.
        made, has_own = on_four_ranks[f"{name}, 1 per node"][rank]
        assert has_own and ([0, 1, 2, 3], True, seconds) in made


def test_ranks_of_one_host_are_one_node_and_a_wrong_size_is_refused(on_four_ranks):
    assert [groups[2] for groups in on_four_ranks["one host"]] == [[0, 1, 2, 3]] * 4
    for message in on_four_ranks["3 per node"]:
        assert "not split evenly over nodes in consecutive runs of 3" in message


def test_a_node_size_beyond_the_node_is_refused(on_four_ranks):
    assert [groups[2] for groups in on_four_ranks["1 per node"]] == [[0], [1], [2], [3]]
    for message in on_four_ranks["4 per node"]:
        assert "not split evenly over nodes in consecutive runs of 4" in message


@pytest.mark.parametrize("num_nodes, ranks_per_node, crossing", [(2, 3, {2, 5}), (1, 6, set()), (6, 1, set(range(6)))])
def test_only_the_last_rank_of_a_node_sends_to_another_one(num_nodes, ranks_per_node, crossing):
    """Each of 6 ranks passes 5 pieces on; gloo's reduce-scatter goes around twice."""
    for rank in range(6):
        layout, gathered, reduced = Topology(num_nodes, ranks_per_node, rank, *GROUPS), Traffic(), Traffic()
        assert (layout.node, layout.local_rank) == divmod(rank, ranks_per_node)
        count_flat_ring(gathered, layout, 100)
        count_reduce_scatter(reduced, layout, torch.empty(25))
        assert gathered == (Traffic(0, 500) if rank in crossing else Traffic(500, 0))
        assert reduced == (Traffic(0, 1000) if rank in crossing else Traffic(1000, 0))
        on_gpu = Traffic()
        count_reduce_scatter(on_gpu, layout, torch.empty(25, device="meta"))
        assert on_gpu == gathered


def test_an_evaluation_counts_only_what_stays():
    layout, traffic = Topology(2, 1, 0, *GROUPS), Traffic()
    with traffic.evaluating():
        count_flat_ring(traffic, layout, 100)
        count_reduce_scatter(traffic, layout, torch.empty(25))
        assert traffic.take() == Traffic(0, 0)
        count_flat_ring(traffic, layout, 100, stays=True)
    traffic.add(intra_node=7)
    assert traffic.take() == Traffic(7, 100)
    assert traffic.take() == Traffic(0, 0)
