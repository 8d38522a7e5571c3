"""How fast every node sends and receives, by messages that cross one link at a time.

How long ranks wait for collectives cannot tell: in a ring all wait for the slowest link.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.metrics.throughput import synchronize
from megatron_zpp.parallel.distributed import wait_for_all_ranks
from megatron_zpp.zeropp.collectives import all_gather
from megatron_zpp.zeropp.topology import RankLayout

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
