"""Time that ranks wait for collectives: which of them, for how long, and under which name."""

import random
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.zeropp import ZeroPPConfig
from megatron_zpp.zeropp.fsdp import waits
from megatron_zpp.zeropp.fsdp.waits import Waits, overlap
from tests.ranks import run_in_turn
from tests.zeropp.training_on_ranks import ALL_FLAGS, shard

UNITS, MICRO_BATCHES = 3, 2  # two layers and the root


def counted(config: ZeroPPConfig) -> tuple[list[tuple[float, float]], set[str]]:
    """Return how often a rank waited within and between nodes in each of three steps, and for what."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    zeropp = shard(model, config, model[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert zeropp.waits.take_seconds() == (0, 0)  # from here on
    taken, names, ticks = [], [], iter(range(10_000))
    with patch.object(waits, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))):
        for step in range(3):
            zeropp.waits.are_named = step == 1
            with profile(activities=[ProfilerActivity.CPU]) if step > 0 else nullcontext() as recorded:
                for i in range(MICRO_BATCHES):
                    model.set_is_last_backward(i == MICRO_BATCHES - 1)
                    model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            taken.append(zeropp.waits.take_seconds())
            if recorded is not None:
                names.append({event.key for event in recorded.key_averages() if " nodes: " in event.key})
    named, unnamed = names
    assert not unnamed
    return taken, named


RANKS_PER_NODE = (2, 4)  # sizes of nodes on a flat ring


@pytest.fixture(scope="module")
def on_ranks():
    rings = {f"ring {size}": partial(counted, ZeroPPConfig(ranks_per_node=size)) for size in RANKS_PER_NODE}
    return run_in_turn(4, rings | {"all flags": partial(counted, ALL_FLAGS)})


def test_every_collective_is_waited_for_on_its_link(on_ranks):
    taken, names = on_ranks["all flags"][3]
    # The root stays gathered from the forward to the backward pass.
    gathers = MICRO_BATCHES * (2 * UNITS - 1)
    assert taken == [(gathers + MICRO_BATCHES * UNITS, 2 * UNITS)] * 3
    units = ("0", "1", "the root module")
    assert names == {f"{what} {link} nodes: {unit}" for what in ("gather", "reduce") for link in ("between", "within")
                     for unit in units}  # fmt: skip


@pytest.mark.parametrize(("ranks_per_node", "crosses"), [(2, True), (4, False)])
def test_a_flat_ring_waits_for_its_slowest_link(on_ranks, ranks_per_node, crosses):
    taken, names = on_ranks[f"ring {ranks_per_node}"][0]
    waited = MICRO_BATCHES * (2 * UNITS - 1 + UNITS)
    assert taken == [(0, waited) if crosses else (waited, 0)] * 3
    assert all(("between" in name) == crosses for name in names) and len(names) == 2 * UNITS


def test_overlap_of_intervals():
    draw = random.Random(0)
    for _ in range(200):
        first, second = (
            [(begin := draw.randrange(30), begin + draw.randrange(8)) for _ in range(draw.randrange(6))] for _ in "ab"
        )
        covered = [{tick for begin, end in each for tick in range(begin, end)} for each in (first, second)]
        assert overlap(first, second) == len(covered[0] & covered[1])


class Event:
    """One of a GPU whose time, in ms, is what the stream shows when it is recorded."""

    now, done = 0.0, 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.done

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query()  # CUDA raises an error
        return other.at - self.at


def test_on_a_gpu_what_counts_is_when_the_computing_stream_stood_still():
    of_gpu = Waits(torch.device("cuda"))
    assert of_gpu.take_seconds() == (0, 0)

    def record(around, begin: float, end: float) -> None:
        Event.now = begin
        with around:
            Event.now = end

    with patch.object(torch.cuda, "Event", Event), patch.object(waits, "current_stream"):
        record(of_gpu.collective("gather", "layers.0", crosses_nodes=True), 1000, 3000)
        record(of_gpu.collective("gather", "layers.0", crosses_nodes=False), 3000, 5000)
        record(of_gpu.collective("reduce", "layers.0", crosses_nodes=False), 1500, 2500)  # beside the first
        record(of_gpu.stall(), 2000, 4500)
        record(of_gpu.stall(), 6000, 7000)  # for something else
        Event.done = 6500
        assert of_gpu.take_seconds() == (0, 0)  # the host does not wait for the rest
        Event.done = 7000
        assert of_gpu.take_seconds() == pytest.approx((1.5, 1.0))
        assert of_gpu.take_seconds() == (0, 0)
