"""``--log-straggler``: says which rank computes slowly and which node's link is slow, where that lasts."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.metrics.throughput import synchronize
from megatron_zpp.parallel.distributed import print_once, wait_for_all_ranks
from megatron_zpp.training.run import Run
from megatron_zpp.zeropp.fsdp.collectives import all_gather
from megatron_zpp.zeropp.fsdp.topology import RankLayout, gather_objects

EVERY = 5  # optimizer steps, over which all times here are means
MUCH = 0.1  # of a step: a rank that computes so much longer than others is slow
LONGER = 0.2  # of a step: links are measured when ranks wait so much longer for them than usual
RANK_LASTS = 4  # times in a row that a rank is slow before it is named
LINK_LASTS = 3  # measurements in a row
MEASURE_EVERY = 1000  # optimizer steps, even if nobody waits longer
MEASURE_NAMED_EVERY = 100  # while a link is named


class Stragglers:
    """For runs whose ranks share one model by FSDP alone. How long others wait for each other is not known."""

    def __init__(self, run: Run) -> None:
        """Collective, as ``step`` is."""
        assert run.zeropp is not None
        self.device, layout = run.device, run.zeropp.topologies[0]
        self.hosts = gather_objects(socket.gethostname())
        hosts_of_nodes = self.hosts[:: layout.ranks_per_node]
        self.ranks, self.links = Lasting(RANK_LASTS), None
        if layout.num_nodes > 1:
            self.links = LinkWatch(lambda: measure_links(layout, run.device), hosts_of_nodes)
        self.is_warm = False
        self._clear()
        self.resume()

    def _clear(self) -> None:
        self.num_steps = 0
        self.seconds = [0.0, 0.0, 0.0]  # of the steps so far; waited for links within nodes; and between nodes

    def resume(self) -> None:
        """Leave out what was since the last step: it was no training."""
        self.begin = time.perf_counter()

    def step(self, waited: Sequence[float], iteration: int) -> None:
        """After each optimizer step. ``waited``: this rank's seconds within nodes, and between nodes."""
        step = (time.perf_counter() - self.begin, *waited)
        self.seconds = [so_far + more for so_far, more in zip(self.seconds, step, strict=True)]
        self.num_steps += 1
        if self.num_steps == EVERY:
            self._gather(iteration - EVERY + 1)
        self.resume()

    def _gather(self, step: int) -> None:
        own = torch.tensor(self.seconds, dtype=torch.float64, device=self.device) / EVERY
        of_ranks = own.new_empty(len(self.hosts), len(own))
        all_gather(of_ranks.flatten(), own)
        self._clear()
        if self.is_warm:  # the first steps set things up
            self._look([*of_ranks.tolist()], step)
        self.is_warm = True

    def _look(self, times: list[list[float]], step: int) -> None:
        """``times``: each rank's ``seconds``, from ``step`` on. The same on all ranks, so that all do the same."""
        slow = {
            f"rank {rank} ({self.hosts[rank]}) computes slowly": f"{1000 * own:.1f} ms a step instead of "
            f"{1000 * usual:.1f}"
            for rank, (own, usual) in slow_ranks(times).items()
        }
        lines = self.ranks.look(slow, step)
        if self.links is not None:
            seconds, _, waited = (statistics.fmean(column) for column in zip(*times, strict=True))
            lines += self.links.look(waited, seconds, step)
        for line in lines:
            print_once(f"straggler: {line}")


def slow_ranks(times: Sequence[Sequence[float]]) -> dict[int, tuple[float, float]]:
    """Rank: seconds of a step in which it did not wait for others, and the ranks' median of that.

    times [W, 3]: seconds of each rank's step; of these waited for links within nodes; and between nodes.
    """
    own = [step - within - between for step, within, between in times]
    usual = statistics.median(own)
    much = MUCH * max(step for step, _, _ in times)
    return {rank: (seconds, usual) for rank, seconds in enumerate(own) if seconds > usual + much}


class LinkWatch:
    """Measures links now and then, and when ranks begin to wait for them."""

    def __init__(self, measure: Callable[[], Rates], hosts: Sequence[str]) -> None:
        """measure: collective. hosts: of each node."""
        self.measure, self.hosts = measure, hosts
        self.slow = Lasting(LINK_LASTS)
        self.healthy: list[float] = []  # usual rates of measurements that found nothing slow
        self.usual_wait = 0.0
        self.measured: int | None = None  # the step of the last measurement

    def look(self, waited: float, seconds: float, step: int) -> list[str]:
        """What there is to say. ``waited``: for links between nodes, of a step's ``seconds``, from ``step`` on."""
        waits_longer = waited > self.usual_wait + LONGER * seconds
        every = MEASURE_NAMED_EVERY if self.slow.named else MEASURE_EVERY
        is_due = self.measured is None or step - self.measured >= every
        if not (is_due or waits_longer or self.slow.is_open):
            self.usual_wait += 0.2 * (waited - self.usual_wait)
            return []
        self.usual_wait, self.measured = waited, step
        rates = self.measure()
        usual, before = usual_rate(rates), statistics.median_low(self.healthy or [0.0])
        found = slow_links(rates, before, self.hosts)
        if not found:
            self.healthy.append(usual)
        figures = {what: f"{_gbits(rate)} instead of {_gbits(max(usual, before))}" for what, rate in found.items()}
        return self.slow.look(figures, step)


