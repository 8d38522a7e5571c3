"""--log-straggler: who is named, when, and that a healthy run names nobody."""

import itertools
import os
import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.training import stragglers
from megatron_zpp.training.stragglers import LinkWatch, measure_links, rounds_of, slow_links, usual_rate
from megatron_zpp.zeropp.fsdp import waits
from megatron_zpp.zeropp.fsdp.topology import Topology
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, train_quietly

HOSTS = ["a", "b", "c", "d", "e"]


# Ranks that compute slowly, on a clock that only they move


def said(argv: list[str], slow: dict[int, range]) -> list[str]:
    """What the first rank says of stragglers. A forward pass takes a second, in steps of ``slow`` of a rank two."""
    run, _ = start(argv)
    clock = [0.0]
    rank = run.zeropp.topologies[0].rank

    def hook(model, inputs, losses):
        clock[0] += 1 + (run.counters.iteration + 1 in slow.get(rank, ())) if model.training else 1000

    run.model.register_forward_hook(hook)
    stopped = SimpleNamespace(perf_counter=lambda: clock[0])
    with (
        patch.object(waits, "time", stopped),
        patch("megatron_zpp.training.step.time", stopped),
        patch.object(stragglers, "EVERY", 2),
    ):
        text = train_quietly(run)
    return [line for line in text.splitlines() if line.startswith("straggler: ")]


def test_a_rank_is_named_while_it_computes_slowly_and_no_other(data):
    argv = flags(data, "--log-straggler --zeropp-ranks-per-node 4 --eval-interval 7 --global-batch-size 4")
    argv += ["--train-iters", "20"]
    slow = {2: range(5, 13), 1: range(5, 11)}  # of rank 1 it does not last
    first, *others = run_ranks(4, said, argv, slow)
    host = os.uname().nodename
    assert first == [
        f"straggler: rank 2 ({host}) computes slowly, 2000.0 ms a step instead of 1000.0, since step 5",
        f"straggler: over since step 13: rank 2 ({host}) computes slowly",
    ]
    assert others == [[], [], []]


# Links: what rates say


@pytest.mark.parametrize("num_nodes", range(2, 12))
def test_rounds_measure_each_link_alone(num_nodes):
    rounds = rounds_of(num_nodes)
    links = [link for round in rounds for link in round.items()]
    shifts = (1, 2) if num_nodes > 2 else (1,)
    assert sorted(links) == sorted((node, (node + shift) % num_nodes) for node in range(num_nodes) for shift in shifts)
    for round in rounds:
        assert len({*round, *round.values()}) == 2 * len(round)
    assert len(rounds) <= 6


def rates_of(num_nodes: int, slow: dict[tuple[int | None, int | None], float], usual: float = 1.25e9):
    """Return the rates of all measured links; those from or to a node, or between two, times a factor."""
    rates = {}
    for link in itertools.chain.from_iterable(round.items() for round in rounds_of(num_nodes)):
        factors = [f for (a, b), f in slow.items() if a in (None, link[0]) and b in (None, link[1])]
        rates[link] = usual * min(factors, default=1.0)
    return rates


@pytest.mark.parametrize("num_nodes", [3, 4, 5])
def test_the_node_is_named_whose_link_is_slow(num_nodes):
    for node in range(num_nodes):
        both = slow_links(rates_of(num_nodes, {(node, None): 0.1, (None, node): 0.1}), 0, HOSTS[:num_nodes])
        name = f"node {node} ({HOSTS[node]})"
        assert both == {f"{name} sends slowly": 1.25e8, f"{name} receives slowly": 1.25e8}
        sends = slow_links(rates_of(num_nodes, {(node, None): 0.2}), 0, HOSTS[:num_nodes])
        assert sends == {f"{name} sends slowly": 2.5e8}
        other = (node + 1) % num_nodes
        single = slow_links(rates_of(num_nodes, {(node, other): 0.1}), 0, HOSTS[:num_nodes])
        assert single == {f"the link from {name} to node {other} ({HOSTS[other]}) is slow": 1.25e8}
    assert slow_links(rates_of(num_nodes, {(1, None): 0.6}), 0, HOSTS[:num_nodes]) == {}


