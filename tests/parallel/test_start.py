"""How ranks find the store of their start among those of earlier starts, over a real TCPStore."""

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_zpp.parallel.distributed import _begin_start, _find_start

SECONDS = 20


class Client:
    """A connection of its own, which counts what is asked."""

    def __init__(self, port: int) -> None:
        patience = timedelta(seconds=SECONDS)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name):
        self.asked[name] += 1
        return getattr(self.store, name)


@pytest.fixture
def port():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port


def start(port: int, world_size: int, first: int = 0) -> tuple[list[Client], list[Future]]:
    """Start all ranks, ``first`` before the others, each in a thread."""
    clients = [Client(port) for _ in range(world_size)]
    pool = ThreadPoolExecutor(world_size)
    order = [first, *(rank for rank in range(world_size) if rank != first)]
    found = dict.fromkeys(range(world_size))
    for rank in order:
        find = (_begin_start, world_size) if rank == 0 else (_find_start, rank)
        found[rank] = pool.submit(find[0], clients[rank], find[1])
    pool.shutdown(wait=False)
    return clients, [found[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_each_rank_sends_a_handful_of_requests(port, world_size):
    for number in (1, 2, 3):
        clients, found = start(port, world_size, first=world_size - 1)
        assert [rank.result(SECONDS) for rank in found] == [number] * world_size
        assert max(client.asked.total() for client in clients) <= 7


@pytest.mark.parametrize("died", ["at once", "before it answered", "after it answered"])
def test_ranks_that_come_before_rank_0_leave_the_start_of_a_dead_one(port, died):
    dead = Client(port)
    if died == "after it answered":
        found = start(port, 4)[1]
        assert [rank.result(SECONDS) for rank in found] == [1] * 4
    else:
        dead.add("megatron_zpp/starts", 1)
    if died == "before it answered":
        dead.set("megatron_zpp/begun 1", "")
    pool = ThreadPoolExecutor(4)
    early = [pool.submit(_find_start, Client(port), rank) for rank in (1, 2, 3)]
    time.sleep(0.3)
    assert not any(rank.done() for rank in early)
    late = pool.submit(_begin_start, Client(port), 4)
    assert [rank.result(SECONDS) for rank in (late, *early)] == [2] * 4


def test_a_rank_that_is_missing_is_waited_for_no_longer_than_the_store_waits(port):
    client = Client(port)
    client.store.set_timeout(timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError):
        _begin_start(client, 2)
