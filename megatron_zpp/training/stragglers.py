"""``--log-straggler``: says which rank computes slowly and which node's link is slow, where that lasts."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_zpp.parallel.distributed import print_once
from megatron_zpp.training.links import Rates, measure_links, slow_links, usual_rate
from megatron_zpp.training.run import Run
from megatron_zpp.zeropp.collectives import all_gather
from megatron_zpp.zeropp.topology import gather_objects

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
    """Names what is seen so many times in a row, and says so when it is not seen so many times in a row."""

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
