"""``--log-straggler``: name ranks that compute slowly and nodes whose link is slow, if that lasts."""

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.metrics.throughput import synchronize
from megatron_zpp.parallel.distributed import print_once, wait_for_all_ranks
from megatron_zpp.training.reporter import Reporter
from megatron_zpp.training.trainer import Callback, StepStats, Trainer
from megatron_zpp.zeropp.fsdp.collectives import all_gather
from megatron_zpp.zeropp.fsdp.topology import Topology, gather_objects

EVERY = 5  # optimizer steps, over which all times here are means
MUCH = 0.1  # a rank that computes longer than others by this share of a step is slow
LONGER = 0.2  # measure links when ranks wait for them longer than usual by this share of a step
RANK_LASTS = 4  # times in a row that a rank is slow before it is named
LINK_LASTS = 3  # measurements in a row
MEASURE_EVERY = 1000  # optimizer steps, even if nobody waits longer
MEASURE_NAMED_EVERY = 100  # while a link is named


class Stragglers(Callback):
    """For runs whose ranks share one model by FSDP alone. How long others wait for each other is not known."""

    def __init__(self, trainer: Trainer, reporter: Reporter) -> None:
        """Collective, as ``on_step`` is. reporter: knows how long this rank waited for links."""
        assert trainer.zeropp is not None
        self.counters, self.reporter = trainer.counters, reporter
        self.device, layout = trainer.device, trainer.zeropp.topologies[0]
        self.hosts = gather_objects(socket.gethostname())
        self.ranks, self.links = Lasting(RANK_LASTS), None
        if layout.num_nodes > 1:
            self.links = LinkWatch(lambda: measure_links(layout, trainer.device), self.hosts[:: layout.ranks_per_node])
        self.is_warm = False
        self._clear()

    def _clear(self) -> None:
        self.num_steps = 0
        self.seconds = [0.0, 0.0, 0.0]  # the steps so far; waits for links within nodes; waits between nodes

    def on_step(self, stats: StepStats) -> None:
        step = (stats.seconds, *self.reporter.add_waits())
        self.seconds = [so_far + more for so_far, more in zip(self.seconds, step, strict=True)]
        self.num_steps += 1
        if self.num_steps == EVERY:
            local = torch.tensor(self.seconds, dtype=torch.float64, device=self.device) / EVERY
            gathered = local.new_empty(len(self.hosts), len(local))
            all_gather(gathered.flatten(), local)
            self._clear()
            if self.is_warm:  # the first steps set things up
                self._look(gathered.tolist(), self.counters.iteration - EVERY + 1)
            self.is_warm = True

    def _look(self, times: list[list[float]], step: int) -> None:
        """``times``: each rank's ``seconds``, from ``step`` on. The same on all ranks, so that all do the same."""
        computed = [step - within - between for step, within, between in times]  # seconds without waiting for others
        usual, much = statistics.median(computed), MUCH * max(step for step, _, _ in times)
        slow = {
            f"rank {rank} ({self.hosts[rank]}) computes slowly": f"{1000 * seconds:.1f} ms a step instead of "
            f"{1000 * usual:.1f}"
            for rank, seconds in enumerate(computed)
            if seconds > usual + much
        }
        lines = self.ranks.look(slow, step)
        if self.links is not None:
            seconds, _, waited = (statistics.fmean(column) for column in zip(*times, strict=True))
            lines += self.links.look(waited, seconds, step)
        for line in lines:
            print_once(f"straggler: {line}")


class LinkWatch:
    """Measures links at intervals, and when ranks begin to wait for them."""

    def __init__(self, measure: Callable[[], Sequence[float]], hosts: Sequence[str]) -> None:
        """measure: collective; bytes per second from each node to the next. hosts: of each node."""
        nodes = [f"node {node} ({host})" for node, host in enumerate(hosts)]
        pairs = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        self.measure, self.names = measure, [f"the link from {a} to {b} is slow" for a, b in pairs]
        self.slow = Lasting(LINK_LASTS)
        self.healthy: list[float] = []  # fastest rates of measurements that found nothing slow
        self.usual_wait = 0.0
        self.measured: int | None = None  # the step of the last measurement

    def look(self, waited: float, seconds: float, step: int) -> list[str]:
        """Return lines to print. ``waited``: for links between nodes, of a step's ``seconds``, from ``step`` on."""
        waits_longer = waited > self.usual_wait + LONGER * seconds
        every = MEASURE_NAMED_EVERY if self.slow.named else MEASURE_EVERY
        is_due = self.measured is None or step - self.measured >= every
        if not (is_due or waits_longer or self.slow.changes):
            self.usual_wait += 0.2 * (waited - self.usual_wait)
            return []
        self.usual_wait, self.measured = waited, step
        rates = self.measure()
        usual = max(*rates, statistics.median_low(self.healthy or [0.0]))  # all may have become slow
        slow = {name: rate for name, rate in zip(self.names, rates, strict=True) if rate < SLOW * usual}
        if not slow:
            self.healthy.append(max(rates))
        shown = {name: f"{8e-9 * rate:.3g} Gbit/s instead of {8e-9 * usual:.3g} Gbit/s" for name, rate in slow.items()}
        return self.slow.look(shown, step)


class Lasting:
    """Report what is seen `times` times in a row, and when it is gone for as long."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.named: set[str] = set()
        self.changes: dict[str, list[int]] = {}  # steps in a row at which it was seen and not named, or the contrary

    def look(self, seen: Mapping[str, str], step: int) -> list[str]:
        """Return a line for each change. ``seen``: what is to be named, and its figures now."""
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
REPEATS = 3  # per message; the fastest one counts
SLOW = 0.5  # a link below this share of the usual rate is slow


def measure_links(layout: Topology, device: torch.device) -> list[float]:
    """Measure what each node sends to the next with all its ranks at once, at the slowest rank's rate. Collective.

    ``layout``: of all ranks of the run. A rank exchanges messages with those that have its local rank. Returns bytes
    per second by sending node.
    """
    for nbytes in SIZES:
        message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        seconds = min(_exchange(message, layout) for _ in range(REPEATS))
        gathered = message.new_empty(layout.world_size, dtype=torch.float64)
        all_gather(gathered, gathered.new_full((1,), seconds))
        if gathered.max() >= LONG_ENOUGH:
            break
    slowest = gathered.view(layout.num_nodes, layout.ranks_per_node).amax(1).roll(-1)  # the receiving node's
    return (layout.ranks_per_node * nbytes / slowest).tolist()


def _exchange(message: Tensor, layout: Topology) -> float:
    """Send to the next node; return the seconds until this rank has received the message of the one before."""

    def partner(shift: int) -> int:
        return (layout.node + shift) % layout.num_nodes * layout.ranks_per_node + layout.local_rank

    received = torch.empty_like(message)
    wait_for_all_ranks(message.device)
    synchronize(message.device)
    begin = time.perf_counter()
    # As a batch: with NCCL, a message by itself would make a communicator for each pair.
    sent, arrives = dist.P2POp(dist.isend, message, partner(1)), dist.P2POp(dist.irecv, received, partner(-1))
    *sends, receives = dist.batch_isend_irecv([sent, arrives])
    receives.wait()
    synchronize(message.device)
    seconds = time.perf_counter() - begin
    for work in sends:
        work.wait()
    return seconds