def test_of_two_nodes_a_direction_is_named_or_all():
    found = slow_links(rates_of(2, {(1, 0): 0.1}), 0, HOSTS[:2])
    assert found == {"the link from node 1 (b) to node 0 (a) is slow": 1.25e8}
    rates = rates_of(2, {(None, None): 0.1})
    assert slow_links(rates, usual_rate(rates), HOSTS[:2]) == {}  # nothing tells that it has ever been faster
    assert slow_links(rates, 1.25e9, HOSTS[:2]) == {"all links between nodes are slow": 1.25e8}


def test_links_are_measured_when_ranks_wait_longer():
    now = rates_of(3, {})
    measured = []

    def measure():
        measured.append(step)
        return now

    watch, lines = LinkWatch(measure, HOSTS[:3]), []
    for step in range(6, 2500, 5):
        slow = 100 <= step < 1100
        now = rates_of(3, {(1, None): 0.1} if slow else {})
        noise = 0.05 if step % 3 else -0.05
        lines += watch.look(3.0 + noise if slow else 1.0 + noise, 4.0 if slow else 2.0, step)
    assert measured[:5] == [6, 101, 106, 111, 211]  # once; when waits have grown, and again to be sure; then rarely
    assert lines == [
        "node 1 (b) sends slowly, 1 Gbit/s instead of 10 Gbit/s, since step 101",
        "over since step 1111: node 1 (b) sends slowly",
    ]
    assert len(measured) < 20


def test_a_slow_measurement_alone_names_nobody():
    slow = rates_of(3, {(0, None): 0.1})
    rates = [rates_of(3, {}), slow, slow, rates_of(3, {})]
    watch = LinkWatch(lambda: rates.pop(0), HOSTS[:3])
    waited = [1.0, 1.0, 5.0, 5.0, 5.0, 5.0]
    assert [watch.look(seconds, 6.0, 5 * i) for i, seconds in enumerate(waited)] == [[]] * 6 and not rates


def measured():
    """Links of 3 nodes of 2 ranks, when rank 3 starts to send two seconds late."""
    exchange = dist.batch_isend_irecv

    def late(operations):
        if dist.get_rank() == 3 and operations[0].op is dist.isend:
            time.sleep(2.0)
        return exchange(operations)

    with patch.object(dist, "batch_isend_irecv", late), patch.object(stragglers, "REPEATS", 1):
        return dict(measure_links(Topology(3, 2, dist.get_rank(), *[None] * 4), torch.device("cpu")))


def test_all_links_are_slow_against_what_they_usually_were():
    """Not against the best measurement, which may have been lucky."""
    usual = [1.0, 5.0, 1.1, 0.9, 1.0, *[0.1] * 5]
    watch = LinkWatch(lambda: rates_of(2, {}, usual.pop(0)), HOSTS[:2])
    lines = [watch.look(0.0, 1.0, 1000 * i if i < 6 else 6000 + 100 * i) for i in range(10)]
    name = "all links between nodes are slow, 8e-10 Gbit/s instead of 8e-09 Gbit/s, since step 5000"
    assert lines == [[name] if i == 7 else [] for i in range(10)]


@pytest.mark.long
def test_a_node_is_as_fast_as_its_slowest_rank():
    rates = run_ranks(6, measured, timeout=60)
    assert all(of_rank == rates[0] for of_rank in rates) and rates[0].keys() == rates_of(3, {}).keys()
    # Each of two ranks sends 1 MiB. Where cores are busy a receiver may begin to wait some of the two seconds late.
    assert all((rate < 2 * 2**20 / 1.0) == (sender == 1) for (sender, _), rate in rates[0].items())