def _gbits(bytes_per_second: float) -> str:
    return f"{8e-9 * bytes_per_second:.3g} Gbit/s"


class Lasting:
    """Report what is seen `times` times in a row, and when it is gone for as long."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.named: set[str] = set()
        self.changes: dict[str, list[int]] = {}  # steps at which, in a row, it was seen and not named, or the contrary

    @property
    def is_open(self) -> bool:
        """Whether something may be named, or be over, next time."""
        return bool(self.changes)

    def look(self, seen: Mapping[str, str], step: int) -> list[str]:
        """A line for each change. ``seen``: what is to be named, and its figures now."""
        changes = seen.keys() ^ self.named
        self.changes = {what: [*self.changes.get(what, []), step] for what in sorted(changes)}
        lasting = {what: steps[0] for what, steps in self.changes.items() if len(steps) == self.times}
        for what in lasting:
            del self.changes[what]
        self.named ^= lasting.keys()
        return [
            f"{what}, {seen[what]}, since step {since}" if what in seen else f"over since step {since}: {what}"
            for what, since in lasting.items()
        ]


SIZES = (2**20, 2**23, 2**26)  # bytes of a message: the first one that takes long enough counts, or the last
LONG_ENOUGH = 0.01  # seconds
REPEATS = 3  # of each message; the fastest one counts
SLOW = 0.5  # of the usual rate

Rates = Mapping[tuple[int, int], float]  # bytes per second, from one node to another


def rounds_of(num_nodes: int) -> list[dict[int, int]]:
    """Sender: receiver, of each round. Every node sends to the next node and to the one behind it, in some round.

    A node takes part in a round once, so that what a message takes is the doing of its own link.
    """
    rounds: list[dict[int, int]] = []
    for shift in (1, 2) if num_nodes > 2 else (1,):
        for sender in range(num_nodes):
            receiver = (sender + shift) % num_nodes
            free = (round for round in rounds if {sender, receiver}.isdisjoint({*round, *round.values()}))
            round = next(free, None)
            if round is None:
                rounds.append(round := {})
            round[sender] = receiver
    return rounds


def measure_links(layout: RankLayout, device: torch.device) -> Rates:
    """What nodes send to each other, with all their ranks at once, as often as the slowest rank does. Collective.

    ``layout`` is of all ranks of the run. A rank exchanges messages with those that have its local rank.
    """
    rounds = rounds_of(layout.num_nodes)
    for nbytes in SIZES:
        message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        own = torch.tensor(
            [min(_receive(message, round, layout) for _ in range(REPEATS)) for round in rounds],
            dtype=torch.float64,
            device=device,
        )
        of_ranks = own.new_empty(layout.world_size, len(rounds))
        all_gather(of_ranks.flatten(), own)
        if of_ranks.max() >= LONG_ENOUGH:
            break
    slowest = of_ranks.view(layout.num_nodes, layout.ranks_per_node, len(rounds)).amax(1).tolist()  # of each node
    return {
        (sender, receiver): layout.ranks_per_node * nbytes / slowest[receiver][i]
        for i, round in enumerate(rounds)
        for sender, receiver in round.items()
    }


def _receive(message: Tensor, round: Mapping[int, int], layout: RankLayout) -> float:
    """Seconds until what this rank receives in a round was there; 0 if it receives nothing."""
    senders = {receiver: sender for sender, receiver in round.items()}
    operations = [
        dist.P2POp(operation, message, partners[layout.node] * layout.ranks_per_node + layout.local_rank)
        for operation, partners in ((dist.isend, round), (dist.irecv, senders))
        if layout.node in partners
    ]
    wait_for_all_ranks(message.device)
    synchronize(message.device)
    begin = time.perf_counter()
    if operations:  # one, but as a batch: with NCCL, a message by itself would make a communicator for each pair
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        synchronize(message.device)
    return time.perf_counter() - begin if layout.node in senders else 0.0


def usual_rate(rates: Rates) -> float:
    """The upper quartile: of three nodes, one that is slow both ways has part in four of the six links."""
    return sorted(rates.values())[3 * len(rates) // 4]


def slow_links(rates: Rates, before: float, hosts: Sequence[str]) -> dict[str, float]:
    """What is slow, in words: its rate in bytes per second. ``before``: the usual rate then; hosts: of nodes."""
    usual = usual_rate(rates)
    if usual < SLOW * before:
        return {"all links between nodes are slow": usual}
    names = [f"node {node} ({host})" for node, host in enumerate(hosts)]
    found: dict[str, list[float]] = {}
    for (sender, receiver), rate in rates.items():
        if rate >= SLOW * usual:
            continue
        sends, receives = _is_slow(rates, 0, sender, usual), _is_slow(rates, 1, receiver, usual)
        whats = [f"{names[sender]} sends slowly"] if sends else []
        whats += [f"{names[receiver]} receives slowly"] if receives else []
        for what in whats or [f"the link from {names[sender]} to {names[receiver]} is slow"]:
            found.setdefault(what, []).append(rate)
    return {what: statistics.fmean(of_links) for what, of_links in found.items()}


def _is_slow(rates: Rates, side: int, node: int, usual: float) -> bool:
    """Whether a node is slow to send (side 0) or receive (1), to or from whomever.

    Of two nodes, one's sending is the other's receiving, and neither is to blame.
    """
    of_node = [rate for link, rate in rates.items() if link[side] == node]
    return len(of_node) > 1 and max(of_node) < SLOW * usual
