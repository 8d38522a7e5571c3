"""The ranks of one place in the islands that are there: a gloo group, which is formed anew at each change."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import TypeVar

from torch.distributed import Store
from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper, create_store_client

T = TypeVar("T")


class MeetingGroup(ProcessGroupWrapper):
    """Of host memory and TCP: NCCL does not reliably survive a lost rank. torchft forms it, as the lighthouse says."""

    islands: tuple[int, ...] = ()  # the numbers of those in it, in the order of its ranks
    name = ""  # all in it have the same, and no other group ever had it

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        assert group_world_size is not None and global_ranks is not None
        self.islands, self.name = tuple(rank // group_world_size for rank in global_ranks), ""
        self.abort(errored=False)
        group = ProcessGroupGloo(self._timeout)

        def form() -> str:
            # A lighthouse that begins again counts quorums from 1: under that number may be what others left here.
            name = common_name(create_store_client(store_addr, self._timeout), rank, world_size, self._timeout)
            more = replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
            group.configure(f"{store_addr}/{name}", *more)
            return name

        self.name = within(3 * self._timeout, form)
        self._pg = group


def common_name(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A new one, the same on all ``size`` ranks that call this, whatever earlier calls left in the store."""
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", mine)
        name = store.get(f"answer/{mine}").decode()  # so that no old answer is one
        store.set(f"has/{name}/{rank}", "")
        return name
    deadline, others = time.monotonic() + timeout.total_seconds(), range(1, size)
    while not all(store.check([f"has/{mine}/{other}"]) for other in others):
        if time.monotonic() > deadline:
            raise TimeoutError("not all islands came to form a group")
        for other in others:
            if store.check([f"asks/{other}"]):  # perhaps in an earlier call: it asks again
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", mine)
        time.sleep(0.02)
    return mine


def within(timeout: timedelta, call: Callable[[], T]) -> T:
    """What ``call`` returns. Where a link is cut, a TCPStore waits much longer than its own timeout; it is left to."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return outcome.result(timeout.total_seconds())
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no group was formed in {timeout.total_seconds():g} seconds") from error
