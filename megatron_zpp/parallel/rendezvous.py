"""A store that only the ranks of one start of a job use."""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def fresh_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """torchrun's key-value store, this rank, and the number of ranks; RANK and its kin must be set. Collective.

    torchrun keeps one store for all its restarts (pytorch issue 135712), in which ranks would find the addresses of
    their dead predecessors and wait for them. So rank 0 draws a prefix, which is agreed upon when it has answered to a
    number that each other rank drew: an answer of an earlier start names other numbers.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store, rank, world_size
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set("megatron_zpp/start", mine)
        answers = {str(other): store.get(f"{mine}/{other}").decode() for other in range(1, world_size)}  # waits
        store.set(f"{mine}/answers", json.dumps(answers))
        return dist.PrefixStore(mine, store), rank, world_size
    deadline = time.monotonic() + timeout.total_seconds()
    greeted = ""
    while time.monotonic() < deadline:
        start = store.get("megatron_zpp/start").decode()
        if start != greeted:
            store.set(f"{start}/{rank}", mine)
            greeted = start
        if store.check([f"{start}/answers"]) and json.loads(store.get(f"{start}/answers")).get(str(rank)) == mine:
            return dist.PrefixStore(start, store), rank, world_size
        time.sleep(0.02)
    raise TimeoutError(
        f"rank {rank} did not hear from rank 0 in {timeout.total_seconds():.0f} s: look at rank 0's output, and if it "
        "only starts late, raise --distributed-timeout-minutes"
    )
