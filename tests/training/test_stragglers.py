"""--log-straggler: who is named, when, and that a healthy run names nobody."""

import os
import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.training import stragglers
from megatron_zpp.training.stragglers import LinkWatch, measure_links
from megatron_zpp.zeropp.fsdp import waits
from megatron_zpp.zeropp.fsdp.topology import Topology
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, train_quietly

HOSTS = ["a", "b", "c"]


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
    slow = {2: range(5, 13), 1: range(5, 11)}  # rank 1 recovers
    first, *others = run_ranks(4, said, argv, slow)
    host = os.uname().nodename
    assert first == [
        f"straggler: rank 2 ({host}) computes slowly, 2000.0 ms a step instead of 1000.0, since step 5",
        f"straggler: over since step 13: rank 2 ({host}) computes slowly",
    ]
    assert others == [[], [], []]


def rates_of(*factors: float) -> list[float]:
    """10 Gbit/s from each node to the next, times a factor."""
    return [1.25e9 * factor for factor in factors]


def test_links_are_measured_when_ranks_wait_longer():
    now = rates_of(1, 1, 1)
    measured = []

    def measure():
        measured.append(step)
        return now

    watch, lines = LinkWatch(measure, HOSTS[:3]), []
    for step in range(6, 2500, 5):
        slow = 100 <= step < 1100
        now = rates_of(1, 0.1 if slow else 1, 0.6)
        noise = 0.05 if step % 3 else -0.05
        lines += watch.look(3.0 + noise if slow else 1.0 + noise, 4.0 if slow else 2.0, step)
    assert measured[:5] == [6, 101, 106, 111, 211]  # once; when waits have grown, and again to be sure; then rarely
    assert lines == [
        "the link from node 1 (b) to node 2 (c) is slow, 1 Gbit/s instead of 10 Gbit/s, since step 101",
        "over since step 1111: the link from node 1 (b) to node 2 (c) is slow",
    ]
    assert len(measured) < 20


def test_a_slow_measurement_alone_names_nobody():
    slow = rates_of(1, 1, 0.1)
    rates = [rates_of(1, 1, 1), slow, slow, rates_of(1, 1, 1)]
    watch = LinkWatch(lambda: rates.pop(0), HOSTS[:3])
    waited = [1.0, 1.0, 5.0, 5.0, 5.0, 5.0]
    assert [watch.look(seconds, 6.0, 5 * i) for i, seconds in enumerate(waited)] == [[]] * 6 and not rates


def measured():
    """Links of 3 nodes of 2 ranks, when rank 3 sends two seconds late."""
    exchange = dist.batch_isend_irecv

    def late(operations):
        if dist.get_rank() != 3:
            return exchange(operations)
        sender = threading.Timer(2.0, lambda: exchange(operations[:1])[0].wait())
        sender.start()
        return [SimpleNamespace(wait=sender.join), *exchange(operations[1:])]

    with patch.object(dist, "batch_isend_irecv", late), patch.object(stragglers, "REPEATS", 1):
        return measure_links(Topology(3, 2, dist.get_rank(), *[None] * 4), torch.device("cpu"))


@pytest.mark.long
def test_a_node_is_as_fast_as_its_slowest_rank():
    rates = run_ranks(6, measured, timeout=60)
    assert all(of_rank == rates[0] for of_rank in rates) and len(rates[0]) == 3
    # Each of two ranks sends 1 MiB. Where cores are busy a receiver may begin to wait some of the two seconds late.
    assert [rate < 2 * 2**20 / 1.0 for rate in rates[0]] == [False, True, False]
